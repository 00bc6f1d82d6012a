"""Messages as rows of a DataFrame: columns of a read, and the writer of rows.

A column has the name that it has in the JVM connector for Pulsar. `read_slice` is the work of one
reading task. `TopicWriter` sends rows as messages, at least once: a task that fails is run again
and sends its messages again, because Spark cannot undo sends.

A receipt without an entry (`-1:-1`) is no proof. A topic that deduplicates gives it for a message
that it dropped, and the client restarts its numbers when it reconnects before the first receipt. So
producers have unique names and their own sequence ids, and a message with such a receipt is sent
again under a higher id.

The client counts only values when it decides that a batch is full. A batch with more keys and
properties than the broker accepts in a message makes it hang, or ends its process. So a producer is
flushed before its batches have that many.
"""

from __future__ import annotations

import base64
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pulsar
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType, TimestampType

from redrive.delivery.concurrency import SendWatchdog, identity
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import reader, rows
from redrive.reading.broker import UNPARTITIONED, ReplayRoleRefusedError
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MAX_READ_CONTENT
from redrive.spark.options import ReadOptions, WriteOptions, written_topic
from redrive.spark.slices import DataLossError, Filters, Slice
from redrive.spark.topics import TopicReader, failures

_MEBIBYTES = MAX_READ_CONTENT // 2**20
_END = 253_402_214_400_000
"""9999-12-31 in UTC, in milliseconds since 1970: the last time that Python has in each time
zone."""


COLUMNS: Mapping[str, tuple[str, Callable[[DeadLetterRow, TopicName], object]]] = MappingProxyType({
    "value": ("BINARY", lambda row, _: None if row.oversized else row.value),
    "__key": ("BINARY", lambda row, _: _key(row)),
    "__topic": ("STRING", lambda _, topic: str(topic)),
    "__messageId": ("BINARY", lambda row, _: row.message_id.serialize()),
    "__publishTime": ("TIMESTAMP", lambda row, _: moment(row.publish_time)),
    "__eventTime": ("TIMESTAMP", lambda row, _: moment(row.event_time)),
    "__messageProperties": (
        "MAP<STRING, STRING>",
        lambda row, _: None if row.unreadable else list(row.properties.items())),
    "__partition": ("INT", lambda row, _: row.partition),
    "__ledger": ("BIGINT", lambda row, _: row.position.ledger),
    "__entry": ("BIGINT", lambda row, _: row.position.entry),
    "__batchIndex": ("INT", lambda row, _: row.position.batch_index),
    "__encrypted": ("BOOLEAN", lambda row, _: row.encrypted),
    "__oversized": ("BOOLEAN", lambda row, _: row.oversized),
})  # fmt: skip
"""Columns: the type in Spark, and the value of a message of a partition."""


def moment(milliseconds: int | None) -> int | None:
    """Return microseconds since 1970; None for a time on 9999-12-31 or later.

    Senders choose the times of a message, and Python cannot read rows of Spark with later ones.
    """
    return None if milliseconds is None or milliseconds >= _END else rows.moment(milliseconds)


def _key(row: DeadLetterRow) -> bytes | None:
    """Return the key as its producer set it."""
    if row.key is None:
        return None
    if row.binary_key:
        with suppress(ValueError):  # brokers decode it without padding, too
            return base64.b64decode(row.key + "=" * (-len(row.key) % 4), validate=True)
    return row.key.encode()


def ddl(names: Sequence[str]) -> str:
    """Return the schema of columns in Spark's notation."""
    return ", ".join(f"`{name}` {COLUMNS[name][0]}" for name in names)


def to_batch(
    messages: Sequence[DeadLetterRow], names: Sequence[str], topic: TopicName
) -> pa.RecordBatch:
    """Return messages of a partition as columns, in their order."""
    columns = ((name, *COLUMNS[name]) for name in names)
    return rows.record_batch(
        (name, kind, [value(row, topic) for row in messages]) for name, kind, value in columns
    )


def read_slice(piece: Slice, options: ReadOptions, filters: Filters) -> Iterator[pa.RecordBatch]:
    """Read a slice, in batches of bounded size.

    Raises:
        DataLossError: the broker deleted a part of it since the query was planned.
        RedriveError: a message is encrypted or too large, or the broker refuses the read.
        SourceSilentError: deliveries stop before the end.
    """
    messages = _messages(piece, options)
    kept = (row for row in messages if filters.keep_times(row.publish_time, row.event_time))
    for batch in rows.in_batches(kept):
        yield to_batch(batch, options.columns, piece.topic)


def _messages(piece: Slice, options: ReadOptions) -> Iterator[DeadLetterRow]:
    broker = TopicReader(options.connection)
    entries, last = 0, None
    with broker.client() as client:
        # Without a time limit: Spark repeats a failed task.
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
    planned = sum(span.size for span in piece.spans)
    if read_through and options.fail_on_data_loss and entries < planned:
        # Entries without a message are usual: chunks, and markers of transactions.
        gone = {span.ledger for span in piece.spans} - broker.held(piece.topic)
        if gone:
            raise DataLossError(
                f"the broker deleted a part of {piece.topic} during the read",
                got=f"{entries} of {planned} entries; ledgers {sorted(gone)} are deleted",
                remedy="retain messages longer, by a subscription or by retention; to read without "
                "them, set failOnDataLoss to false",
            )


def _readable(row: DeadLetterRow, piece: Slice, options: ReadOptions) -> DeadLetterRow:
    if row.encrypted and "__encrypted" not in options.columns:
        raise RedriveError(
            f"a message of {piece.topic} is encrypted, so its value cannot be read",
            got=":".join(map(str, row.position)),
            remedy="add __encrypted to the columns to read such messages as they are stored",
            reason="EncryptedMessage",
        )
    if row.oversized and "__oversized" not in options.columns:
        raise RedriveError(
            f"a message of {piece.topic}, or a batch, has more than {_MEBIBYTES} MiB when it is "
            "decompressed, so its value is not read",
            got=":".join(map(str, row.position)),
            remedy="add __oversized to the columns to read each of these as one row without value",
            reason="ContentTooLarge",
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
_MAX_FIELDS = 2**19
"""Bytes of keys and properties that a producer collects in batches, beside 128 KiB of values. A
broker accepts messages of 5 MiB by default, and usually of 1 MiB at least."""
_OVERHEAD = 16
"""Bytes of a message or of a property beside its texts, at most."""

MAX_SECONDS = 120.0
"""Longest wait for a receipt; the client's own limit does not hold while it reconnects."""


@dataclass
class Written(WriterCommitMessage):
    """Number of messages that a task sent with receipts."""

    messages: int


class TopicWriter(DataSourceArrowWriter):
    """Sends a message for each row.

    Raises:
        RedriveError: a column is not one of a message, or no topic is set.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        self._options = options
        for column in schema.fields:
            is_map = isinstance(column.dataType, MapType)
            if not isinstance(column.dataType, _TYPES.get(column.name, ())) or (
                is_map and column.dataType.simpleString() != _PROPERTIES
            ):
                raise _unwritable(
                    f"the column {column.name} cannot be written",
                    got=column.dataType.simpleString(),
                    remedy="write value and __key (binary or string), __topic, __eventTime "
                    "(timestamp) and __messageProperties (map of strings), and no other",
                )
        names = schema.fieldNames()
        if "value" not in names or ("__topic" in names) == (options.topic is not None):
            raise _unwritable(
                "rows must have a value, and either the option topic or a column __topic must "
                "exist",
                got=names,
                remedy="add what is missing, or leave one out",
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task, and wait for all receipts.

        Raises:
            RedriveError: a message was refused, or has no receipt.
        """
        with TopicReader(self._options.connection).client() as client:
            sending = _Sending(client, self._options)
            with closing(sending):
                for batch in iterator:
                    sending.send(batch)
            return Written(sending.messages)


class _Sending:
    """Producers of one task, each opened at its first use."""

    def __init__(self, client: pulsar.Client, options: WriteOptions) -> None:
        self.messages = 0
        self._client = client
        self._options = options
        self._producers: dict[str, pulsar.Producer] = {}
        self._watchdog = SendWatchdog()
        self._stuck = False
        self._unsent: Counter[str] = Counter()  # bytes of keys and properties by topic
        self._sequence_ids = itertools.count(1)  # the client regards 0 as none
        self._too_big: list[dict[str, Any]] = []
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
            raise RedriveError(
                f"{len(self._failed) + len(rows)} of {batch.num_rows} messages were not stored",
                got=str(self._failed[0]) if self._failed else "receipts without an entry",
                remedy="remove the cause and write again; readers then receive duplicates",
                reason="NotWritten",
            )
        self.messages += batch.num_rows

    def _send(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            topic = self._topic(row.get("__topic"))
            fields = {name: row[name] for name in row.keys() - {"__topic", "value"}}
            producer, (_, size) = self._producer(topic), _sizes(row)
            size += _OVERHEAD * (len(row["properties"]) + 1)
            if self._unsent[topic] + size > _MAX_FIELDS:
                self._flush(topic)
            self._unsent[topic] += size
            with failures(f"send a message to {topic}", "produce"), self._watch(producer):
                producer.send_async(
                    row["value"],
                    functools.partial(self._receipt, row),
                    sequence_id=next(self._sequence_ids),
                    **fields,
                )
        for topic in self._producers:
            self._flush(topic)

    def _flush(self, topic: str) -> None:
        with failures(f"store messages on {topic}", "produce"):
            try:
                with self._watch(self._producers[topic]):
                    self._producers[topic].flush()
            except pulsar.MessageTooBig:
                if not self._too_big:
                    raise
            except pulsar.AlreadyClosed:
                if not self._stuck:
                    raise
                raise RedriveError(
                    f"the broker has stored no message on {topic} for a long time",
                    got=f"{MAX_SECONDS:.0f} s",
                    remedy="check that the broker works, and that the topic has no maxMessageSize "
                    "of its own, which clients do not know; then write again: readers receive "
                    "duplicates of the rows that were stored",
                    reason="NotWritten",
                ) from None
        self._unsent[topic] = 0
        if self._too_big:
            row = max(self._too_big, key=lambda row: sum(_sizes(row)))
            topic, (value, fields) = self._topic(row.get("__topic")), _sizes(row)
            raise _unwritable(
                f"a row has more bytes than a message of {topic} may have",
                got={"value": value, "key and properties": fields},
                remedy="write shorter ones, or raise maxMessageSize of the broker; other rows may "
                "be stored, and readers receive duplicates of them when you write again",
            )

    def close(self) -> None:
        """End the watchdog."""
        self._watchdog.close()

    def _watch(self, producer: pulsar.Producer) -> AbstractContextManager[object]:
        def give_up() -> None:
            self._stuck = True
            with suppress(pulsar.PulsarException):
                producer.close()  # it ends all its calls

        return self._watchdog.during(MAX_SECONDS, give_up)

    def _topic(self, named: str | None) -> str:
        topic = named or self._options.topic
        if topic is None:
            raise _unwritable(
                "a row has no topic, and the option topic is not set",
                got=named,
                remedy="fill in __topic",
            )
        return str(topic)

    def _receipt(
        self, row: dict[str, Any], result: pulsar.Result, stored_as: pulsar.MessageId
    ) -> None:
        if result == pulsar.Result.MessageTooBig:
            self._too_big.append(row)
        elif result != pulsar.Result.Ok:
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
                    # Then a KeyShared subscription gets each batch as a whole.
                    batching_type=pulsar.BatchingType.KeyBased,
                )
        return self._producers[topic]


def _sizes(row: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the value, and those of key and properties."""
    properties: dict[str, str] = row["properties"]
    texts = (row["partition_key"] or "", *properties, *properties.values())
    return len(row["value"] or b""), sum(len(text.encode()) for text in texts)


def messages_of_batch(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the client's arguments for each row, with `value` and `__topic`.

    Raises:
        RedriveError: a value cannot be sent by Pulsar's Python client.
    """
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = _plain(name, column).to_pylist()
        except UnicodeDecodeError as error:
            raise _unwritable(
                f"a text of the column {name} is not UTF-8",
                got=error.object[:64],
                remedy="encode it, for example with base64(…)",
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
        raise _unwritable(
            "__eventTime must be at least 1970-01-01 00:00:00.001 UTC: Pulsar regards 0 as none",
            got=f"{microseconds} µs since 1970",
            remedy="write a later time, or NULL for none",
        )
    if microseconds is not None and microseconds >= _END * _MILLISECOND:
        raise _unwritable(
            "__eventTime must be before 9999-12-31 00:00:00 UTC: later times are read back as NULL",
            got=f"{microseconds} µs since 1970",
            remedy="write an earlier time, or NULL for none",
        )
    return None if microseconds is None else microseconds // _MILLISECOND


def _properties(items: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    properties: dict[str, str] = {}
    for name, text in items:
        if text is None:
            raise _unwritable(
                "a property of a message must not be NULL",
                got=name,
                remedy="write a text, or leave it out, for example with "
                "map_filter(properties, (name, text) -> text IS NOT NULL)",
            )
        properties[name] = text
    return properties


def _text(key: bytes) -> str:
    if not key:
        raise _unwritable(
            "__key must not be empty, because the Python client sends such a message without a key",
            got=key,
            remedy="write another text, or NULL for none, for example with nullif(__key, '')",
        )
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise _unwritable(
            "a key must be text, because the Python client sends no other",
            got=key[:64],
            remedy="write keys as text, for example with base64(__key)",
        ) from None


def _unwritable(problem: str, *, got: object, remedy: str) -> RedriveError:
    return RedriveError(problem, got=got, remedy=remedy, reason="Unwritable")
