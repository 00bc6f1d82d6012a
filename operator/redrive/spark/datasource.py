"""The data source `pulsar`: batches, streams, and writes.

What Spark calls: the data source `pulsar`.

Reading takes nothing away and asks for no subscription: the right to consume is enough. Where a
read ends is fixed when it is planned.

A batch: all that the topics hold when a query is planned, or what lies between positions.

A stream of the topics: what has been read is in the query's checkpoint, nowhere else.

A batch is bounded by positions that Spark records before it reads. So a batch that is repeated,
after a crash, has the same messages, as long as the broker holds them.
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

from redrive.policy.naming import TopicName
from redrive.reading.positions import Position
from redrive.spark import options, slices
from redrive.spark.options import BATCH_OPTIONS, STREAM_OPTIONS, InvalidOptionError, ReadOptions
from redrive.spark.rows import TopicWriter, ddl, read_slice
from redrive.spark.slices import (
    BEGINNING,
    END,
    DataLossError,
    Extent,
    Filters,
    PushedFilter,
    Slice,
    advance_offset,
    check_unread,
    ending_offsets,
    offset_from_json,
    offset_to_json,
    starting_offsets,
)
from redrive.spark.topics import FollowingSubscription, TopicReader

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Make `format("pulsar")` known to a session.

    It also turns on that Python data sources see the conditions of a query, which Spark has off:
    without, Spark refuses to read from those that make use of them.
    """
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(PulsarSource)


class PulsarSource(DataSource):
    """Reads and writes topics of Pulsar."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(…)`."""
        return "pulsar"

    def schema(self) -> str:
        """Return the columns that the options ask for.

        Raises:
            RedriveError: they are not in order.
        """
        known = {*BATCH_OPTIONS, *STREAM_OPTIONS}  # which of both it is shows later
        return ddl(options.read_options(self.options, known).columns)

    def reader(self, schema: StructType) -> BatchReader:
        """Read in a batch query."""
        return BatchReader(_checked(options.read_options(self.options, BATCH_OPTIONS), schema))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  Spark's name
        """Read in a streaming query."""
        return StreamReader(_checked(options.read_options(self.options, STREAM_OPTIONS), schema))

    def writer(self, schema: StructType, overwrite: bool) -> TopicWriter:  # noqa: FBT001  as Spark has it
        """Write in a batch query."""
        if overwrite:
            raise InvalidOptionError(
                "a topic can't be overwritten", got="overwrite", remedy='use mode("append")'
            )
        return TopicWriter(options.write_options(self.options), schema)


def _checked(of: ReadOptions, schema: StructType) -> ReadOptions:
    if tuple(schema.fieldNames()) != of.columns:
        raise InvalidOptionError(
            "the schema of a read is not its caller's to choose",
            got=schema.fieldNames(),
            remedy=f"leave out schema(…); the option columns chooses among {', '.join(of.columns)}",
        )
    return of


@dataclass
class SlicePartition(InputPartition):
    """What one task reads."""

    slice: Slice


class BatchReader(DataSourceReader):
    """Reads what the topics hold when a query is planned."""

    def __init__(self, of: ReadOptions) -> None:
        self._options = of
        self._starting = starting_offsets(of.starting or "earliest")
        self._ending = ending_offsets(of.ending or "latest")
        self._filters = Filters()
        if self._starting.otherwise == END:
            raise InvalidOptionError(
                "startingOffsets of a batch can't be latest, behind which there is nothing",
                got=of.starting,
                remedy="write earliest or positions, or read a stream",
            )

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  Spark's name
        """Take note of what the query needs; Spark goes on to evaluate all of it."""
        self._filters = Filters(map(_condition, filters))
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what each task reads."""
        extents = TopicReader(self._options.connection).extents(self._options.topics)
        topics = [extent.topic for extent in extents]
        self._starting.check("startingOffsets", topics)
        self._ending.check("endingOffsets", topics)
        return [SlicePartition(piece) for extent in extents for piece in self._cut(extent)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one slice; see `reading.read`."""
        if isinstance(partition, SlicePartition):  # Spark makes one up where there is none
            yield from read_slice(partition.slice, self._options, self._filters)

    def _cut(self, extent: Extent) -> Iterator[Slice]:
        behind = self._starting.of(extent.topic)
        try:
            slices.check_held(extent, behind)
        except DataLossError:
            if self._options.fail_on_data_loss:
                raise
        return slices.cut(extent, behind, self._ending.of(extent.topic), self._filters)


def _condition(of: Filter) -> PushedFilter:
    path: Sequence[str] = getattr(of, "attribute", ())
    return PushedFilter(".".join(path), type(of).__name__, getattr(of, "value", None))


_NO_FILTERS = Filters()
"""Spark pushes none into a stream."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes into the topics, batch by batch."""

    def __init__(self, of: ReadOptions) -> None:
        self._options = of
        self._starting = starting_offsets(of.starting or "latest")
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
        return offset_to_json(start)

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
        read, extents = offset_from_json(start), self._extents()
        if self._options.fail_on_data_loss:
            check_unread(extents, read)
        most = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        ahead = advance_offset(extents, read, most)
        if self._target is not None:
            ahead = {
                topic: min(position, self._target.get(topic, read.get(topic, BEGINNING)))
                for topic, position in ahead.items()
            }
        return offset_to_json(ahead)

    def partitions(self, start: dict[str, str], end: dict[str, str]) -> Sequence[InputPartition]:
        """Decide what each task of a batch reads.

        Raises:
            DataLossError: it is gone.
        """
        read, through = offset_from_json(start), offset_from_json(end)
        extents = [each for each in self._extents() if each.topic in through]
        if self._options.fail_on_data_loss:
            check_unread(extents, read)
        return [
            SlicePartition(piece)
            for each in extents
            for piece in _cut(each, read.get(each.topic, BEGINNING), through[each.topic])
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one slice; see `reading.read`."""
        if isinstance(partition, SlicePartition):
            yield from read_slice(partition.slice, self._options, _NO_FILTERS)

    def commit(self, end: dict[str, str]) -> None:
        """Acknowledge what has been processed, where a subscription follows the stream."""
        if (progress := self._opened()) is not None:
            progress.acknowledge(offset_from_json(end))

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
