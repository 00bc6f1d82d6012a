"""Messages ⇄ rows of a DataFrame.

Messages as the columns that a read has; each named as the JVM connector for Pulsar names it.

What one task does: a slice of a partition → batches of columns.

Rows → messages of a topic, at least once.

A task that fails is run again, and sends again what it had sent: Spark can't take that back.

A receipt without an entry (`-1:-1`) is no proof: a topic that deduplicates answers so to a message
that it has dropped, and the client numbers messages from the start again when it reconnects before
a first receipt. So producers have names and sequence ids of their own, and a message with such a
receipt is sent again under a higher id.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pulsar
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from redrive.delivery.concurrency import identity
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import reader, rows
from redrive.reading.broker import UNPARTITIONED, ReplayRoleRefusedError
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.spark.options import ReadOptions, WriteOptions, written_topic
from redrive.spark.slices import DataLossError, Filters, Slice
from redrive.spark.topics import TopicReader, failures

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


class EncryptedMessageError(RedriveError):
    """A message is encrypted, and the query does not ask whether messages are."""

    reason = "EncryptedMessage"


def read_slice(piece: Slice, options: ReadOptions, filters: Filters) -> Iterator[pa.RecordBatch]:
    """Read a slice, in batches of bounded size.

    Raises:
        DataLossError: the broker has deleted part of it since the query was planned.
        EncryptedMessageError: see there.
        PulsarFailedError: the broker does not let it be read.
        SourceSilentError: it stops delivering before the end.
    """
    messages = _messages(piece, options)
    kept = (row for row in messages if filters.keep_times(row.publish_time, row.event_time))
    for batch in rows.in_batches(kept):
        yield to_batch(batch, options.columns, piece.topic)


def _messages(piece: Slice, options: ReadOptions) -> Iterator[DeadLetterRow]:
    broker = TopicReader(options.connection)
    entries, last = 0, None
    with broker.client() as client:
        # Spark tries a task again by itself.
        read_through = None if options.connection.admin_url is None else broker.read_through
        topic = ReadableTopic(client, "", piece.topic, read_through, open_seconds=0)
        ahead = reader.prefetch(piece.entry_bytes)
        with _refusals(piece):
            for message in reader.read_messages(
                topic, UNPARTITIONED, piece.begin, piece.spans, ahead
            ):
                row = DeadLetterRow.of(message, piece.partition)
                if piece.holds(row.position):
                    entries += row.position.entry_id != last
                    last = row.position.entry_id
                    yield _readable(row, piece, options)
    there = sum(span.size for span in piece.spans)
    if read_through and options.fail_on_data_loss and entries < there:
        # Entries without a message of their own are usual: chunks, and markers of transactions.
        gone = {span.ledger for span in piece.spans} - broker.held(piece.topic)
        if gone:
            raise DataLossError(
                f"the broker has deleted a part of {piece.topic} while it was read",
                got=f"{entries} of {there} entries, and no ledgers {sorted(gone)} any more",
                remedy="keep messages longer, by a subscription or by retention; to do without "
                "them, set failOnDataLoss to false",
            )


def _readable(row: DeadLetterRow, piece: Slice, options: ReadOptions) -> DeadLetterRow:
    if row.encrypted and "__encrypted" not in options.columns:
        raise EncryptedMessageError(
            f"a message of {piece.topic} is encrypted, and its value would be what is stored",
            got=":".join(map(str, row.position)),
            remedy="name __encrypted among the columns to get such messages as they are stored",
        )
    return row


@contextmanager
def _refusals(piece: Slice) -> Iterator[None]:
    try:
        yield
    except ReplayRoleRefusedError as error:
        with failures(f"let {piece.topic} be read", "consume"):
            raise error.__cause__ or error from None


_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "value": (BinaryType, StringType),
    "__key": (BinaryType, StringType),
    "__topic": (StringType,),
    "__eventTime": (TimestampType,),
    "__messageProperties": (MapType,),
}
_PROPERTIES = "map<string,string>"
_MILLISECOND = 1_000
"""Microseconds."""
_MAX_SENDS = 5
"""Sends of a message whose receipts have no entry."""


class UnwritableError(RedriveError):
    """Rows are not what messages can be made of."""

    reason = "Unwritable"


class NotWrittenError(RedriveError):
    """There is no receipt for a message; others of the query may have been stored."""

    reason = "NotWritten"


@dataclass
class Written(WriterCommitMessage):
    """How many messages a task has sent, each with a receipt."""

    messages: int


class TopicWriter(DataSourceArrowWriter):
    """Sends a message for each row.

    Raises:
        UnwritableError: the columns are others than those of messages, or the topic is not said.
    """

    def __init__(self, of: WriteOptions, schema: StructType) -> None:
        self._options = of
        for column in schema.fields:
            of_map = isinstance(column.dataType, MapType)
            if not isinstance(column.dataType, _TYPES.get(column.name, ())) or (
                of_map and column.dataType.simpleString() != _PROPERTIES
            ):
                raise UnwritableError(
                    f"there is no way to write the column {column.name}",
                    got=column.dataType.simpleString(),
                    remedy="write value and __key (binary or string), __topic, __eventTime "
                    "(timestamp) and __messageProperties (map of strings), and no other",
                )
        names = schema.fieldNames()
        if "value" not in names or ("__topic" in names) == (of.topic is not None):
            raise UnwritableError(
                "rows need a value, and either the option topic or a column __topic",
                got=names,
                remedy="add what is missing, or leave one out",
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task, and wait for all receipts.

        Raises:
            NotWrittenError: one is refused, or does not come.
        """
        with TopicReader(self._options.connection).client() as client:
            sending = _Sending(client, self._options)
            for batch in iterator:
                sending.send(batch)
            return Written(sending.messages)


class _Sending:
    """The producers of one task, each opened when it is first needed."""

    def __init__(self, client: pulsar.Client, options: WriteOptions) -> None:
        self.messages = 0
        self._client = client
        self._options = options
        self._producers: dict[str, pulsar.Producer] = {}
        self._sequence_ids = itertools.count(1)  # the client takes 0 for none
        self._failed: list[pulsar.Result] = []
        self._dropped: list[dict[str, Any]] = []

    def send(self, batch: pa.RecordBatch) -> None:
        """Send a batch of rows, and wait for its receipts."""
        rows = list(messages_of_batch(batch))
        for _ in range(_MAX_SENDS):
            self._send(rows)
            rows, self._dropped = self._dropped, []
            if self._failed or not rows:
                break
        if self._failed or rows:
            raise NotWrittenError(
                f"{len(self._failed) + len(rows)} of {batch.num_rows} messages were not stored",
                got=str(self._failed[0]) if self._failed else "receipts without an entry",
                remedy="remove the cause and write again; readers then find twice what was stored",
            )
        self.messages += batch.num_rows

    def _send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            topic = self._topic(row.get("__topic"))
            fields = {name: row[name] for name in row.keys() - {"__topic", "value"}}
            with failures(f"take a message on {topic}", "produce"):
                self._producer(topic).send_async(
                    row["value"],
                    functools.partial(self._receipt, row),
                    sequence_id=next(self._sequence_ids),
                    **fields,
                )
        for topic, producer in self._producers.items():
            with failures(f"store messages on {topic}", "produce"):
                producer.flush()

    def _topic(self, named: str | None) -> str:
        topic = named or self._options.topic
        if topic is None:
            raise UnwritableError(
                "a row names no topic, and no option does", got=named, remedy="fill in __topic"
            )
        return str(topic)

    def _receipt(
        self, row: dict[str, Any], result: pulsar.Result, stored_as: pulsar.MessageId
    ) -> None:
        if result != pulsar.Result.Ok:
            self._failed.append(result)
        elif stored_as.ledger_id() < 0:
            self._dropped.append(row)

    def _producer(self, topic: str) -> pulsar.Producer:
        if topic not in self._producers:
            with failures(f"open a producer on {topic}", "produce"):
                self._producers[topic] = self._client.create_producer(
                    str(written_topic(topic)),
                    producer_name=identity(),
                    block_if_queue_full=True,
                    batching_enabled=True,
                    # So a KeyShared subscription gets each batch whole.
                    batching_type=pulsar.BatchingType.KeyBased,
                )
        return self._producers[topic]


def messages_of_batch(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Return what the client takes for each row, with `value` and `__topic`.

    Raises:
        UnwritableError: a row holds something that no message of Pulsar's Python client can carry.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = _plain(name, column).to_pylist()
        except UnicodeDecodeError as error:
            raise UnwritableError(
                f"a text of the column {name} is not UTF-8",
                got=error.object[:64],
                remedy="encode it, such as with base64(…)",
            ) from None
    for values in zip(*columns.values(), strict=True):
        yield _message(dict(zip(columns, values, strict=True)))


def _plain(name: str, column: pa.Array) -> pa.Array:
    if name == "__eventTime":
        return column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return column.cast(pa.binary()) if name in {"value", "__key"} else column


def _message(row: dict[str, Any]) -> dict[str, Any]:
    key = row.get("__key")
    message = {
        "value": row["value"],
        "partition_key": None if key is None else _text(key),
        "event_timestamp": _event_time(row.get("__eventTime")),
        "properties": _properties(row.get("__messageProperties") or ()),
    }
    if "__topic" in row:
        message["__topic"] = row["__topic"]
    return message


def _event_time(microseconds: int | None) -> int | None:
    if microseconds is not None and microseconds < _MILLISECOND:
        raise UnwritableError(
            "__eventTime is before 1970-01-01 00:00:00.001 UTC, the first event time that a "
            "message can have: Pulsar takes 0 for none",
            got=f"{microseconds} µs since 1970",
            remedy="write a later time, or NULL for none",
        )
    return None if microseconds is None else microseconds // _MILLISECOND


def _properties(items: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    properties: dict[str, str] = {}
    for name, text in items:
        if text is None:
            raise UnwritableError(
                "a property of a message can't be NULL",
                got=name,
                remedy="write a text, or leave it out, such as with "
                "map_filter(properties, (name, text) -> text IS NOT NULL)",
            )
        properties[name] = text
    return properties


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise UnwritableError(
            "the Python client sends keys of text only",
            got=key[:64],
            remedy="write keys as text, such as with base64(__key)",
        ) from None
