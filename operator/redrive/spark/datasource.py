"""What Spark calls: the data source `pulsar`.

Reading takes nothing away and asks for no subscription: the right to consume is enough. Where a
read ends is fixed when it is planned.
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from redrive.spark import columns, options
from redrive.spark.batch import BatchReader
from redrive.spark.options import (
    BATCH_OPTIONS,
    STREAM_OPTIONS,
    InvalidOptionError,
    ReadOptions,
)
from redrive.spark.stream import StreamReader
from redrive.spark.writing import TopicWriter

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
        return columns.ddl(options.read_options(self.options, known).columns)

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
