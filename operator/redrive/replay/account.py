"""Account of a Replay: numbers of messages by result."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from redrive.reading import bitmap
from redrive.reading.ranges import Range
from redrive.replay.records import RangePlan, RangeRecord, Records, RefusedEntry, unite

SHOWN = 100
_NUMBERS = (
    "scanned", "matched", "moved", "skipped", "refused", "left", "unevaluated", "discarded",
    "batched",
)  # fmt: skip


@dataclass(frozen=True)
class Account:
    """Numbers of messages; `matched` = `moved` + `skipped` + `refused` + `discarded` + `left`.

    `scanned` includes `unevaluated`, and `matched` does not. `moved` and `left` include `batched`.

    Attributes:
        scanned: unacknowledged messages when the run was planned.
        matched: selected messages.
        moved: messages that this Replay stored in the target once, in any of its runs.
        skipped: messages that another Replay had moved, or that others acknowledged after the plan.
        refused: messages that cannot be moved, and stay in the dead-letter topic.
        left: messages that are not moved yet.
        unevaluated: messages for which the condition could not be computed. They stay.
        discarded: messages that were acknowledged without a move, because no client can show them.
        batched: moved or left messages that are stored in batches. Consumers may have acknowledged
            some of them individually, because the broker shows acknowledgements of entries only.
        refusals: the first `SHOWN` refused entries.
        skipped_records: see `Records.skipped`.
    """

    scanned: int = 0
    matched: int = 0
    moved: int = 0
    skipped: int = 0
    refused: int = 0
    left: int = 0
    unevaluated: int = 0
    discarded: int = 0
    batched: int = 0
    refusals: tuple[RefusedEntry, ...] = ()
    skipped_records: int = 0

    @classmethod
    def of(
        cls, uid: str, records: Records, acknowledged: Mapping[Range, int] = MappingProxyType({})
    ) -> Account:
        """Return the account of a Replay that has a plan.

        Args:
            uid: uid of the Replay.
            records: records of the ledger.
            acknowledged: bitmap of entries that were acknowledged since a range was leased. During
                the lease they count as moved, although they are not recorded yet.
        """
        plans = records.plans.get(uid, {})
        parts = []
        for source_range, plan in plans.items():
            entries = acknowledged.get(source_range, bitmap.EMPTY)
            parts.append(_of_range(plan, records.range(source_range), uid, entries))
        numbers = dict.fromkeys(_NUMBERS, 0)
        for part in parts:
            for name, number in zip(_NUMBERS, part, strict=True):
                numbers[name] += number
        refusals = tuple(itertools.islice(_refusals(plans), SHOWN))
        return cls(**numbers, refusals=refusals, skipped_records=records.skipped)

    def to_status(self) -> dict[str, Any]:
        """Return fields of `status.run` of the Replay."""
        return {
            "counts": {name: getattr(self, name) for name in _NUMBERS},
            "progress": f"{self.matched - self.left}/{self.matched}",
            "refusals": [
                {"entry": str(entry), "messages": messages, "cause": cause}
                for entry, messages, cause in self.refusals
            ],
            "skippedRecords": self.skipped_records or None,
        }


def moved_by_others(record: RangeRecord, uid: str) -> int:
    """Return the entries that other Replays than *uid* have moved."""
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
        plan.batched(plan.selected & ~skipped),
    )


def _refusals(plans: Mapping[Range, RangePlan]) -> Iterator[RefusedEntry]:
    for source_range in sorted(plans):
        yield from plans[source_range].refused
