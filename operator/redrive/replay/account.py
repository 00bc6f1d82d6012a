"""Account of a Replay: numbers of messages by result, and their causes."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from redrive.policy.values import time_text
from redrive.reading import bitmap
from redrive.reading.ranges import Range
from redrive.replay.records import (
    RangePlan,
    RangeRecord,
    Records,
    RefusedEntry,
    RefusedMessage,
    unite,
)
from redrive.replay.spec import FOLLOWER, FailureCause

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
        doubled: moved messages of RocketMQ that the target may contain twice; None for Pulsar.
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
    doubled: int | None = None
    refusals: tuple[RefusedEntry | RefusedMessage, ...] = ()
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
        numbers: Counter[str] = Counter()
        for source_range, plan in plans.items():
            entries = acknowledged.get(source_range, bitmap.EMPTY)
            numbers.update(_of_range(plan, records.range(source_range), uid, entries))
        refusals = tuple(itertools.islice(_refusals(plans), SHOWN))
        return cls(**numbers, refusals=refusals, skipped_records=records.skipped)

    def to_status(self) -> dict[str, Any]:
        """Return fields of `status.run` of the Replay."""
        doubled = {} if self.doubled is None else {"doubled": self.doubled}
        return {
            "counts": {name: getattr(self, name) for name in _NUMBERS} | doubled,
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


def _of_range(
    plan: RangePlan, record: RangeRecord, uid: str, acknowledged: int
) -> Mapping[str, int]:
    moved = plan.selected & record.moved.get(uid, 0)
    skipped = plan.selected & ~moved & (plan.skipped | moved_by_others(record, uid))
    if record.leased:
        moved |= plan.selected & acknowledged & ~skipped
    return {
        "scanned": plan.scanned,
        "matched": plan.matched,
        "moved": plan.messages(moved),
        "skipped": plan.messages(skipped),
        "refused": sum(refusal.messages for refusal in plan.refused),
        "left": plan.messages(plan.selected & ~moved & ~skipped),
        "unevaluated": plan.unevaluated,
        "discarded": plan.discarded,
        "batched": plan.batched(plan.selected & ~skipped),
    }


def _refusals(plans: Mapping[Range, RangePlan]) -> Iterator[RefusedEntry]:
    for source_range in sorted(plans):
        yield from plans[source_range].refused


CAUSES = 100
"""Maximum number of counted causes, because any client may write causes."""
MAX_CAUSES = 10_000
"""Maximum number of causes while a range is planned, which bounds its memory. Above it, the less
frequent half is dropped, so their later messages may be counted without earlier ones."""


class CauseFigures(NamedTuple):
    """Figures of the messages with one cause.

    Attributes:
        messages: number of messages.
        replayed: number of these that were replayed before, and died again.
        first: first publish time, in milliseconds since 1970, like *last*.
    """

    messages: int
    replayed: int
    first: int
    last: int


Causes = Mapping[FailureCause, CauseFigures]


def add_cause(
    causes: dict[FailureCause, CauseFigures], failure: FailureCause, figures: CauseFigures
) -> None:
    """Add figures of a cause."""
    before = causes.get(failure)
    if before is not None:
        figures = CauseFigures(
            before.messages + figures.messages,
            before.replayed + figures.replayed,
            min(before.first, figures.first),
            max(before.last, figures.last),
        )
    causes[failure] = figures


def count_message(
    causes: dict[FailureCause, CauseFigures], failure: FailureCause, replays: int, published: int
) -> None:
    """Add a message with a cause: the number of its Replays, and its publish time."""
    replayed = 1 if replays else 0
    before = causes.get(failure)
    if before is None:
        causes[failure] = CauseFigures(1, replayed, published, published)
        return
    messages, earlier, first, last = before
    causes[failure] = CauseFigures(
        messages + 1,
        earlier + replayed,
        min(first, published),
        max(last, published),
    )


def frequent_causes(parts: Iterable[Causes], limit: int = CAUSES) -> Causes:
    """Return the most frequent causes of several parts together."""
    total: dict[FailureCause, CauseFigures] = {}
    for part in parts:
        for failure, figures in part.items():
            add_cause(total, failure, figures)
    ordered = sorted(total.items(), key=lambda item: item[1].messages, reverse=True)
    return dict(ordered[:limit])


MAX_LEADERS = 10_000
"""Maximum number of keys with a dead letter that are remembered for a range."""


class Leaders:
    """Dead letters of one range that others of their key follow.

    Attributes:
        causes: their causes by hash of the key; at most *limit*.
        limit: 0 if no key is remembered.
    """

    def __init__(self, limit: int = MAX_LEADERS) -> None:
        self.causes: dict[str, FailureCause] = {}
        self.limit = limit

    def counted(self, failure: FailureCause, key: str | None, *, follows: bool) -> FailureCause:
        """Return the cause with which a message counts; call it in the order of messages.

        If a message follows a dead letter of another range, the fingerprint is the hash of its key,
        see `counted_causes`.
        """
        if key is None or not self.limit:
            return failure
        name = hashlib.blake2b(key.encode(errors="replace"), digest_size=8).hexdigest()
        if follows:
            unknown = failure if failure.cause else FOLLOWER._replace(fingerprint=name)
            return self.causes.get(name, unknown)
        if name in self.causes or len(self.causes) < self.limit:
            self.causes[name] = failure
        return failure


class CountedRange(Protocol):
    """Range with the causes of its messages."""

    @property
    def range(self) -> Range:
        """Return the range."""

    @property
    def causes(self) -> Causes:
        """Return figures by cause."""

    @property
    def leaders(self) -> Mapping[str, FailureCause]:
        """Return `Leaders.causes`."""


def counted_causes(parts: Iterable[CountedRange], limit: int = CAUSES) -> Causes:
    """Return the most frequent causes; messages count with the dead letter that they follow."""
    total: dict[FailureCause, CauseFigures] = {}
    leaders: dict[str, FailureCause] = {}
    for part in sorted(parts, key=lambda part: part.range):
        for failure, figures in part.causes.items():
            follows = failure.cause == FOLLOWER.cause
            led = leaders.get(failure.fingerprint, FOLLOWER) if follows else failure
            add_cause(total, led, figures)
        leaders |= part.leaders
    return frequent_causes((total,), limit)


def shown_causes(causes: Causes) -> list[dict[str, Any]]:
    """Return causes as a list of the Replay's status."""
    shown = []
    for failure, figures in causes.items():
        optional = {
            "fingerprint": failure.fingerprint or None,
            "firstTime": time_text(figures.first) if figures.first else None,
            "lastTime": time_text(figures.last) if figures.last else None,
        }
        shown.append(
            {
                "cause": failure.cause,
                "messages": figures.messages,
                "replayed": figures.replayed,
                **{name: value for name, value in optional.items() if value is not None},
            }
        )
    return shown


def counts(counted: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return numbers by cause as a list of the Replay's status."""
    return [{"cause": cause, "messages": n} for cause, n in counted.items()]


def drop_rare(causes: dict[FailureCause, CauseFigures]) -> None:
    """Drop the less frequent half of *causes* if there are more than `MAX_CAUSES`."""
    if len(causes) > MAX_CAUSES:
        kept = frequent_causes((causes,), MAX_CAUSES // 2)
        causes.clear()
        causes.update(kept)
