"""Rows → messages of a topic, at least once.

A task that fails is run again, and sends again what it had sent: Spark can't take that back.

A receipt without an entry (`-1:-1`) is no proof: a topic that deduplicates answers so to a message
that it has dropped, and the client numbers messages from the start again when it reconnects before
a first receipt. So producers have names and sequence ids of their own, and a message with such a
receipt is sent again under a higher id.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

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

from redrive.delivery.identity import identity
from redrive.errors import RedriveError
from redrive.spark.options import WriteOptions, written_topic
from redrive.spark.topics import TopicReader, failures

_TYPES: dict[str, tuple[type[DataType], ...]] = {
    "value": (BinaryType, StringType),
    "__key": (BinaryType, StringType),
    "__topic": (StringType,),
    "__eventTime": (TimestampType,),
    "__messageProperties": (MapType,),
}
_PROPERTIES = "map<string,string>"
_MAX_SENDS = 5
"""Sends of a message whose receipts have no entry."""


class UnwritableError(RedriveError):
    """Rows are not what messages can be made of."""

    reason: ClassVar[str] = "Unwritable"


class NotWrittenError(RedriveError):
    """There is no receipt for a message; others of the query may have been stored."""

    reason: ClassVar[str] = "NotWritten"


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
        rows = list(messages(batch))
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
                    # So a Key_Shared subscription gets each batch whole.
                    batching_type=pulsar.BatchingType.KeyBased,
                )
        return self._producers[topic]


def messages(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Return what the client takes for each row, with `value` and `__topic`."""
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        columns[name] = (_microseconds(column) if name == "__eventTime" else column).to_pylist()
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        yield _message(row)


def _microseconds(moments: pa.Array) -> pa.Array:
    return moments.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())


def _message(row: dict[str, Any]) -> dict[str, Any]:
    key, moment = row.get("__key"), row.get("__eventTime")
    value = row["value"]
    message = {
        "value": value.encode() if isinstance(value, str) else value,
        "partition_key": _text(key) if isinstance(key, bytes) else key,
        "event_timestamp": None if moment is None else moment // 1_000,
        "properties": {name: text or "" for name, text in row.get("__messageProperties") or ()},
    }
    if "__topic" in row:
        message["__topic"] = row["__topic"]
    return message


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise UnwritableError(
            "the Python client sends keys of text only",
            got=key[:64],
            remedy="write keys as text, such as with base64(__key)",
        ) from None
