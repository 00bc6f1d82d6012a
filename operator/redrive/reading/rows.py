"""A dead letter: from a message, to a row of Spark for a selection to look at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import NamedTuple

import pulsar
import pyarrow as pa

from redrive.messages import ordering_key, partition_key, read_properties, schema_version
from redrive.policy import envelope
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE, ORIGIN_MESSAGE_ID, REAL_TOPIC
from redrive.policy.naming import PARTITION_SUFFIX, TopicName
from redrive.reading.positions import EntryId, Position, target_partition
from redrive.reading.stored import ReadMessage

BATCH_ROWS = 1_000
BATCH_BYTES = 4 * 2**20
LONGEST_NUMBER = 2**63 - 1
"""The largest number of a column of Spark. Times and versions of messages are any 64 bits."""
_PARTITION_OF_ID = re.compile(r"\d+:\d+:(\d{1,6})(?::-?\d+)?")


class DeadLetterRow(NamedTuple):
    """One message.

    Attributes:
        partition: of the topic it lies in; -1 if that has none.
        batch_size: how many messages its entry holds.
        message_id: as the client has it.
        first_chunk: of one that was sent in chunks, the entry of the first; *position* is the last.
        encrypted: whether *value* is what only its readers can decrypt.
        unreadable: whether one of its properties is no text; then the client shows none of them.
        schema_version: of the schema of the topic it lies in; None if it was sent without.
        key: in base64 if it is no text, as is *ordering_key*: so consumers send it on, too.
        publish_time: in milliseconds since 1970, as is *event_time*.
        chunks: the entries of all its chunks; none of one that is whole.
        delivered: False for an entry that no client can show; nothing else is known of it.
        oversized: True if the value is left out, see `ReadMessage.is_oversized`.
    """

    partition: int
    position: Position
    batch_size: int
    message_id: pulsar.MessageId
    first_chunk: EntryId | None
    encrypted: bool
    unreadable: bool
    schema_version: int | None
    key: str | None
    ordering_key: str | None
    value: bytes | None
    properties: dict[str, str]
    publish_time: int
    event_time: int | None
    chunks: tuple[EntryId, ...] = ()
    delivered: bool = True
    oversized: bool = False

    @classmethod
    def undelivered(cls, partition: int, entry: EntryId) -> DeadLetterRow:
        """Stand for an entry that no client can show."""
        return cls(
            partition, Position(*entry, 0), 1, entry_acknowledgement(partition, entry), None,
            encrypted=False, unreadable=False, schema_version=None, key=None, ordering_key=None,
            value=None, properties={}, publish_time=0, event_time=None, delivered=False,
        )  # fmt: skip

    @classmethod
    def of(cls, message: ReadMessage, partition: int) -> DeadLetterRow:
        """Take all there is of *message*."""
        place = message.place
        entries = place.entries
        in_chunks = len(entries) > 1
        properties = read_properties(message)
        return cls(
            partition=partition,
            position=Position(*entries[-1], max(0, place.batch_index)),
            batch_size=place.batch_size,
            message_id=message.message_id(),
            first_chunk=EntryId(*entries[0]) if in_chunks else None,
            encrypted=message.encryption_context() is not None,
            unreadable=properties is None,
            schema_version=schema_version(message),
            key=partition_key(message) or None,
            ordering_key=ordering_key(message) or None,
            value=None if message.has_null_value() else message.data(),
            properties=properties or {},
            publish_time=message.publish_timestamp(),
            event_time=message.event_timestamp() or None,
            chunks=tuple(starmap(EntryId, entries)) if in_chunks else (),
            oversized=message.is_oversized,
        )

    def partition_in(self, topic: TopicName, partitions: int) -> int:
        """Return the index of the partition of *topic* that this message is replayed to.

        In its source topic that is the one it was produced to. Elsewhere the ordering key decides
        where there is one, as consumers decide where to retry it: a sequence stays together.

        Args:
            topic: a topic with partitions.
            partitions: their number.
        """
        source = PARTITION_SUFFIX.sub("", self.properties.get(REAL_TOPIC, ""))
        if source != str(topic):
            return target_partition(self.ordering_key or self.key, self.position, partitions)
        produced_to = _PARTITION_OF_ID.fullmatch(self.properties.get(ORIGIN_MESSAGE_ID, ""))
        if produced_to and int(produced_to[1]) < partitions:
            return int(produced_to[1])
        return target_partition(self.key, self.position, partitions)

    @property
    def acknowledgements(self) -> list[pulsar.MessageId]:
        """Return what to acknowledge it by, with all that is in its entry, or with all chunks."""
        entries = self.chunks or (self.position.entry_id,)
        return [entry_acknowledgement(self.partition, each) for each in entries]

    @property
    def size(self) -> int:
        """Return the bytes of its value."""
        return len(self.value or b"")

    @property
    def replays(self) -> int:
        """Return how often it has been replayed."""
        return envelope.replays(self.properties)


def entry_acknowledgement(partition: int, entry: EntryId) -> pulsar.MessageId:
    """Return what to acknowledge a whole entry by: the index -1, as no client can name a part."""
    return pulsar.MessageId(partition, entry.ledger, entry.entry, -1)


def in_batches(letters: Iterable[DeadLetterRow]) -> Iterator[list[DeadLetterRow]]:
    """Put *letters* together in lists of bounded size, in their order."""
    batch: list[DeadLetterRow] = []
    size = 0
    for letter in letters:
        batch.append(letter)
        size += letter.size + sum(len(name) + len(text) for name, text in letter.properties.items())
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
        del letter  # before the next one is decompressed
    if batch:
        yield batch


def moment(milliseconds: int | None) -> int | None:
    """Return microseconds since 1970; the latest of Spark for a time that is later than that.

    Whoever sends a message sets its times. The latest compares with each moment that can be written
    out, of the years 1 to 9999, as the time does.
    """
    return None if milliseconds is None else min(milliseconds * 1_000, LONGEST_NUMBER)


def _number(written: int | None) -> int | None:
    """Return a number of a message as Spark has room for it."""
    return None if written is None else min(written, LONGEST_NUMBER)


class _RowColumn(NamedTuple):
    """A column: its type in Spark's words and in those of Arrow, and what a message has there."""

    type: str
    arrow: pa.DataType
    of: Callable[[DeadLetterRow], object]


_MOMENT = pa.timestamp("us", tz="UTC")
_COLUMNS: Mapping[str, _RowColumn] = MappingProxyType(
    {
        "partition": _RowColumn("INT", pa.int32(), lambda row: row.partition),
        "ledger": _RowColumn("BIGINT", pa.int64(), lambda row: row.position.ledger),
        "entry": _RowColumn("BIGINT", pa.int64(), lambda row: row.position.entry),
        "batch_index": _RowColumn("INT", pa.int32(), lambda row: row.position.batch_index),
        "batch_size": _RowColumn("INT", pa.int32(), lambda row: row.batch_size),
        "first_chunk": _RowColumn(
            "STRING", pa.string(), lambda row: row.first_chunk and str(row.first_chunk)
        ),
        "delivered": _RowColumn("BOOLEAN", pa.bool_(), lambda row: row.delivered),
        "oversized": _RowColumn("BOOLEAN", pa.bool_(), lambda row: row.oversized),
        "encrypted": _RowColumn("BOOLEAN", pa.bool_(), lambda row: row.encrypted),
        "unreadable": _RowColumn("BOOLEAN", pa.bool_(), lambda row: row.unreadable),
        "schema_version": _RowColumn("BIGINT", pa.int64(), lambda row: _number(row.schema_version)),
        "key": _RowColumn("STRING", pa.string(), lambda row: row.key),
        "ordering_key": _RowColumn("STRING", pa.string(), lambda row: row.ordering_key),
        "value": _RowColumn("BINARY", pa.binary(), lambda row: row.value),
        "size": _RowColumn("BIGINT", pa.int64(), lambda row: row.size),
        "properties": _RowColumn(
            "MAP<STRING, STRING>",
            pa.map_(pa.string(), pa.string()),
            lambda row: list(row.properties.items()),
        ),
        "cause_type": _RowColumn("STRING", pa.string(), lambda row: row.properties.get(CAUSE_TYPE)),
        "cause_fingerprint": _RowColumn(
            "STRING", pa.string(), lambda row: row.properties.get(CAUSE_FINGERPRINT)
        ),
        "reconsume_times": _RowColumn(
            "INT", pa.int32(), lambda row: envelope.reconsume_times(row.properties)
        ),
        "replays": _RowColumn("INT", pa.int32(), lambda row: row.replays),
        "published": _RowColumn("BIGINT", pa.int64(), lambda row: _number(row.publish_time)),
        "publish_time": _RowColumn("TIMESTAMP", _MOMENT, lambda row: moment(row.publish_time)),
        "event_time": _RowColumn("TIMESTAMP", _MOMENT, lambda row: moment(row.event_time)),
    }
)
COLUMNS = tuple(_COLUMNS)
"""What a row may have. What a message does not have is NULL, and so is the value of one that
carries a null instead of bytes. An unbatched message is index 0 of 1. `published` is the publish
time in milliseconds: Python has no moments after the year 9999 that Spark has."""


def ddl(names: Sequence[str]) -> str:
    """Return the schema of some columns in Spark's words."""
    return ", ".join(f"{name} {_COLUMNS[name].type}" for name in names)


def to_batch(letters: Sequence[DeadLetterRow], names: Sequence[str]) -> pa.RecordBatch:
    """Write some columns of *letters*, in their order."""
    columns = [_COLUMNS[name] for name in names]
    return pa.RecordBatch.from_arrays(
        [pa.array(map(column.of, letters), column.arrow) for column in columns],
        schema=pa.schema(zip(names, (column.arrow for column in columns), strict=True)),
    )
