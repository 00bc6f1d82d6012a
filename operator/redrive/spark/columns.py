"""Messages as the columns that a read has; each named as the JVM connector for Pulsar names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa

from redrive.policy.naming import TopicName
from redrive.replay.topic import rows
from redrive.replay.topic.rows import DeadLetterRow

_MOMENT = pa.timestamp("us", tz="UTC")
_END = 253_402_214_400_000
"""9999-12-31 in UTC, in milliseconds since 1970: Python has no later moment in each time zone."""


@dataclass(frozen=True)
class MessageColumn:
    """A column.

    Attributes:
        type: in Spark's words.
        arrow: the same in those of Arrow.
        of: what a message of a partition has there.
    """

    type: str
    arrow: pa.DataType
    of: Callable[[DeadLetterRow, TopicName], object]


COLUMNS: Mapping[str, MessageColumn] = MappingProxyType(
    {
        "value": MessageColumn("BINARY", pa.binary(), lambda row, _: row.value),
        "__key": MessageColumn(
            "BINARY", pa.binary(), lambda row, _: None if row.key is None else row.key.encode()
        ),
        "__topic": MessageColumn("STRING", pa.string(), lambda _, topic: str(topic)),
        "__messageId": MessageColumn(
            "BINARY", pa.binary(), lambda row, _: row.message_id.serialize()
        ),
        "__publishTime": MessageColumn(
            "TIMESTAMP", _MOMENT, lambda row, _: moment(row.publish_time)
        ),
        "__eventTime": MessageColumn("TIMESTAMP", _MOMENT, lambda row, _: moment(row.event_time)),
        "__messageProperties": MessageColumn(
            "MAP<STRING, STRING>",
            pa.map_(pa.string(), pa.string()),
            lambda row, _: None if row.unreadable else list(row.properties.items()),
        ),
        "__partition": MessageColumn("INT", pa.int32(), lambda row, _: row.partition),
        "__ledger": MessageColumn("BIGINT", pa.int64(), lambda row, _: row.position.ledger),
        "__entry": MessageColumn("BIGINT", pa.int64(), lambda row, _: row.position.entry),
        "__batchIndex": MessageColumn("INT", pa.int32(), lambda row, _: row.position.batch_index),
        "__encrypted": MessageColumn("BOOLEAN", pa.bool_(), lambda row, _: row.encrypted),
    }
)


def moment(milliseconds: int | None) -> int | None:
    """Return microseconds since 1970, None for a time on 9999-12-31 or later.

    Whoever sends a message sets its times, and Python can't read rows of Spark with later ones.
    """
    return None if milliseconds is None or milliseconds >= _END else rows.moment(milliseconds)


def ddl(names: Sequence[str]) -> str:
    """Return the schema of some columns in Spark's words."""
    return ", ".join(f"`{name}` {COLUMNS[name].type}" for name in names)


def to_batch(
    messages: Sequence[DeadLetterRow], names: Sequence[str], topic: TopicName
) -> pa.RecordBatch:
    """Write messages of a partition as columns, in their order."""
    columns = [COLUMNS[name] for name in names]
    return pa.RecordBatch.from_arrays(
        [pa.array([column.of(row, topic) for row in messages], column.arrow) for column in columns],
        schema=pa.schema(zip(names, (column.arrow for column in columns), strict=True)),
    )
