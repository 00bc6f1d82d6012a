"""What a run lets its tasks do, for as long as their leases last. Pure.

A driver has no channel to tasks that run but the ledger, which each of them reads before it sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

PERMIT = "permit"
"""The key of its record."""


@dataclass(frozen=True)
class Permit:
    """What one task may do.

    Attributes:
        rate: how many messages a second it may send; None for as many as it can.
        drain: whether to end: what is on its way is settled, nothing more is sent.
    """

    rate: float | None = None
    drain: bool = False

    def to_json(self) -> dict[str, Any]:
        """Write it."""
        return {"rate": self.rate, "drain": self.drain}

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(written["rate"], written["drain"])
