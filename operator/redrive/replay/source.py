"""Dead letters as rows: the reading half of the data source `pulsar`.

One Spark partition for each slice; its messages come in the order they were written, which the
sink relies on. Reading takes nothing away: it goes around the subscription, which the topic's
messages stay in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pulsar
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay import broker, rows, slices, snapshot
from redrive.replay.rows import DeadLetter
from redrive.replay.slices import Slice
from redrive.replay.snapshot import Acknowledged

BATCH_ROWS = 1_000
BATCH_BYTES = 4 * 2**20
SILENCE_MILLISECONDS = 30_000


class SourceSilentError(RedriveError):
    """The broker holds messages of the run and does not deliver them."""

    reason: ClassVar[str] = "SourceSilent"


@dataclass
class SlicePartition(InputPartition):
    """What one task reads: a slice, but for what is acknowledged of it."""

    slice: Slice
    acknowledged: Acknowledged


class PulsarReader(DataSourceReader):
    """Reads a topic as it is when the query is planned.

    Options:
        serviceUrl, adminUrl, topic: what to read from.
        subscription: what this one has acknowledged is left out; default: nothing is.
        slices: what `slices.encode` wrote; default: all that is there.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._service_url = options["serviceUrl"]
        self._admin_url = options["adminUrl"]
        self._topic = TopicName.parse_whole(options["topic"])
        self._subscription = options.get("subscription", "")
        self._slices = options.get("slices")

    def partitions(self) -> Sequence[InputPartition]:
        """Look at the topic, and decide what each task reads."""
        taken = asyncio.run(snapshot.take(self._admin_url, self._topic, self._subscription))
        if self._slices is None:
            wanted = [piece for p in taken for piece in slices.cut(p, p.end)]
        else:
            wanted = slices.decode(self._slices)
        acknowledged = {partition.index: partition.acknowledged for partition in taken}
        return [SlicePartition(piece, acknowledged[piece.index]) for piece in wanted]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one slice, in batches of bounded size.

        Raises:
            ReplayRoleRefusedError: the broker does not let the role read.
            SourceSilentError: it stops delivering before the end of the slice.
        """
        if not isinstance(partition, SlicePartition):
            return  # Spark makes one up where there is nothing to read.
        with broker.connect(self._service_url) as client:
            letters = _letters(client, self._topic, partition.slice)
            settled = partition.acknowledged
            yield from _batches(x for x in letters if x.position.entry_id not in settled)


def _letters(client: pulsar.Client, topic: TopicName, piece: Slice) -> Iterator[DeadLetter]:
    """Read the messages of *piece*, all of each entry."""
    name = str(broker.partition_of(topic, piece.index))
    # A reader begins after the message it is given.
    before = pulsar.MessageId(piece.index, piece.first.ledger, piece.first.entry - 1, -1)
    with broker.refusals(f"open a reader on {name}", "consume"):
        reader = client.create_reader(name, before)
    while (message := _next(reader, piece)) is not None:
        letter = DeadLetter.of(message, piece.index)
        if letter.position.entry_id > piece.last:
            return
        yield letter
        if letter.position == (*piece.last, letter.batch_size - 1):
            return


def _next(reader: pulsar.Reader, piece: Slice) -> pulsar.Message | None:
    """Return the next message, None where nothing is left to come."""
    try:
        return reader.read_next(SILENCE_MILLISECONDS)
    except pulsar.Timeout:
        if not reader.has_message_available():
            return None
    raise SourceSilentError(
        f"the broker has delivered nothing for {SILENCE_MILLISECONDS // 1_000} s, "
        f"although there is more up to {piece.last}",
        remedy="the job is started again by itself; look into the broker's log if it stays",
    )


def _batches(letters: Iterator[DeadLetter]) -> Iterator[pa.RecordBatch]:
    batch: list[DeadLetter] = []
    size = 0
    for letter in letters:
        batch.append(letter)
        size += letter.size
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield rows.to_batch(batch)
            batch, size = [], 0
    if batch:
        yield rows.to_batch(batch)
