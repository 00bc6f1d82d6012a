"""What has become of what a Replay selected: one equation. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redrive.replay.ledger.records import RangePlan, RangeRecord, Records, RefusedEntry, unite
from redrive.replay.topic import bitmap
from redrive.replay.topic.ranges import Range

SHOWN = 100
_NUMBERS = (
    "scanned", "matched", "moved", "skipped", "refused", "left", "unevaluated", "discarded"
)  # fmt: skip


@dataclass(frozen=True)
class Account:
    """Numbers of messages; `matched` = `moved` + `skipped` + `refused` + `discarded` + `left`.

    Of `scanned`, `unevaluated` are not among `matched`.

    Attributes:
        scanned: how many rested when the run was planned.
        matched: how many of these were selected.
        moved: stored in the target by this Replay, once, whichever of its attempts did it.
        skipped: not moved because there was no need: another Replay had moved them before, or they
            were acknowledged by others after the run was planned.
        refused: can't be moved; they stay where they are.
        left: yet to be moved.
        discarded: acknowledged without being moved, as no client can show them.
        unevaluated: not selected because the condition can't be computed for them; they stay where
            they are.
        refusals: the first of what was refused.
    """

    scanned: int = 0
    matched: int = 0
    moved: int = 0
    skipped: int = 0
    refused: int = 0
    left: int = 0
    unevaluated: int = 0
    discarded: int = 0
    refusals: tuple[RefusedEntry, ...] = ()

    @classmethod
    def of(
        cls, uid: str, records: Records, acknowledged: Mapping[Range, int] = MappingProxyType({})
    ) -> Account:
        """Draw up the account of a Replay that has a plan.

        Args:
            uid: the Replay's.
            records: of the ledger.
            acknowledged: what was seen to be acknowledged since a range was leased, a bitmap. While
                the lease lasts that is moved, though not on record yet.
        """
        plans = records.plans.get(uid, {})
        parts = [
            _of_range(plan, records.range(of), uid, acknowledged.get(of, bitmap.EMPTY))
            for of, plan in plans.items()
        ]
        numbers = dict.fromkeys(_NUMBERS, 0)
        for part in parts:
            for name, number in zip(_NUMBERS, part, strict=True):
                numbers[name] += number
        return cls(**numbers, refusals=tuple(itertools.islice(_refusals(plans), SHOWN)))

    def to_status(self) -> dict[str, Any]:
        """Write it as fields of the Replay's status."""
        return {
            "scanned": self.scanned,
            "matched": self.matched,
            "unevaluated": self.unevaluated,
            "moved": self.moved,
            "skipped": self.skipped,
            "refused": self.refused,
            "discarded": self.discarded,
            "left": self.left,
            "refusals": [
                {"entry": str(entry), "messages": messages, "cause": cause}
                for entry, messages, cause in self.refusals
            ],
        }


def moved_by_others(record: RangeRecord, uid: str) -> int:
    """Return what has been moved, but not by Replay *uid*."""
    others = unite(bits for other, bits in record.moved.items() if other != uid)
    return others & ~record.moved.get(uid, 0)


def _of_range(plan: RangePlan, record: RangeRecord, uid: str, acknowledged: int) -> tuple[int, ...]:
    moved = plan.selected & record.moved.get(uid, 0)
    skipped = plan.selected & ~moved & (plan.skipped | moved_by_others(record, uid))
    if record.leased:
        moved |= plan.selected & acknowledged & ~skipped
    return (
        plan.scanned,
        plan.matched,
        plan.messages(moved),
        plan.messages(skipped),
        sum(refusal.messages for refusal in plan.refused),
        plan.messages(plan.selected & ~moved & ~skipped),
        plan.unevaluated,
        plan.discarded,
    )


def _refusals(plans: Mapping[Range, RangePlan]) -> Iterator[RefusedEntry]:
    for of in sorted(plans):
        yield from plans[of].refused
