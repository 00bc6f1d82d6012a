"""The data source `pulsar`, as Spark finds it: `spark.read.format("pulsar")`; a topic as rows.

Register it once in a session: `spark.dataSource.register(PulsarDataSource)`. Its credentials
are those that the environment of driver and executors leads to, see `spec.BrokerAccess`, never
options: these show in plans and in Spark's pages.

One Spark partition for each range. Reading takes nothing away: it goes around the subscription,
which the topic's messages stay in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from redrive.policy.naming import TopicName
from redrive.replay.job import plan
from redrive.replay.job.plan import Scan
from redrive.replay.topic import bitmap, broker, rows
from redrive.replay.topic.position import EntryId
from redrive.replay.topic.ranges import Piece, Range


@dataclass
class ScanPartition(InputPartition):
    """What one task reads."""

    scan: Scan


class PulsarReader(DataSourceReader):
    """Reads parts of a topic.

    Options:
        scans: which, as `encode` wrote them.

    Args:
        options: see there.
        columns: of `rows`: no other one crosses into the JVM.
    """

    def __init__(self, options: Mapping[str, str], columns: Sequence[str]) -> None:
        self._options, self._columns = options, columns

    def partitions(self) -> Sequence[InputPartition]:
        """Decide what each task reads."""
        return [ScanPartition(scan) for scan in decode(self._options["scans"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range, in batches of bounded size.

        Raises:
            RedriveError: see `reading.messages`.
        """
        if not isinstance(partition, ScanPartition):
            return  # Spark makes one up where there is nothing to read.
        with broker.connect(partition.scan.service_url) as client:
            for batch in rows.in_batches(plan.letters(client, partition.scan)):
                yield rows.to_batch(batch, self._columns)


class PulsarDataSource(DataSource):
    """Reads a topic, see `PulsarReader`."""

    @classmethod
    def name(cls) -> str:
        """Return what stands in `format(…)`."""
        return "pulsar"

    def schema(self) -> str:
        """Return the columns of a message; a query may name some of them as its schema."""
        return rows.ddl(rows.COLUMNS)

    def reader(self, schema: StructType) -> PulsarReader:
        """Read in a batch query."""
        return PulsarReader(self.options, schema.fieldNames())


def encode(scans: Sequence[Scan]) -> str:
    """Write *scans* as an option."""
    return json.dumps(
        [
            {
                "serviceUrl": scan.service_url,
                "adminUrl": scan.admin_url,
                "topic": str(scan.topic),
                "range": str(scan.piece.range),
                "resting": bitmap.encode(scan.piece.resting),
                "after": str(scan.piece.after),
                "moved": bitmap.encode(scan.moved),
                "ahead": scan.ahead,
            }
            for scan in scans
        ]
    )


def decode(text: str) -> list[Scan]:
    """Read what `encode` wrote."""
    return [
        Scan(
            each["serviceUrl"],
            each["adminUrl"],
            TopicName.parse_whole(each["topic"]),
            Piece(
                Range.parse(each["range"]),
                bitmap.decode(each["resting"]),
                EntryId.parse(each["after"]),
            ),
            bitmap.decode(each["moved"]),
            each["ahead"],
        )
        for each in json.loads(text)
    ]
