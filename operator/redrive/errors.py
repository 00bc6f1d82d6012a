"""Everything redrive refuses or fails at, as one shallow family.

Each error carries the *reason* that a Kubernetes condition shows for it, and a message in three
parts: what is wrong, what was got, what to do. Every layer raises these; `provision` and `replay`
turn them into conditions, the command line into one line on standard error.
"""

from __future__ import annotations

from typing import ClassVar

_NOTHING = object()


class RedriveError(Exception):
    """Something is wrong that its reader can mend.

    Args:
        problem: what is wrong, as a clause that names the field or thing concerned.
        got: what was found instead; left out where there is nothing to show. Never a secret.
        remedy: what to do about it.
    """

    reason: ClassVar[str] = "InternalError"

    def __init__(self, problem: str, *, got: object = _NOTHING, remedy: str) -> None:
        found = "" if got is _NOTHING else f"; got {got!r}"
        super().__init__(f"{problem}{found}; {remedy}")


class InvalidSpecError(RedriveError):
    """A value that no broker state can make right: the manifest or the call has to change."""

    reason = "InvalidSpec"
