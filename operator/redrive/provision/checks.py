"""Ordered, named checks on gathered facts; pure.

Each check is named for the violation it finds, and returns it as the error whose reason and
message the policy's conditions show, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from redrive.errors import RedriveError

F = TypeVar("F")


class Checks(Generic[F]):
    """Checks on the same facts, in order."""

    def __init__(self, *checks: Callable[[F], RedriveError | None]) -> None:
        self._checks = checks

    def first_violation(self, facts: F) -> RedriveError | None:
        """Return what the first check that fails has found, or None."""
        return next((error for check in self._checks if (error := check(facts)) is not None), None)

    def check(self, facts: F) -> None:
        """Raise what the first check that fails has found."""
        error = self.first_violation(facts)
        if error is not None:
            raise error
