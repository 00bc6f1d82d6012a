"""The data source `pulsar`: batches, streams, and writes.

A read acknowledges nothing and needs no subscription: permission to consume is sufficient. The end
of a read is fixed when it is planned.

A batch reads everything that the topics hold when a query is planned, or a range of positions. The
progress of a stream is stored only in the query's checkpoint. A batch of a stream is bounded by
positions that Spark records before it reads. So a batch that is repeated after a crash has the same
messages, as long as the broker retains them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from redrive.errors import InvalidSpecError
from redrive.policy.naming import TopicName
from redrive.reading.positions import Position
from redrive.spark import options, slices
from redrive.spark.options import BATCH_OPTIONS, STREAM_OPTIONS, ReadOptions
from redrive.spark.rows import TopicWriter, ddl, read_slice
from redrive.spark.topics import FollowingSubscription, TopicReader

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register `format("pulsar")` in a session.

    It also enables pushdown of filters to Python data sources, which Spark disables by default:
    without it, Spark refuses to read from sources that support filters.
    """
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(PulsarSource)


class PulsarSource(DataSource):
    """Reads and writes topics of Pulsar."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the source in `format(…)`."""
        return "pulsar"

    def schema(self) -> str:
        """Return the columns of the options.

        Raises:
            RedriveError: an option is invalid.
        """
        names = {*BATCH_OPTIONS, *STREAM_OPTIONS}  # batch or stream is not known yet
        return ddl(options.read_options(self.options, names).columns)

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader of a batch query."""
        return BatchReader(_checked(options.read_options(self.options, BATCH_OPTIONS), schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  Spark's name
        """Return the reader of a streaming query."""
        return StreamReader(_checked(options.read_options(self.options, STREAM_OPTIONS), schema))

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:  # noqa: FBT001  Spark's signature
        """Return the writer of a batch query."""
        if overwrite:
            raise InvalidSpecError(
                "a topic cannot be overwritten", got="overwrite", remedy='use mode("append")'
            )
        return TopicWriter(options.write_options(self.options), schema)


def _checked(read: ReadOptions, schema: StructType) -> ReadOptions:
    if tuple(schema.fieldNames()) != read.columns:
        raise InvalidSpecError(
            "schema(…) is not supported by this source",
            got=schema.fieldNames(),
            remedy=f"leave it out; option columns selects from {', '.join(read.columns)}",
        )
    return read


@dataclass
class SlicePartition(InputPartition):
    """Partition of a read: the slice of one task."""

    slice: slices.Slice


class BatchReader(DataSourceReader):
    """Reads messages that the topics hold when a query is planned."""

    def __init__(self, read: ReadOptions) -> None:
        self._options = read
        self._starting = slices.starting_offsets(read.starting or "earliest")
        self._ending = slices.ending_offsets(read.ending or "latest")
        self._filters = slices.Filters()
        if self._starting.otherwise == slices.END:
            raise InvalidSpecError(
                "startingOffsets of a batch must not be latest: no messages follow",
                got=read.starting,
                remedy="use earliest or positions, or read a stream",
            )

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Store the filters of the query; Spark still evaluates all of them."""
        self._filters = slices.Filters(map(_condition, filters))
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Return the slices of all tasks."""
        extents = TopicReader(self._options.connection).extents(self._options.topics)
        topics = [extent.topic for extent in extents]
        self._starting.check("startingOffsets", topics)
        self._ending.check("endingOffsets", topics)
        return [SlicePartition(piece) for extent in extents for piece in self._cut(extent)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one slice."""
        if isinstance(partition, SlicePartition):  # without slices Spark passes an empty partition
            yield from read_slice(partition.slice, self._options, self._filters)

    def _cut(self, extent: slices.Extent) -> Iterator[slices.Slice]:
        behind = self._starting.of(extent.topic)
        try:
            slices.check_held(extent, behind)
        except slices.DataLossError:
            if self._options.fail_on_data_loss:
                raise
        return slices.cut(extent, behind, self._ending.of(extent.topic), self._filters)


def _condition(pushed: Filter) -> slices.PushedFilter:
    path: Sequence[str] = getattr(pushed, "attribute", ())
    return slices.PushedFilter(
        ".".join(path), type(pushed).__name__, getattr(pushed, "value", None)
    )


_NO_FILTERS = slices.Filters()
"""Filters of a stream: Spark pushes none."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads new messages of the topics, batch by batch."""

    def __init__(self, read: ReadOptions) -> None:
        self._options = read
        self._starting = slices.starting_offsets(read.starting or "latest")
        self._target: Mapping[TopicName, Position] | None = None
        self._progress: FollowingSubscription | None = None

    def initialOffset(self) -> dict[str, str]:  # noqa: N802  Spark's names, here and below
        """Return the start of a new query; a subscription retains the messages from there."""
        extents = self._extents()
        self._starting.check("startingOffsets", [extent.topic for extent in extents])
        start = {extent.topic: self._start(extent) for extent in extents}
        if (progress := self._opened()) is not None:
            for extent in extents:
                passed = extent.partition.acknowledged.through
                progress.keep(extent.topic, passed, start[extent.topic].entry_id)
        return slices.offset_to_json(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the default size of a batch, from the options."""
        most = self._options.max_bytes
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end at the current ends of the topics."""
        self._target = {extent.topic: extent.tail for extent in self._extents()}

    def latestOffset(self, start: dict[str, str], limit: ReadLimit) -> dict[str, str]:  # noqa: N802
        """Return the end of the next batch.

        Raises:
            DataLossError: messages of the batch were deleted.
        """
        read, extents = slices.offset_from_json(start), self._extents()
        if self._options.fail_on_data_loss:
            slices.check_unread(extents, read)
        most = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        ahead = slices.advance_offset(extents, read, most)
        if self._target is not None:
            ahead = {
                topic: min(position, self._target.get(topic, read.get(topic, slices.BEGINNING)))
                for topic, position in ahead.items()
            }
        return slices.offset_to_json(ahead)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Return the slices of a batch.

        Raises:
            DataLossError: messages of the batch were deleted.
        """
        read, through = slices.offset_from_json(start), slices.offset_from_json(end)
        extents = [extent for extent in self._extents() if extent.topic in through]
        if self._options.fail_on_data_loss:
            slices.check_unread(extents, read)
        return [
            SlicePartition(piece)
            for extent in extents
            for piece in _cut(
                extent, read.get(extent.topic, slices.BEGINNING), through[extent.topic]
            )
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one slice."""
        if isinstance(partition, SlicePartition):
            yield from read_slice(partition.slice, self._options, _NO_FILTERS)

    def commit(self, end: dict[str, str]) -> None:
        """Acknowledge processed messages, if a subscription follows the stream."""
        if (progress := self._opened()) is not None:
            progress.acknowledge(slices.offset_from_json(end))

    def stop(self) -> None:
        """Close the subscription."""
        if self._progress is not None:
            self._progress.close()

    @functools.cached_property  # Spark pickles the reader before its first use
    def _broker(self) -> TopicReader:
        return TopicReader(self._options.connection)

    def _start(self, extent: slices.Extent) -> Position:
        start = self._starting.of(extent.topic)
        if start == slices.BEGINNING:
            return extent.begin
        # Not the tail: a ledger without entries is deleted when the topic is loaded.
        return start if start < extent.tail else extent.end

    def _extents(self) -> list[slices.Extent]:
        return self._broker.extents(self._options.topics, self._options.subscription or "")

    def _opened(self) -> FollowingSubscription | None:
        if self._options.subscription is not None and self._progress is None:
            self._progress = FollowingSubscription(self._broker, self._options.subscription)
        return self._progress


def _cut(extent: slices.Extent, behind: Position, through: Position) -> Iterator[slices.Slice]:
    if behind > through:  # another topic of the same name
        behind = slices.BEGINNING
    return slices.cut(extent, behind, through, _NO_FILTERS)
