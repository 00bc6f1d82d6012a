"""What a read covers → the slices that tasks read. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay.topic import ranges
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import NOWHERE, EntryId, Position
from redrive.replay.topic.spans import Span
from redrive.spark.filters import Filters
from redrive.spark.offsets import BEGINNING, WHOLE

SLICE_ENTRIES = 10_000
"""About so many entries make up a task, where the broker says how many there are."""


class DataLossError(RedriveError):
    """The broker does not have all that was to be read."""

    reason: ClassVar[str] = "DataLoss"


@dataclass(frozen=True)
class Extent:
    """What one partition holds when a read is planned.

    Attributes:
        topic: the partition, or a topic without any.
        partition: what is known of it; without `admin.url` only where it ends.
        complete: whether it has all ledgers, with their entries.
    """

    topic: TopicName
    partition: Partition
    complete: bool = True

    @property
    def begin(self) -> Position:
        """Return the position behind which lies all there is.

        It names the first ledger, if that is known and has entries: so it is found out when that
        is deleted before it was read. One without entries may be, whenever the topic is loaded.
        """
        if not self.complete or not self.partition.ledgers:
            return BEGINNING
        first, _ = self.partition.ledgers[0]
        return Position(first, -1, WHOLE)

    @property
    def end(self) -> Position:
        """Return the position up to which it reaches."""
        return Position(*self.partition.end, WHOLE)

    @property
    def tail(self) -> Position:
        """Return the position behind which lies all that is written from now on."""
        return max(self.end, Position(*self.partition.tail, WHOLE))


class Slice(NamedTuple):
    """What one task reads of one partition: from behind a position up to another, inclusive.

    Attributes:
        topic: the partition, or a topic without any.
        partition: its index; -1 without.
        begin: behind which entry to begin reading, for the chunks of the first messages.
        spans: the entries of which it has messages, in order; where the broker does not tell of
            ledgers, those in the last one alone.
        entry_bytes: their average size.
    """

    topic: TopicName
    partition: int
    begin: EntryId
    behind: Position
    through: Position
    spans: tuple[Span, ...]
    entry_bytes: float

    def holds(self, position: Position) -> bool:
        """Whether a message belongs to it."""
        return self.behind < position <= self.through


def cut(extent: Extent, behind: Position, through: Position, filters: Filters) -> Iterator[Slice]:
    """Cut what lies behind one position, up to another inclusive, as far as *filters* keep it."""
    through = min(through, extent.end)
    if behind >= through or not filters.keep_partition(extent.topic, extent.partition.index):
        return
    if not extent.complete:
        yield _unknown(extent, behind, through)
        return
    together: list[Span] = []
    entries = 0
    for span in _spans(extent, behind, through, filters):
        full = entries >= SLICE_ENTRIES
        if together and (full or not _follows(extent.partition, together[-1], span)):
            yield _slice(extent, together, behind, through)
            together, entries = [], 0
        together.append(span)
        entries += span.size
    if together:
        yield _slice(extent, together, behind, through)


def check_held(extent: Extent, behind: Position) -> None:
    """Check that nothing is gone between what was read and what the broker holds.

    Without knowing the ledgers nothing is found.

    Raises:
        DataLossError: the ledger is gone, in which the reading would go on, or it ends before that.
    """
    if not extent.complete or behind == BEGINNING:
        return
    held = extent.partition.held
    if (behind.ledger not in held and not _is_kept(extent, behind)) or behind > extent.tail:
        raise DataLossError(
            f"{extent.topic} does not hold what follows on {behind.entry_id} any more, "
            "or it is another topic of this name",
            got=f"ledgers {min(held, default=None)} to {max(held, default=None)}",
            remedy="keep what is not read yet by a subscription (predefinedSubscription) or by "
            "retention; to go on with what there is, set failOnDataLoss to false",
        )


def _is_kept(extent: Extent, behind: Position) -> bool:
    """Whether a subscription has kept all that follows: ledgers go when it has passed them."""
    return NOWHERE < extent.partition.acknowledged.through <= behind.entry_id


def first_unread(behind: Position) -> int:
    """Return the first entry, in its ledger, of which something lies behind a position."""
    return behind.entry + (behind.batch_index == WHOLE)


def _spans(extent: Extent, behind: Position, through: Position, filters: Filters) -> Iterator[Span]:
    """Return what is to be read of each ledger, in parts of bounded size."""
    for ledger, entries in extent.partition.ledgers:
        low, high = filters.entries(ledger)
        high = min(high, entries - 1)
        if ledger == behind.ledger:
            low = max(low, first_unread(behind))
        if ledger == through.ledger:
            high = min(high, through.entry)
        if behind.ledger <= ledger <= through.ledger:
            for first in range(low, high + 1, SLICE_ENTRIES):
                yield Span(ledger, first, min(high, first + SLICE_ENTRIES - 1))


def _follows(partition: Partition, one: Span, other: Span) -> bool:
    """Whether nothing lies between two spans."""
    if one.ledger == other.ledger:
        return one.last + 1 == other.first
    ledgers = partition.ledgers
    at = bisect.bisect_left(ledgers, (one.ledger, 0))
    return (
        ledgers[at] == (one.ledger, one.last + 1)
        and ledgers[at + 1][0] == other.ledger
        and other.first == 0
    )


def _slice(extent: Extent, spans: list[Span], behind: Position, through: Position) -> Slice:
    first, last = spans[0], spans[-1]
    return Slice(
        extent.topic,
        extent.partition.index,
        ranges.look_back(extent.partition, EntryId(first.ledger, first.first)),
        max(behind, Position(first.ledger, first.first - 1, WHOLE)),
        min(through, Position(last.ledger, last.last, WHOLE)),
        tuple(spans),
        extent.partition.entry_bytes,
    )


def _unknown(extent: Extent, behind: Position, through: Position) -> Slice:
    back = EntryId(behind.ledger, max(-1, behind.entry - ranges.LOOK_BACK))
    begin = NOWHERE if behind == BEGINNING else back
    partition = extent.partition
    there = first_unread(behind) if through.ledger == behind.ledger else 0
    span = Span(through.ledger, there, through.entry)
    return Slice(
        extent.topic, partition.index, begin, behind, through, (span,), partition.entry_bytes
    )
