"""Ranges of entries of a partition, and the state of a partition by a broker's statistics. Pure.

Runs move pending dead letters by ranges. A range is a function of positions alone, so every Replay,
and every attempt of one, divides a topic in the same way: the ledger has records by range, and the
names of producers contain ranges. A `Span` is consecutive entries to read, or that were read.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from redrive.errors import RedriveError
from redrive.policy.naming import cursor_name
from redrive.reading import bitmap
from redrive.reading.positions import NOWHERE, EntryId, Position

SUBSCRIPTION_MISSING = "SubscriptionMissing"
"""Reason of a topic without the subscription."""
MAX_RANGE_ENTRIES = 8 * bitmap.MAX_BYTES
RANGE_ENTRIES = 10_000
"""Number of entries of a range; below 2¹⁴, see `positions.sequence_id`."""
LOOK_BACK = 100
"""Number of entries that are also read before a range: chunks of a message that ends in it, and the
entries between them."""


class Range(NamedTuple):
    """Entries of one ledger of one partition, from *first* to *last*, both included."""

    partition: int
    ledger: int
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """Return the range that `str` wrote.

        Raises:
            ValueError: *text* is something else, or spans more entries than a range.
        """
        partition, ledger, first, last = map(int, text.split("."))
        if not first <= last < first + MAX_RANGE_ENTRIES:
            msg = f"no range: {text}"
            raise ValueError(msg)
        return cls(partition, ledger, first, last)

    @classmethod
    def of(cls, partition: int, position: Position) -> Range:
        """Return the range of a message."""
        first = position.entry - position.entry % RANGE_ENTRIES
        return cls(partition, position.ledger, first, first + RANGE_ENTRIES - 1)

    def __str__(self) -> str:
        return f"{self.partition}.{self.ledger}.{self.first}.{self.last}"

    def holds(self, position: Position) -> bool:
        """Return True if the range contains a message of this partition."""
        return position.ledger == self.ledger and self.first <= position.entry <= self.last

    def entry_id(self, offset: int) -> EntryId:
        """Return the entry at *offset* from the first."""
        return EntryId(self.ledger, self.first + offset)

    def offsets(self, entries: Iterable[tuple[int, int]]) -> int:
        """Return those of *entries* of this partition that it contains, as a bitmap of offsets."""
        offsets = (
            entry - self.first
            for ledger, entry in entries
            if ledger == self.ledger and self.first <= entry <= self.last
        )
        return bitmap.of(offsets, self.size)

    @property
    def size(self) -> int:
        """Return the number of its entries."""
        return self.last - self.first + 1


class Piece(NamedTuple):
    """A range with its pending entries: not acknowledged, and not after the end of a run.

    Attributes:
        pending: offsets of the pending entries, as a bitmap.
        after: entry after which reading begins.
    """

    range: Range
    pending: int
    after: EntryId


def cut(partition: Partition, end: EntryId) -> Iterator[Piece]:
    """Divide *partition* into ranges, without those that have no pending entry up to *end*."""
    for ledger, entries in partition.ledgers:
        if ledger > end.ledger:
            return
        last = min(entries - 1, end.entry) if ledger == end.ledger else entries - 1
        for first in range(0, last + 1, RANGE_ENTRIES):
            piece = Range(partition.index, ledger, first, first + RANGE_ENTRIES - 1)
            stored = bitmap.span(0, min(piece.last, last) - first)
            pending = stored & ~settled(piece, partition)
            if pending:
                after = look_back(partition, piece.entry_id(bitmap.lowest(pending)))
                yield Piece(piece, pending, after)


def narrowed(piece: Piece, partition: Partition, entries: int) -> Piece | None:
    """Return *piece* with the pending entries among *entries*, a bitmap; None without any."""
    pending = piece.pending & entries
    if not pending:
        return None
    after = look_back(partition, piece.range.entry_id(bitmap.lowest(pending)))
    return Piece(piece.range, pending, after)


def settled(piece: Range, partition: Partition) -> int:
    """Return the acknowledged entries of *piece*, as a bitmap of offsets."""
    done = partition.acknowledged
    bits = _overlap(piece, EntryId(piece.ledger, -1), done.through)
    for after, last in done.overlapping(piece.entry_id(0), piece.entry_id(piece.size - 1)):
        bits |= _overlap(piece, after, last)
    return bits


def all_pieces(partitions: Sequence[Partition]) -> list[Piece]:
    """Divide all pending entries, up to the current end of each partition."""
    return [piece for partition in partitions for piece in cut(partition, partition.end)]


def look_back(partition: Partition, entry: EntryId, entries: int | None = None) -> EntryId:
    """Return the entry before *entry* and so many *entries* before it, by default `LOOK_BACK`."""
    missing = LOOK_BACK if entries is None else entries
    for ledger, size in reversed(partition.ledgers):
        before = entry.entry if ledger == entry.ledger else size
        if ledger <= entry.ledger:
            if before >= missing:
                return EntryId(ledger, before - missing - 1)
            missing -= before
    oldest = partition.ledgers[0][0] if partition.ledgers else entry.ledger
    return EntryId(oldest, -1)


def look_ahead(partition: Partition, entry: EntryId, entries: int) -> EntryId:
    """Return the last of so many *entries* after *entry*, or the last one of the partition."""
    for span in partition.behind(entry):
        if span.size >= entries:
            return EntryId(span.ledger, span.first + entries - 1)
        entries -= span.size
    return max(entry, partition.end)


def _overlap(piece: Range, after: EntryId, last: EntryId) -> int:
    """Return the entries after *after* up to *last*."""
    low = max(piece.first, after.entry + 1 if after.ledger == piece.ledger else piece.first)
    high = min(piece.last, last.entry if last.ledger == piece.ledger else piece.last)
    covers = after.ledger <= piece.ledger <= last.ledger
    return bitmap.span(low - piece.first, high - piece.first) if covers else bitmap.EMPTY


@dataclass(frozen=True)
class Acknowledged:
    """The entries that a subscription has settled.

    Attributes:
        through: this entry and all before it.
        ranges: entries after the first of a pair, up to the second, in order, in the broker's text
            form: there may be hundreds of thousands, of which few are needed.
    """

    through: EntryId = NOWHERE
    ranges: str = ""

    def overlapping(self, first: EntryId, last: EntryId) -> Iterator[tuple[EntryId, EntryId]]:
        """Yield the ranges with any of the entries from *first* to *last*, in order."""
        for match in _RANGE.finditer(self.ranges, self._begin(first)):
            pair = EntryId.parse(match[1]), EntryId.parse(match[2])
            if pair[0] >= last:
                return
            yield pair

    def _begin(self, first: EntryId) -> int:
        """Return the position in the text after all ranges that end before *first*."""
        low, high = 0, len(self.ranges)
        while low < high:
            middle = (low + high) // 2
            match = _RANGE.search(self.ranges, middle)
            if match is None or EntryId.parse(match[2]) >= first:
                high = middle
            else:
                low = match.end()
        return low

    @classmethod
    def from_cursor(cls, cursor: Mapping[str, Any]) -> Acknowledged:
        """Read a cursor of a broker's `internalStats`."""
        through = EntryId.parse(cursor["markDeletePosition"])
        return cls(through, cursor["individuallyDeletedMessages"])


@dataclass(frozen=True)
class Partition:
    """One partition of a topic.

    Attributes:
        index: `broker.UNPARTITIONED` for a topic without partitions.
        ledgers: id and number of entries of each ledger that is not empty, in order.
        acknowledged: by the requested subscription; empty without one.
        tail: last entry of the current ledger, or the position before its first. Later entries come
            after it.
        entry_bytes: average size of an entry.
        written: number of entries since the broker loaded the topic.
        pending: number of entries that it has received, and neither written nor refused yet.
        held: ids of all ledgers, including empty ones; others are trimmed, or do not exist yet.
    """

    index: int
    ledgers: tuple[tuple[int, int], ...]
    acknowledged: Acknowledged = Acknowledged()
    tail: EntryId = NOWHERE
    held: frozenset[int] = frozenset()
    entry_bytes: float = 0.0
    written: int = 0
    pending: int = 0

    @property
    def end(self) -> EntryId:
        """Return the last entry; `NOWHERE` without entries."""
        if not self.ledgers:
            return NOWHERE
        ledger, entries = self.ledgers[-1]
        return EntryId(ledger, entries - 1)

    def until(self, end: EntryId) -> Partition:
        """Return the partition as it was when *end* was its last entry."""
        kept = (
            (ledger, min(entries, end.entry + 1) if ledger == end.ledger else entries)
            for ledger, entries in self.ledgers
            if ledger <= end.ledger
        )
        return replace(self, ledgers=tuple(held for held in kept if held[1] > 0))

    def behind(self, entry: EntryId) -> list[Span]:
        """Return all entries after *entry*, in order."""
        begins = (
            (ledger, entry.entry + 1 if ledger == entry.ledger else 0, entries - 1)
            for ledger, entries in self.ledgers
            if ledger >= entry.ledger
        )
        return [Span(*bounds) for bounds in begins if bounds[1] <= bounds[2]]

    @classmethod
    def from_stats(
        cls, index: int, stats: Mapping[str, Any], subscription: str, topic: object = "the topic"
    ) -> Partition:
        """Read a broker's `internalStats`; no *subscription* is the empty string.

        Raises:
            RedriveError: *topic*, named for the error, has no such subscription.
        """
        # The list does not contain the number of entries of the current ledger.
        last = EntryId.parse(stats["lastConfirmedEntry"])
        counts = {ledger["ledgerId"]: ledger["entries"] for ledger in stats["ledgers"]}
        if last.ledger in counts:
            counts[last.ledger] = last.entry + 1
        ledgers = tuple(sorted(item for item in counts.items() if item[1] > 0))
        newest = max(counts, default=-1)
        partition = cls(
            index,
            ledgers,
            tail=EntryId(newest, counts.get(newest, 0) - 1),
            held=frozenset(counts),
            entry_bytes=stats.get("totalSize", 0) / max(1, stats.get("numberOfEntries", 0)),
            written=stats.get("entriesAddedCounter", 0),
            pending=stats.get("pendingAddEntriesCount", 0),
        )
        if not subscription:
            return partition
        cursor = stats["cursors"].get(cursor_name(subscription))
        if cursor is None:
            raise RedriveError(
                f"{topic} has no subscription {subscription}",
                got=sorted(map(unquote_plus, stats["cursors"])),
                remedy="wait until the RetryPolicy is Ready again: the operator creates it",
                reason=SUBSCRIPTION_MISSING,
            )
        return replace(partition, acknowledged=Acknowledged.from_cursor(cursor))


_RANGE = re.compile(r"[(\[](-?\d+:-?\d+)\.\.(-?\d+:-?\d+)\]")


class Span(NamedTuple):
    """Entries of one ledger, from *first* to *last*, both included."""

    ledger: int
    first: int
    last: int

    @property
    def end(self) -> EntryId:
        """Return the last of them."""
        return EntryId(self.ledger, self.last)

    @property
    def size(self) -> int:
        """Return the number of entries."""
        return self.last - self.first + 1


def spans_of_entries(ledger: int, entries: Iterable[int]) -> list[Span]:
    """Join *entries* of a ledger, which are in order, to spans."""
    spans: list[Span] = []
    for entry in entries:
        first = entry
        if spans and spans[-1].last + 1 == entry:
            first = spans.pop().first
        spans.append(Span(ledger, first, entry))
    return spans


def spans_without(wanted: Iterable[Span], seen: Sequence[Span]) -> list[Span]:
    """Return the entries of *wanted* that are not in *seen*; both in order, without overlaps."""
    missing: list[Span] = []
    for span in wanted:
        first = span.first
        at = bisect.bisect_left(seen, (span.ledger, first), key=lambda span: span.end)
        while at < len(seen) and (seen[at].ledger, seen[at].first) <= span.end:
            if first < seen[at].first:
                missing.append(Span(span.ledger, first, seen[at].first - 1))
            first = seen[at].last + 1
            at += 1
        if first <= span.last:
            missing.append(Span(span.ledger, first, span.last))
    return missing


def spans_hold(spans: Sequence[Span], entry: EntryId) -> bool:
    """Return True if *entry* is in one of *spans*, which are in order and do not overlap."""
    at = bisect.bisect_left(spans, entry, key=lambda span: span.end)
    return at < len(spans) and (spans[at].ledger, spans[at].first) <= entry
