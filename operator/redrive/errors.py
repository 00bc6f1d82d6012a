"""Errors that code catches or users import; `redrive.reasons` has the reasons of all others."""

from __future__ import annotations

from redrive.reasons import Reason, RedriveError, Requeue

__all__ = ["PROCESS_ERRORS", "InvalidSpecError", "OwnerConflictError", "RedriveError", "Requeue"]

PROCESS_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that concern the process or the running generator, never a single message."""


class InvalidSpecError(RedriveError):
    """An invalid value: the manifest or the call must change."""

    reason = Reason.INVALID_SPEC


class OwnerConflictError(RedriveError):
    """A topic belongs to another policy, which may be deleted.

    Args:
        owner: that policy, for the log of the operator; it is hidden from other namespaces.
    """

    reason = Reason.OWNER_CONFLICT

    def __init__(
        self, problem: str, *, owner: str, got: object, remedy: str, reason: Reason | None = None
    ) -> None:
        super().__init__(problem, got=got, remedy=remedy, reason=reason)
        self.owner = owner
