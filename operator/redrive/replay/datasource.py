"""The data source `pulsar`, as Spark finds it: `spark.read.format("pulsar")`.

Register it once in a session: `spark.dataSource.register(PulsarDataSource)`. Its token comes from
the environment of driver and executors, see `spec.TOKEN_VARIABLE`, never from an option: options
show in plans and in Spark's pages.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from redrive.replay import rows
from redrive.replay.source import PulsarReader


class PulsarDataSource(DataSource):
    """Reads a topic, see `PulsarReader`."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(…)`."""
        return "pulsar"

    def schema(self) -> str:
        """Return the columns of a message."""
        return rows.DDL

    def reader(self, schema: StructType) -> PulsarReader:  # noqa: ARG002  it is always `schema()`
        """Read in a batch query."""
        return PulsarReader(self.options)
