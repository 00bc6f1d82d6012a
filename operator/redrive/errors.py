"""Errors that code catches or users import; `redrive.reasons` has the reasons of all others."""

from __future__ import annotations

from redrive.reasons import Reason, RedriveError, Requeue

__all__ = ["PROCESS_ERRORS", "InvalidSpecError", "OwnerConflictError", "RedriveError", "Requeue"]

PROCESS_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that concern the process, or the generator that runs, and never a single message."""


class InvalidSpecError(RedriveError):
    """A value that no broker state can make right: the manifest or the call has to change."""

    reason = Reason.INVALID_SPEC


class OwnerConflictError(RedriveError):
    """A topic belongs to another policy, which may be deleted.

    Args:
        owner: that policy, for the log of the operator; objects of other namespaces hide it.
    """

    reason = Reason.OWNER_CONFLICT

    def __init__(
        self, problem: str, *, owner: str, got: object, remedy: str, reason: Reason | None = None
    ) -> None:
        super().__init__(problem, got=got, remedy=remedy, reason=reason)
        self.owner = owner
