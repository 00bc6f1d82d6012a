"""What rests in a topic → the pieces in which a run reads it. Pure.

Spark tells nothing of a query before its end, so a run is several queries: each moves one slice
of every partition, and the run reports in between.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redrive.api.replay import Snapshot
from redrive.replay.position import EntryId
from redrive.replay.snapshot import Partition

SLICE_ENTRIES = 10_000
"""So much of each partition is moved between two reports."""


@dataclass(frozen=True)
class Slice:
    """Entries of one partition, from *first* to *last*, both included."""

    index: int
    first: EntryId
    last: EntryId


def cut(partition: Partition, end: EntryId, size: int | None = None) -> list[Slice]:
    """Cut what is not acknowledged, up to *end*, into slices of *size* entries, or into one.

    What is acknowledged before the first open entry is left out; what is behind it counts.
    """
    entries = sum(high - low + 1 for _, low, high in _open_runs(partition, end))
    size = entries if size is None else size
    slices: list[Slice] = []
    first, room = None, size
    for ledger, start, high in _open_runs(partition, end):
        low = start
        while low <= high:
            first = first or EntryId(ledger, low)
            last = EntryId(ledger, min(high, low + room - 1))
            room -= last.entry - low + 1
            low = last.entry + 1
            if room == 0:
                slices.append(Slice(partition.index, first, last))
                first, room = None, size
    return [*slices, Slice(partition.index, first, last)] if first else slices


def whole(partitions: Sequence[Partition], bounds: Snapshot) -> list[Slice]:
    """Take all that rests and belongs to a run: one slice of each partition."""
    ends = _ends(bounds)
    return [piece for p in partitions if p.index in ends for piece in cut(p, ends[p.index])]


def rounds(partitions: Sequence[Partition], bounds: Snapshot) -> Iterator[list[Slice]]:
    """Go through all that rests: the first slice of each partition, the second, and so on."""
    ends = _ends(bounds)
    cuts = [cut(p, ends[p.index], SLICE_ENTRIES) for p in partitions if p.index in ends]
    for pieces in itertools.zip_longest(*cuts):
        yield [piece for piece in pieces if piece is not None]


def encode(slices: Sequence[Slice]) -> str:
    """Write *slices* as an option of the data source."""
    return json.dumps([[s.index, str(s.first), str(s.last)] for s in slices])


def decode(text: str) -> list[Slice]:
    """Read what `encode` wrote."""
    return [Slice(i, EntryId.parse(f), EntryId.parse(t)) for i, f, t in json.loads(text)]


def _ends(bounds: Snapshot) -> dict[int, EntryId]:
    return {end.partition: EntryId.parse(end.end) for end in bounds.partitions}


def _open_runs(partition: Partition, end: EntryId) -> Iterator[tuple[int, int, int]]:
    """Go through the ledgers: id, first and last entry that is neither settled nor past *end*."""
    done = partition.acknowledged.through
    for ledger, entries in partition.ledgers:
        if done.ledger <= ledger <= end.ledger:
            low = done.entry + 1 if ledger == done.ledger else 0
            high = min(entries - 1, end.entry) if ledger == end.ledger else entries - 1
            if low <= high:
                yield ledger, low, high
