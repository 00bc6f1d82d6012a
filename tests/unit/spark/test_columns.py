"""Rows reach Spark in the types that it was told, and come back as messages."""

from __future__ import annotations

import pulsar
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from redrive.policy.naming import TopicName
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.spark.options import COLUMN_NAMES, MORE_COLUMN_NAMES
from redrive.spark.rows import COLUMNS, UnwritableError, messages_of_batch, to_batch

ORDERS = TopicName("shop", "prod", "orders")
TYPES: dict[str, DataType] = {
    "BINARY": BinaryType(),
    "STRING": StringType(),
    "TIMESTAMP": TimestampType(),
    "MAP<STRING, STRING>": MapType(StringType(), StringType()),
    "INT": IntegerType(),
    "BIGINT": LongType(),
    "BOOLEAN": BooleanType(),
}
ROW = DeadLetterRow(
    partition=2,
    position=Position(7, 8, 9),
    batch_size=10,
    message_id=pulsar.MessageId(2, 7, 8, 9),
    first_chunk=None,
    encrypted=False,
    unreadable=False,
    schema_version=None,
    key="k",
    ordering_key=None,
    value=b"v",
    properties={"a": "1"},
    publish_time=1_700_000_000_123,
    event_time=1_700_000_000_456,
)
NAMES = (*COLUMN_NAMES, *MORE_COLUMN_NAMES)
text = st.text(max_size=10)


def test_all_columns_have_the_types_that_spark_expects() -> None:
    assert set(COLUMNS) == set(NAMES)
    schema = StructType()
    for name in NAMES:
        schema = schema.add(name, TYPES[COLUMNS[name].type])
    for row in (ROW, ROW._replace(key=None, value=None, event_time=None, unreadable=True)):
        batch = to_batch([row, row], NAMES, ORDERS)
        assert to_arrow_schema(schema, timezone="UTC").equals(batch.schema)
        assert batch.num_rows == 2
    empty = to_batch([ROW._replace(unreadable=True)], ["__messageProperties"], ORDERS)
    assert empty.to_pylist() == [{"__messageProperties": None}]


@given(
    st.none() | st.binary(max_size=10),
    st.none() | text,
    st.dictionaries(text, text, max_size=3),
    st.none() | st.integers(1, 2**42),
)
def test_what_was_read_is_written_as_it_was(
    value: bytes | None, key: str | None, properties: dict[str, str], event: int | None
) -> None:
    row = ROW._replace(value=value, key=key, properties=properties, event_time=event)
    names = ["value", "__key", "__eventTime", "__messageProperties"]
    (message,) = messages_of_batch(to_batch([row], names, ORDERS))
    assert message == {
        "value": value,
        "partition_key": key,
        "event_timestamp": event,
        "properties": properties,
    }


def test_text_is_written_as_utf8_and_a_key_that_is_none_is_refused() -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["ü"], "__topic": ["orders"]})
    (message,) = messages_of_batch(batch)
    assert (message["value"], message["__topic"]) == ("ü".encode(), "orders")
    with pytest.raises(UnwritableError, match="keys of text only"):
        list(messages_of_batch(pa.RecordBatch.from_pydict({"value": [b""], "__key": [b"\xff"]})))
