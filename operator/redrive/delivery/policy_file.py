"""Finds and reads the policy a consumer runs with, and follows it; called by the user's program."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from redrive.delivery.forking import call_in_children
from redrive.delivery.parts import Clock
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy import codec
from redrive.policy.model import Policy

VARIABLE = "REDRIVE_POLICY"
MOUNTED = "/etc/redrive/policy.json"
"""Where a pod finds the policy when the operator's ConfigMap is mounted at /etc/redrive."""

LOOK_EVERY_SECONDS = 1.0
"""How seldom a followed file is looked at, however many messages fail."""

_log = logging.getLogger(__name__)


class PolicyFileError(RedriveError):
    """There is no policy to be had from a file."""

    reason = "PolicyFile"


def load_policy(path: str | os.PathLike[str] | None = None) -> Policy:
    """Read the policy from *path*, else from the file that $REDRIVE_POLICY names, else `MOUNTED`.

    Raises:
        PolicyFileError: the file can't be read, or holds no policy that a consumer could obey.
    """
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
    """The policy in a file, read again when the file has changed.

    A consumer that is given one looks at the file when a message fails, at most once a second, and
    goes by what it finds: for that failure, and all later ones. A file that can't be used, or that
    is for another subscription, is logged as an error, and the policy read before stays in force.
    May be used by several threads.

    Args:
        path: found as by `load_policy`. In a mounted ConfigMap kubelet changes it; elsewhere
            replace the file in one step (write another, rename it).

    Raises:
        PolicyFileError: at first there must be a policy.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = _found(path)
        self._looking = threading.Lock()
        call_in_children(self._renew)
        self._looked: float | None = None
        self._stamp = self._look_at()
        self._policy = load_policy(self.path)

    def current(self, now: float) -> Policy:
        """Return the policy in force; *now* is in seconds, since any moment that stays the same."""
        with self._looking:
            if self._looked is None or now - self._looked >= LOOK_EVERY_SECONDS:
                self._looked = now
                stamp = self._look_at()
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._read_again()
            return self._policy

    def _renew(self) -> None:
        """Work in a forked child too, whose parent may have been reading the file."""
        self._looking = threading.Lock()

    def _look_at(self) -> tuple[int, int, int] | None:
        """Return what changes with the file, or with any link on the way to it."""
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
    """Return the policy that a consumer begins with; of a file, read again.

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
        remedy="give a path as PolicyFile(path), which is read again when it changes, or as "
        "load_policy(path)",
    )


def _found(path: str | os.PathLike[str] | None) -> str:
    return os.fspath(path or os.environ.get(VARIABLE) or MOUNTED)


def _subscribed(policy: Policy) -> tuple[object, ...]:
    return (
        policy.topic, policy.subscription, policy.subscription_type, policy.ordered,
        policy.retry_topic, policy.sequenced,
    )  # fmt: skip
