"""Rows → the target topic: the writing half of the data source `pulsar`.

Called by Spark; what is done to each message stands in `move`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from redrive.policy.naming import TopicName
from redrive.replay import rows
from redrive.replay.move import Mover, Route, Tally, by_entry


class Moved(WriterCommitMessage):
    """What one task has done, on its way to the driver."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally


class PulsarWriter(DataSourceArrowWriter):
    """Moves rows of the source, each to the target and off the topic it was read from.

    Options:
        serviceUrl, source, subscription, target, targetPartitions, producer, replay: see `Route`.
        tally: a file, to which the driver writes the `Tally` of all tasks as JSON.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._route = Route(
            service_url=options["serviceUrl"],
            source=TopicName.parse_whole(options["source"]),
            subscription=options["subscription"],
            target=TopicName.parse_whole(options["target"]),
            target_partitions=int(options["targetPartitions"]),
            producer=options["producer"],
            replay=options["replay"],
        )
        self._tally = options["tally"]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Moved:
        """Move the rows of one task, which are those of one partition of the source.

        Raises:
            RedriveError: the broker refuses, or answers what does not fit. What is not
                acknowledged by then is moved by a repetition.
        """
        letters = (letter for batch in iterator for letter in rows.from_batch(batch))
        first = next(letters, None)
        if first is None:
            return Moved(Tally())
        with Mover(self._route, first.partition) as mover:
            for entry in by_entry(itertools.chain([first], letters)):
                mover.move(entry)
            return Moved(mover.finish())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Write down what all tasks have done."""
        total = sum((m.tally for m in messages if isinstance(m, Moved)), start=Tally())
        Path(self._tally).write_text(json.dumps(asdict(total)), encoding="utf-8")


def read_tally(file: Path) -> Tally:
    """Read what `PulsarWriter.commit` wrote."""
    return Tally(**json.loads(file.read_text(encoding="utf-8")))
