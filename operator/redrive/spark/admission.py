"""How far a stream reads in its next batch. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from redrive.policy.naming import TopicName
from redrive.replay.topic.position import Position
from redrive.spark import slices
from redrive.spark.offsets import BEGINNING, WHOLE
from redrive.spark.slices import DataLossError, Extent

Offset = Mapping[TopicName, Position]
"""What has been read of each partition: all up to a position, inclusive."""


def advance(
    extents: Sequence[Extent], read: Offset, limit: int | None = None
) -> dict[TopicName, Position]:
    """Return up to where to read, of each partition.

    Partitions that are new are read from their beginning.

    Args:
        extents: all partitions.
        read: what has been read.
        limit: how many bytes, about, by the average size of a partition's entries: each partition
            that has anything new advances by its share of them, and by one entry at least. None
            for all there is.
    """
    waiting = {each.topic: _waiting(each, read.get(each.topic, BEGINNING)) for each in extents}
    total = sum(sum(waiting[each.topic].values()) * each.partition.entry_bytes for each in extents)
    share = 1.0 if limit is None or total <= limit else limit / total
    return {
        each.topic: _ahead(each, read.get(each.topic, BEGINNING), waiting[each.topic], share)
        for each in extents
    }


def check(extents: Sequence[Extent], read: Offset) -> None:
    """Check that all is there that has not been read.

    Raises:
        DataLossError: a partition is gone, or see `slices.check_held`.
    """
    gone = read.keys() - {each.topic for each in extents}
    if gone:
        raise DataLossError(
            "topics that the stream has been reading are not there any more",
            got=sorted(map(str, gone)),
            remedy="create them again; to go on without them, set failOnDataLoss to false",
        )
    for each in extents:
        slices.check_held(each, read.get(each.topic, BEGINNING))


def _waiting(extent: Extent, behind: Position) -> dict[int, int]:
    """Return how many entries of each ledger have not been read."""
    return {ledger: last - first + 1 for ledger, first, last in _unread(extent, behind)}


def _unread(extent: Extent, behind: Position) -> Iterator[tuple[int, int, int]]:
    for ledger, entries in extent.partition.ledgers:
        if ledger >= behind.ledger:
            first = slices.first_unread(behind) if ledger == behind.ledger else 0
            if first < entries:
                yield ledger, first, entries - 1


def _ahead(extent: Extent, behind: Position, waiting: Mapping[int, int], share: float) -> Position:
    if extent.complete and behind > extent.tail:
        return extent.end  # another topic of this name, which is read from its beginning
    left = max(1, int(sum(waiting.values()) * share))
    for ledger, first, last in _unread(extent, behind):
        if left <= last - first + 1:
            return Position(ledger, first + left - 1, WHOLE)
        left -= last - first + 1
    return max(behind, extent.end)
