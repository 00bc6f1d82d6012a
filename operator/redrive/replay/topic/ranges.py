"""What rests in a dead-letter topic → the ranges in which runs move it. Pure.

A range is a function of positions alone, so that each Replay, and each attempt of one, cuts a topic
in the same way: the ledger is kept by range, and producers are named after ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from redrive.replay.topic import bitmap
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import EntryId, Position

RANGE_ENTRIES = 10_000
"""How many entries a range spans; below 2¹⁴, see `position.sequence_id`."""
LOOK_BACK = 100
"""So many entries before a range are read as well: chunks of a message that ends in it, and what
lies between them."""


class Range(NamedTuple):
    """Entries of one ledger of one partition, from *first* to *last*, both included."""

    partition: int
    ledger: int
    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read what `str` writes."""
        return cls(*map(int, text.split(".")))

    @classmethod
    def of(cls, partition: int, position: Position) -> Range:
        """Return the range in which a message lies."""
        first = position.entry - position.entry % RANGE_ENTRIES
        return cls(partition, position.ledger, first, first + RANGE_ENTRIES - 1)

    def __str__(self) -> str:
        return f"{self.partition}.{self.ledger}.{self.first}.{self.last}"

    def holds(self, position: Position) -> bool:
        """Whether a message of this partition lies in the range."""
        return position.ledger == self.ledger and self.first <= position.entry <= self.last

    def offset_through(self, end: EntryId) -> int:
        """Return the offset of its last entry up to *end*; -1 if it begins behind that."""
        if end.ledger != self.ledger:
            return self.size - 1 if end.ledger > self.ledger else -1
        return max(-1, min(self.last, end.entry) - self.first)

    def entry_id(self, offset: int) -> EntryId:
        """Return the entry that is *offset* behind the first."""
        return EntryId(self.ledger, self.first + offset)

    @property
    def size(self) -> int:
        """Return how many entries it spans."""
        return self.last - self.first + 1


class Piece(NamedTuple):
    """A range, and which of its entries rest: neither acknowledged nor past the end of a run.

    Attributes:
        resting: the offsets of these entries, a bitmap.
        after: behind which entry to begin reading.
    """

    range: Range
    resting: int
    after: EntryId


def cut(partition: Partition, end: EntryId) -> Iterator[Piece]:
    """Cut *partition* into ranges; those of which nothing rests up to *end* are left out."""
    for ledger, entries in partition.ledgers:
        if ledger > end.ledger:
            return
        last = min(entries - 1, end.entry) if ledger == end.ledger else entries - 1
        for first in range(0, last + 1, RANGE_ENTRIES):
            piece = Range(partition.index, ledger, first, first + RANGE_ENTRIES - 1)
            there = bitmap.span(0, min(piece.last, last) - first)
            resting = there & ~settled(piece, partition)
            if resting:
                after = look_back(partition, piece.entry_id(bitmap.lowest(resting)))
                yield Piece(piece, resting, after)


def narrowed(piece: Piece, partition: Partition, entries: int) -> Piece | None:
    """Return what of *piece* is among *entries*, a bitmap of offsets; None if nothing is."""
    resting = piece.resting & entries
    if not resting:
        return None
    after = look_back(partition, piece.range.entry_id(bitmap.lowest(resting)))
    return Piece(piece.range, resting, after)


def settled(piece: Range, partition: Partition) -> int:
    """Return which entries of *piece* are acknowledged, as a bitmap of offsets."""
    done = partition.acknowledged
    bits = _overlap(piece, EntryId(piece.ledger, -1), done.through)
    for after, last in done.overlapping(piece.entry_id(0), piece.entry_id(piece.size - 1)):
        bits |= _overlap(piece, after, last)
    return bits


def all_pieces(partitions: Sequence[Partition]) -> list[Piece]:
    """Cut all that rests, up to where each partition ends now."""
    return [piece for partition in partitions for piece in cut(partition, partition.end)]


def look_back(partition: Partition, entry: EntryId) -> EntryId:
    """Return the entry behind which lie *entry* and `LOOK_BACK` ones before it."""
    missing = LOOK_BACK
    for ledger, entries in reversed(partition.ledgers):
        before = entry.entry if ledger == entry.ledger else entries
        if ledger <= entry.ledger:
            if before >= missing:
                return EntryId(ledger, before - missing - 1)
            missing -= before
    oldest = partition.ledgers[0][0] if partition.ledgers else entry.ledger
    return EntryId(oldest, -1)


def _overlap(piece: Range, after: EntryId, last: EntryId) -> int:
    """Return what lies behind *after*, and not behind *last*."""
    low = max(piece.first, after.entry + 1 if after.ledger == piece.ledger else piece.first)
    high = min(piece.last, last.entry if last.ledger == piece.ledger else piece.last)
    covers = after.ledger <= piece.ledger <= last.ledger
    return bitmap.span(low - piece.first, high - piece.first) if covers else bitmap.EMPTY
