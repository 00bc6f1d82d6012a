"""A batch: all that the topics hold when a query is planned, or what lies between positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from redrive.spark import offsets, reading, slices
from redrive.spark.filters import Filters, PushedFilter
from redrive.spark.options import InvalidOptionError, ReadOptions
from redrive.spark.slices import DataLossError, Extent, Slice
from redrive.spark.topics import TopicReader


@dataclass
class SlicePartition(InputPartition):
    """What one task reads."""

    slice: Slice


class BatchReader(DataSourceReader):
    """Reads what the topics hold when a query is planned."""

    def __init__(self, of: ReadOptions) -> None:
        self._options = of
        self._starting = offsets.starting(of.starting or "earliest")
        self._ending = offsets.ending(of.ending or "latest")
        self._filters = Filters()
        if self._starting.otherwise == offsets.END:
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
            yield from reading.read(partition.slice, self._options, self._filters)

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
