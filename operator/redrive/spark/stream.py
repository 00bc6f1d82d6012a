"""A stream of the topics: what has been read is in the query's checkpoint, nowhere else.

A batch is bounded by positions that Spark records before it reads. So a batch that is repeated,
after a crash, has the same messages, as long as the broker holds them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)

from redrive.policy.naming import TopicName
from redrive.replay.topic.position import Position
from redrive.spark import admission, offsets, reading, slices
from redrive.spark.batch import SlicePartition
from redrive.spark.filters import Filters
from redrive.spark.offsets import BEGINNING
from redrive.spark.options import ReadOptions
from redrive.spark.slices import Extent, Slice
from redrive.spark.subscription import FollowingSubscription
from redrive.spark.topics import TopicReader

_NO_FILTERS = Filters()
"""Spark pushes none into a stream."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes into the topics, batch by batch."""

    def __init__(self, of: ReadOptions) -> None:
        self._options = of
        self._starting = offsets.starting(of.starting or "latest")
        self._target: Mapping[TopicName, Position] | None = None
        self._progress: FollowingSubscription | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802  Spark's names, here and below
        """Return where a new query begins; what follows is kept by the subscription, if any."""
        extents = self._extents()
        self._starting.check("startingOffsets", [each.topic for each in extents])
        start = {each.topic: self._start(each) for each in extents}
        if (progress := self._opened()) is not None:
            for each in extents:
                passed = each.partition.acknowledged.through
                progress.keep(each.topic, passed, start[each.topic].entry_id)
        return offsets.to_json(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how much to read at a time, if the trigger leaves that to the options."""
        most = self._options.max_bytes
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end where the topics end now."""
        self._target = {each.topic: each.tail for each in self._extents()}

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        """Return up to where the next batch reads.

        Raises:
            DataLossError: what it would read is gone.
        """
        read, extents = offsets.from_json(start), self._extents()
        if self._options.fail_on_data_loss:
            admission.check(extents, read)
        most = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        ahead = admission.advance(extents, read, most)
        if self._target is not None:
            ahead = {
                topic: min(position, self._target.get(topic, read.get(topic, BEGINNING)))
                for topic, position in ahead.items()
            }
        return offsets.to_json(ahead)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Decide what each task of a batch reads.

        Raises:
            DataLossError: it is gone.
        """
        read, through = offsets.from_json(start), offsets.from_json(end)
        extents = [each for each in self._extents() if each.topic in through]
        if self._options.fail_on_data_loss:
            admission.check(extents, read)
        return [
            SlicePartition(piece)
            for each in extents
            for piece in _cut(each, read.get(each.topic, BEGINNING), through[each.topic])
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one slice; see `reading.read`."""
        if isinstance(partition, SlicePartition):
            yield from reading.read(partition.slice, self._options, _NO_FILTERS)

    def commit(self, end: dict[str, str]) -> None:
        """Acknowledge what has been processed, where a subscription follows the stream."""
        if (progress := self._opened()) is not None:
            progress.acknowledge(offsets.from_json(end))

    def stop(self) -> None:
        """Close what is open."""
        if self._progress is not None:
            self._progress.close()

    @functools.cached_property  # Spark pickles what has not been used yet
    def _broker(self) -> TopicReader:
        return TopicReader(self._options.connection)

    def _start(self, extent: Extent) -> Position:
        start = self._starting.of(extent.topic)
        if start == BEGINNING:
            return extent.begin
        # Not the tail: a ledger without entries is deleted when the topic is loaded.
        return start if start < extent.tail else extent.end

    def _extents(self) -> list[Extent]:
        return self._broker.extents(self._options.topics, self._options.subscription or "")

    def _opened(self) -> FollowingSubscription | None:
        if self._options.subscription is not None and self._progress is None:
            self._progress = FollowingSubscription(self._broker, self._options.subscription)
        return self._progress


def _cut(extent: Extent, behind: Position, through: Position) -> Iterator[Slice]:
    if behind > through:  # it is another topic of this name
        behind = BEGINNING
    return slices.cut(extent, behind, through, _NO_FILTERS)
