"""A dead letter: from a message, to a row of Spark for a selection to look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pulsar
import pyarrow as pa

from redrive.copying import reading
from redrive.replay.topic import messageid
from redrive.replay.topic.position import EntryId, Position

BATCH_ROWS = 1_000
BATCH_BYTES = 4 * 2**20

DDL = (
    "partition INT, ledger BIGINT, entry BIGINT, batch_index INT, batch_size INT, "
    "first_chunk STRING, encrypted BOOLEAN, unreadable BOOLEAN, schema_version BIGINT, "
    "key STRING, ordering_key STRING, value BINARY, properties MAP<STRING, STRING>, "
    "publish_time TIMESTAMP, event_time TIMESTAMP"
)
"""The columns of `spark.read.format("pulsar")`. What a message does not have is NULL, and so is
the value of one that carries a null instead of bytes. An unbatched message is index 0 of 1."""

_MOMENT = pa.timestamp("us", tz="UTC")
_SCHEMA = pa.schema(
    {
        "partition": pa.int32(),
        "ledger": pa.int64(),
        "entry": pa.int64(),
        "batch_index": pa.int32(),
        "batch_size": pa.int32(),
        "first_chunk": pa.string(),
        "encrypted": pa.bool_(),
        "unreadable": pa.bool_(),
        "schema_version": pa.int64(),
        "key": pa.string(),
        "ordering_key": pa.string(),
        "value": pa.binary(),
        "properties": pa.map_(pa.string(), pa.string()),
        "publish_time": _MOMENT,
        "event_time": _MOMENT,
    }
)


@dataclass(frozen=True)
class DeadLetterRow:
    """One message.

    Attributes:
        partition: of the topic it lies in; -1 if that has none.
        batch_size: how many messages its entry holds.
        message_id: as the client has it: of one in chunks it knows all their entries.
        first_chunk: of one that was sent in chunks, the entry of the first; *position* is the last.
        encrypted: whether *value* is what only its readers can decrypt.
        unreadable: whether one of its properties is no text; then the client shows none of them.
        schema_version: of the schema of the topic it lies in; None if it was sent without.
        key: in base64 if it is no text, as is *ordering_key*: so consumers send it on, too.
        publish_time: in milliseconds since 1970, as is *event_time*.
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

    @classmethod
    def of(cls, message: pulsar.Message, partition: int) -> DeadLetterRow:
        """Take all there is of *message*."""
        message_id = message.message_id()
        entry = messageid.entry_of(message_id.serialize())
        at = EntryId(message_id.ledger_id(), message_id.entry_id())
        properties = reading.properties(message)
        return cls(
            partition=partition,
            position=Position(*at, max(0, message_id.batch_index())),
            batch_size=entry.size,
            message_id=message_id,
            first_chunk=entry.first,
            encrypted=message.encryption_context() is not None,
            unreadable=properties is None,
            schema_version=reading.schema_version(message),
            key=reading.partition_key(message) or None,
            ordering_key=reading.ordering_key(message) or None,
            value=None if message.has_null_value() else message.data(),
            properties=properties or {},
            publish_time=message.publish_timestamp(),
            event_time=message.event_timestamp() or None,
        )

    @property
    def acknowledgement(self) -> pulsar.MessageId:
        """Return what to acknowledge it by, with all that is in its entry, or with all chunks."""
        if self.first_chunk is not None:
            return self.message_id
        return entry_acknowledgement(self.partition, self.position.entry_id)

    @property
    def size(self) -> int:
        """Return the bytes of its value."""
        return len(self.value or b"")


def entry_acknowledgement(partition: int, entry: EntryId) -> pulsar.MessageId:
    """Return what to acknowledge a whole entry by: the index -1, as no client can name a part."""
    return pulsar.MessageId(partition, entry.ledger, entry.entry, -1)


def in_batches(letters: Iterable[DeadLetterRow]) -> Iterator[list[DeadLetterRow]]:
    """Put *letters* together in lists of bounded size, in their order."""
    batch: list[DeadLetterRow] = []
    size = 0
    for letter in letters:
        batch.append(letter)
        size += letter.size
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def to_batch(letters: Sequence[DeadLetterRow]) -> pa.RecordBatch:
    """Write *letters* as rows, in their order."""
    return pa.RecordBatch.from_pylist([_row(letter) for letter in letters], schema=_SCHEMA)


def _row(letter: DeadLetterRow) -> dict[str, object]:
    return {
        "partition": letter.partition,
        "ledger": letter.position.ledger,
        "entry": letter.position.entry,
        "batch_index": letter.position.batch_index,
        "batch_size": letter.batch_size,
        "first_chunk": None if letter.first_chunk is None else str(letter.first_chunk),
        "encrypted": letter.encrypted,
        "unreadable": letter.unreadable,
        "schema_version": letter.schema_version,
        "key": letter.key,
        "ordering_key": letter.ordering_key,
        "value": letter.value,
        "properties": list(letter.properties.items()),
        "publish_time": letter.publish_time * 1_000,
        "event_time": None if letter.event_time is None else letter.event_time * 1_000,
    }
