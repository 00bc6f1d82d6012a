"""A dead letter: from a message, to a row of Spark for a selection to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulsar
import pyarrow as pa

from redrive.policy import text
from redrive.replay.topic import messageid
from redrive.replay.topic.position import Position

DDL = (
    "partition INT, ledger BIGINT, entry BIGINT, batch_index INT, batch_size INT, "
    "chunked BOOLEAN, encrypted BOOLEAN, unreadable BOOLEAN, "
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
        "chunked": pa.bool_(),
        "encrypted": pa.bool_(),
        "unreadable": pa.bool_(),
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
        chunked: whether it was cut into several entries.
        encrypted: whether *value* is what only its readers can decrypt.
        unreadable: whether one of its properties is no text; then the client shows none of them.
        key: in base64 if it is no text, as is *ordering_key*: so consumers send it on, too.
        publish_time: in milliseconds since 1970, as is *event_time*.
    """

    partition: int
    position: Position
    batch_size: int
    chunked: bool
    encrypted: bool
    unreadable: bool
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
        index = max(0, message_id.batch_index())
        properties = text.properties(message.properties)
        return cls(
            partition=partition,
            position=Position(message_id.ledger_id(), message_id.entry_id(), index),
            batch_size=entry.size,
            chunked=entry.chunked,
            encrypted=message.encryption_context() is not None,
            unreadable=properties is None,
            key=text.key(message.partition_key) or None,
            ordering_key=text.key(message.ordering_key) or None,
            value=None if message.has_null_value() else message.data(),
            properties=properties or {},
            publish_time=message.publish_timestamp(),
            event_time=message.event_timestamp() or None,
        )

    @property
    def size(self) -> int:
        """Return the bytes of its value."""
        return len(self.value or b"")


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
        "chunked": letter.chunked,
        "encrypted": letter.encrypted,
        "unreadable": letter.unreadable,
        "key": letter.key,
        "ordering_key": letter.ordering_key,
        "value": letter.value,
        "properties": list(letter.properties.items()),
        "publish_time": letter.publish_time * 1_000,
        "event_time": None if letter.event_time is None else letter.event_time * 1_000,
    }
