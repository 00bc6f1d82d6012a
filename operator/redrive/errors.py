"""Errors that code catches or users import; `redrive.reasons` has the reasons of all others.

Consumers import this module and not that table.
"""

from __future__ import annotations

import enum

PROCESS_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that concern the process or the running generator, never a single message."""

NOTHING = object()
"""Default of `got`: there is no value."""


class Requeue(enum.Enum):
    """The time at which an object is reconciled again."""

    ON_CHANGE = enum.auto()
    """After an event of a watch, a periodic check, or a change of another object."""
    BACKOFF = enum.auto()
    """After a back-off of 1 s that doubles up to 15 s, each shortened at random by up to half. A
    namespace has 20 to 40 of them a second: hundreds of failing objects wait longer."""
    SLOW_BACKOFF = enum.auto()
    """The same, up to 5 minutes: the cause is not expected to pass soon."""

    @property
    def result(self) -> str:
        """Return the result that metrics count."""
        return "success" if self is Requeue.ON_CHANGE else "requeue"


class RedriveError(Exception):
    """An error that a user or an administrator can fix.

    Args:
        problem: the problem, as a clause that names the field or the object.
        got: the value that was found instead; left out if there is none. Never a secret.
        remedy: the remedy, as an imperative.
        reason: the reason, if it is not that of the class.

    Attributes:
        reason: the reason of the conditions that show it, a member of `reasons.Reason`; another
            text for errors of consumers and jobs, which no condition shows.
        requeue: the time at which an object with this error is reconciled again; None for that of
            its reason.
        names_object: whether the message names an object of the connection's namespace, though its
            reason is not private.
    """

    reason: str = "InternalError"
    requeue: Requeue | None = None
    names_object: bool = False

    def __init__(
        self, problem: str, *, got: object = NOTHING, remedy: str, reason: str | None = None
    ) -> None:
        value = "" if got is NOTHING else f"; got {got!r}"
        super().__init__(f"{problem}{value}; {remedy}")
        if reason is not None:
            self.reason = reason


class InvalidSpecError(RedriveError):
    """An invalid value: the manifest or the call must change."""

    reason = "InvalidSpec"


class OwnerConflictError(RedriveError):
    """A topic belongs to another policy, which may be deleted.

    Args:
        owner: that policy, for the log of the operator; it is hidden from other namespaces.
    """

    reason = "OwnerConflict"

    def __init__(
        self, problem: str, *, owner: str, got: object, remedy: str, reason: str | None = None
    ) -> None:
        super().__init__(problem, got=got, remedy=remedy, reason=reason)
        self.owner = owner


_NAME = type.__dict__["__name__"]


def class_name(error: BaseException) -> str:
    """Return the name of the class of *error*, which a metaclass may hide."""
    name: str = _NAME.__get__(type(error))
    return name
