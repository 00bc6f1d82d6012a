"""What redrive refuses, or fails at: one shallow family, and what a reconcile does about each.

An error has the *reason* that a Kubernetes condition shows for it, and a message in three parts:
what is wrong, what was found, what to do. All layers raise these; `provision` and `replay` turn
them into conditions, the command line into one line on standard error.
"""

from __future__ import annotations

import enum
from typing import ClassVar

_NOTHING = object()

PROCESS_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that concern the process, or the generator that runs, and never a single message."""


class Requeue(enum.Enum):
    """When an object is reconciled again."""

    ON_CHANGE = enum.auto()
    """When a watch, a resync or another object has a reason for it."""
    BACKOFF = enum.auto()
    """After a back-off of 1 s that doubles up to 15 s, each shortened at random by up to half."""
    SLOW_BACKOFF = enum.auto()
    """The same, but up to 5 minutes: what keeps the object from being ready stays for now."""

    @property
    def result(self) -> str:
        """Return what metrics count it as."""
        return "success" if self is Requeue.ON_CHANGE else "requeue"


class RedriveError(Exception):
    """Something is wrong that a user or an administrator can fix.

    Args:
        problem: what is wrong, as a clause that names the field or thing concerned.
        got: what was found instead; left out where there is nothing to show. Never a secret.
        remedy: what to do about it.

    Attributes:
        reason: of the conditions that show it.
        stalls: whether an object stays like that until its spec, or its surroundings, are changed.
        requeue: when an object that it keeps from being ready is reconciled again.
        private: whether the message names Secrets, keys or invalid values of a connection, which
            only objects of the connection's own namespace show.
    """

    reason: ClassVar[str] = "InternalError"
    stalls: ClassVar[bool] = False
    requeue: ClassVar[Requeue] = Requeue.BACKOFF
    private: bool = False

    def __init__(self, problem: str, *, got: object = _NOTHING, remedy: str) -> None:
        found = "" if got is _NOTHING else f"; got {got!r}"
        super().__init__(f"{problem}{found}; {remedy}")


class InvalidSpecError(RedriveError):
    """A value that no broker state can make right: the manifest or the call has to change."""

    reason = "InvalidSpec"
    stalls = True
    requeue = Requeue.ON_CHANGE
