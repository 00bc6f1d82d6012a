"""A dead letter as a row of Spark, for selections."""

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
from redrive.policy.envelope import (
    CAUSE_FINGERPRINT,
    CAUSE_TYPE,
    DEAD_REASON,
    ORIGIN_MESSAGE_ID,
    REAL_TOPIC,
)
from redrive.policy.naming import PARTITION_SUFFIX, TopicName
from redrive.policy.verdict import DeadReason
from redrive.reading.positions import EntryId, Position, target_partition
from redrive.reading.stored import MessagePlace, ReadMessage

BATCH_ROWS = 1_000
BATCH_BYTES = 4 * 2**20
MAX_VALUE = 16 * 2**20
"""Largest value in bytes that is passed to Spark, where a condition copies it several times."""
LONGEST_NUMBER = 2**63 - 1
"""The largest number of a column of Spark. Times and versions of messages are any 64 bits."""
_PARTITION_OF_ID = re.compile(r"\d+:\d+:(\d{1,6})(?::-?\d+)?")


class DeadLetterRow(NamedTuple):
    """One message.

    Attributes:
        partition: index of its partition; -1 in an unpartitioned topic.
        batch_size: number of messages of its entry.
        place: of the message, with the id of the client.
        first_chunk: entry of the first chunk of a chunked message; *position* is that of the last.
        encrypted: True if *value* is encrypted.
        unreadable: True if a property is not UTF-8; the client then reads no property.
        schema_version: of the schema of its topic; None if it was sent without a schema.
        key: in base64 if it is binary, like *ordering_key*; consumers send it on in this form.
        publish_time: in milliseconds since 1970, like *event_time*.
        chunks: entries of all chunks of a chunked message.
        delivered: False for an unreadable entry, of which all other fields are unknown.
        oversized: True if the value is omitted, see `ReadMessage.is_oversized`.
        id: its id at a broker without ledgers; None at Pulsar.
        binary_key: True if *key* is in base64.
    """

    partition: int
    position: Position
    batch_size: int
    place: MessagePlace
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
    id: str | None = None
    binary_key: bool = False

    @classmethod
    def undelivered(cls, partition: int, entry: EntryId) -> DeadLetterRow:
        """Return the row of an unreadable entry."""
        return cls(
            partition, Position(*entry, 0), 1, MessagePlace(partition, (entry,)), None,
            encrypted=False, unreadable=False, schema_version=None, key=None, ordering_key=None,
            value=None, properties={}, publish_time=0, event_time=None, delivered=False,
        )  # fmt: skip

    @classmethod
    def of(cls, message: ReadMessage, partition: int) -> DeadLetterRow:
        """Return the row of *message*."""
        place = message.place
        entries = place.entries
        in_chunks = len(entries) > 1
        properties = read_properties(message)
        ledger, entry = entries[-1]
        # Names of arguments would take a third of the time.
        return cls(
            partition,
            Position(ledger, entry, max(0, place.batch_index)),
            place.batch_size,
            place,
            EntryId(*entries[0]) if in_chunks else None,
            message.encryption_context() is not None,
            properties is None,
            schema_version(message),
            partition_key(message) or None,
            ordering_key(message) or None,
            None if message.has_null_value() else message.data(),
            properties or {},
            message.publish_timestamp(),
            message.event_timestamp() or None,
            tuple(starmap(EntryId, entries)) if in_chunks else (),
            oversized=message.is_oversized,
            binary_key=message.has_binary_key(),
        )

    def partition_in(self, topic: TopicName, partitions: int) -> int:
        """Return the index of the partition of *topic* to which this message is replayed.

        In its source topic it is the original partition. In other topics the ordering key, or else
        the key, decides, as for retries of consumers: a sequence stays in one partition.

        Args:
            topic: a topic with partitions.
            partitions: their number.
        """
        source = PARTITION_SUFFIX.sub("", self.properties.get(REAL_TOPIC, ""))
        if source != str(topic):
            return target_partition(self.sequence_key, self.position, partitions)
        produced_to = _PARTITION_OF_ID.fullmatch(self.properties.get(ORIGIN_MESSAGE_ID, ""))
        if produced_to and int(produced_to[1]) < partitions:
            return int(produced_to[1])
        return target_partition(self.key, self.position, partitions)

    @property
    def keys(self) -> tuple[str | None, str | None]:
        """Return the ordering key and the key, each of which may select the message."""
        return self.ordering_key, self.key

    @property
    def sequence_key(self) -> str | None:
        """Return the key within which messages are ordered, as `messages.sequence_key`."""
        return self.ordering_key or self.key

    @property
    def follows(self) -> bool:
        """Return True if it was dead-lettered because it follows a dead letter of its key."""
        return self.properties.get(DEAD_REASON) == DeadReason.FOLLOWS

    @property
    def acknowledgements(self) -> list[pulsar.MessageId]:
        """Return the message ids that acknowledge its whole entry, or all its chunks."""
        entries = self.chunks or (self.position.entry_id,)
        return [entry_acknowledgement(self.partition, entry) for entry in entries]

    @property
    def message_id(self) -> pulsar.MessageId:
        """Return the id of the client; of an undelivered entry that of the whole entry."""
        return self.place.message_id()

    @property
    def size(self) -> int:
        """Return the size of its value in bytes."""
        return len(self.value or b"")

    @property
    def replays(self) -> int:
        """Return the number of its Replays."""
        return envelope.replays(self.properties)


def entry_acknowledgement(partition: int, entry: EntryId) -> pulsar.MessageId:
    """Return the message id that acknowledges a whole entry: the index -1."""
    return pulsar.MessageId(partition, entry.ledger, entry.entry, -1)


def in_batches(letters: Iterable[DeadLetterRow]) -> Iterator[list[DeadLetterRow]]:
    """Yield the dead letters in lists of bounded size, in their order."""
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
    """Return microseconds since 1970, at most the latest time of Spark.

    Producers may set any time. The latest one compares like the original with every literal, of the
    years 1 to 9999.
    """
    return None if milliseconds is None else min(milliseconds * 1_000, LONGEST_NUMBER)


def _number(written: int | None) -> int | None:
    """Return a number of a message, at most the largest of Spark."""
    return None if written is None else min(written, LONGEST_NUMBER)


_ARROW_TYPES = {
    "BIGINT": pa.int64(),
    "BINARY": pa.binary(),
    "BOOLEAN": pa.bool_(),
    "INT": pa.int32(),
    "MAP<STRING, STRING>": pa.map_(pa.string(), pa.string()),
    "STRING": pa.string(),
    "TIMESTAMP": pa.timestamp("us", tz="UTC"),
}
"""Types in Arrow, by those in Spark."""
_COLUMNS: Mapping[str, tuple[str, Callable[[DeadLetterRow], object]]] = MappingProxyType({
    "partition": ("INT", lambda row: row.partition),
    "ledger": ("BIGINT", lambda row: row.position.ledger),
    "entry": ("BIGINT", lambda row: row.position.entry),
    "batch_index": ("INT", lambda row: row.position.batch_index),
    "batch_size": ("INT", lambda row: row.batch_size),
    "first_chunk": ("STRING", lambda row: row.first_chunk and str(row.first_chunk)),
    "delivered": ("BOOLEAN", lambda row: row.delivered),
    "oversized": ("BOOLEAN", lambda row: row.oversized),
    "encrypted": ("BOOLEAN", lambda row: row.encrypted),
    "unreadable": ("BOOLEAN", lambda row: row.unreadable),
    "schema_version": ("BIGINT", lambda row: _number(row.schema_version)),
    "key": ("STRING", lambda row: row.key),
    "ordering_key": ("STRING", lambda row: row.ordering_key),
    "follows": ("BOOLEAN", lambda row: row.follows),
    "value": ("BINARY", lambda row: row.value if row.size <= MAX_VALUE else None),
    "size": ("BIGINT", lambda row: row.size),
    "properties": ("MAP<STRING, STRING>", lambda row: list(row.properties.items())),
    "cause_type": ("STRING", lambda row: row.properties.get(CAUSE_TYPE)),
    "cause_fingerprint": ("STRING", lambda row: row.properties.get(CAUSE_FINGERPRINT)),
    "reconsume_times": ("INT", lambda row: envelope.reconsume_times(row.properties)),
    "replays": ("INT", lambda row: row.replays),
    "published": ("BIGINT", lambda row: _number(row.publish_time)),
    "publish_time": ("TIMESTAMP", lambda row: moment(row.publish_time)),
    "event_time": ("TIMESTAMP", lambda row: moment(row.event_time)),
})  # fmt: skip
"""Columns: the type in Spark, and the value of a row."""
COLUMNS = tuple(_COLUMNS)
"""All columns. Absent fields of a message are NULL, and so is the value of a null message. An
unbatched message has index 0 of 1. `published` is the publish time in milliseconds, because Python
has no times after the year 9999."""


def ddl(names: Sequence[str]) -> str:
    """Return the schema of some columns as DDL of Spark."""
    return ", ".join(f"{name} {_COLUMNS[name][0]}" for name in names)


def to_batch(letters: Sequence[DeadLetterRow], names: Sequence[str]) -> pa.RecordBatch:
    """Return some columns of the dead letters, in their order."""
    columns = ((name, *_COLUMNS[name]) for name in names)
    return record_batch((name, kind, map(value, letters)) for name, kind, value in columns)


def record_batch(columns: Iterable[tuple[str, str, Iterable[object]]]) -> pa.RecordBatch:
    """Return a batch of *columns*: the name, the type in Spark, and the values of each."""
    fields = [(name, _ARROW_TYPES[kind], values) for name, kind, values in columns]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, arrow) for _, arrow, values in fields],
        schema=pa.schema([(name, arrow) for name, arrow, _ in fields]),
    )
