"""The policy of a consumer, read from a file and followed; used by programs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from redrive.delivery.concurrency import log_of
from redrive.delivery.forking import call_in_children
from redrive.delivery.parts import Clock
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.model import Policy

VARIABLE = "REDRIVE_POLICY"
MOUNTED = "/etc/redrive/policy.json"
"""Path of the policy if the operator's ConfigMap is mounted at /etc/redrive."""

LOOK_EVERY_SECONDS = 1.0
"""Shortest interval of checks of a followed file."""

_log = log_of(__name__)


class PolicyFileError(RedriveError):
    """A file contains no usable policy."""

    reason = "PolicyFile"


def load_policy(path: str | os.PathLike[str] | None = None) -> Policy:
    """Read the policy from *path*, else from the file in $REDRIVE_POLICY, else from `MOUNTED`.

    Raises:
        PolicyFileError: the file cannot be read, or contains no valid policy.
    """
    from redrive.policy import codec  # noqa: PLC0415 - a policy made by a program needs none

    file = _found(path)
    try:
        with open(file, encoding="utf-8") as written:
            return codec.decode(written.read())
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyFileError(
            f"the policy file {file} can't be read",
            got=str(error),
            remedy=f"mount the ConfigMap of the RetryPolicy at {os.path.dirname(MOUNTED)}, "
            f"or name the file as an argument or in ${VARIABLE}",
        ) from error
    except InvalidSpecError as error:
        raise PolicyFileError(
            f"the policy file {file} can't be used: {error}",
            remedy=f"or name another one as an argument or in ${VARIABLE}",
        ) from error


class PolicyFile:
    """The policy in a file, which is read again when it changes.

    A consumer checks the file when a message fails, at most once a second, and applies a changed
    policy to this and later failures. An invalid file, or one for another subscription, is logged
    as an error, and the previous policy stays in force. May be used by several threads.

    Args:
        path: as for `load_policy`. The kubelet changes a mounted ConfigMap; otherwise replace the
            file in one step (write another file, and rename it).

    Raises:
        PolicyFileError: the file contains no valid policy at the start.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = _found(path)
        self._looking = threading.Lock()
        call_in_children(self._renew)
        self._looked: float | None = None
        self._stamp = self._look_at()
        self._policy = load_policy(self.path)

    def current(self, now: float) -> Policy:
        """Return the policy in force; *now* is in seconds since a fixed moment."""
        if self._looked is not None and now - self._looked < LOOK_EVERY_SECONDS:
            return self._policy
        with self._looking:
            if self._looked is None or now - self._looked >= LOOK_EVERY_SECONDS:
                stamp = self._look_at()
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._read_again()
                self._looked = now  # last: other threads look at it without the lock
            return self._policy

    def _renew(self) -> None:
        """Replace the lock in a forked child, because the parent may hold it."""
        self._looking = threading.Lock()

    def _look_at(self) -> tuple[int, int, int] | None:
        """Return a value that changes with the file, or with a link to it."""
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read_again(self) -> None:
        before = self._policy
        try:
            policy = load_policy(self.path)
        except PolicyFileError as error:
            _log.error("%s; generation %d stays in force", error, before.generation)
            return
        if _subscribed(policy) != _subscribed(before):
            _log.error(
                "the policy file %s is for other topics now: restart the consumer to "
                "follow it; generation %d of %s stays in force",
                self.path, before.generation, before.name,
            )  # fmt: skip
            return
        self._policy = policy
        _log.info(
            "policy %s: generation %d in place of %d",
            policy.name, policy.generation, before.generation,
        )  # fmt: skip


def in_force(policy: Policy | PolicyFile, clock: Clock) -> Callable[[], Policy]:
    """Return a function of the policy in force.

    Raises:
        InvalidSpecError: *policy* is neither of the two.
    """
    file = _checked(policy)
    if isinstance(file, Policy):
        return lambda: file
    return lambda: file.current(clock.monotonic())


def at_first(policy: Policy | PolicyFile) -> Policy:
    """Return the policy at the start of a consumer; a file is read again.

    Raises:
        InvalidSpecError: *policy* is neither of the two.
    """
    policy = _checked(policy)
    return policy if isinstance(policy, Policy) else load_policy(policy.path)


def _checked(policy: Policy | PolicyFile) -> Policy | PolicyFile:
    if isinstance(policy, (Policy, PolicyFile)):
        return policy
    raise InvalidSpecError(
        "a consumer needs a Policy or a PolicyFile",
        got=policy,
        remedy="pass PolicyFile(path), which is read again when it changes, or load_policy(path)",
    )


def _found(path: str | os.PathLike[str] | None) -> str:
    if not isinstance(path, str | os.PathLike | None):
        raise PolicyFileError(
            "a policy file is given by its path",
            got=path,
            remedy=f"pass a path such as {MOUNTED!r}, or a Policy itself to the consumer",
        )
    return os.fspath(path or os.environ.get(VARIABLE) or MOUNTED)


def _subscribed(policy: Policy) -> tuple[object, ...]:
    return (
        policy.topic, policy.subscription, policy.subscription_type, policy.ordered,
        policy.retry_topic, policy.sequenced,
    )  # fmt: skip
