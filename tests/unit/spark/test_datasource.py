"""The data source: schemas, rows of dead letters, pickling and refused modes."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, IsNotNull, Not
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

from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.naming import TopicName
from redrive.reading.positions import Position
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MessagePlace
from redrive.spark.datasource import BatchReader, PulsarSource
from redrive.spark.options import COLUMN_NAMES, MORE_COLUMN_NAMES
from redrive.spark.rows import COLUMNS, messages_of_batch, to_batch

READ = {"service.url": "pulsar://p:6650", "topic": "orders", "columns": "value"}
WRITE = {"service.url": "pulsar://p:6650", "topic": "orders"}
VALUE = StructType().add("value", "binary")


def test_readers_and_writers_are_picklable() -> None:
    source = PulsarSource(dict(READ))
    batch = source.reader(VALUE)
    filters = [EqualTo(("__partition",), 1), Not(EqualTo(("__entry",), 1)), IsNotNull(("value",))]
    assert batch.pushFilters(filters) == filters
    pickle.loads(pickle.dumps(batch))  # noqa: S301  our own
    pickle.loads(pickle.dumps(source.streamReader(VALUE)))  # noqa: S301
    pickle.loads(pickle.dumps(PulsarSource(dict(WRITE)).writer(VALUE, overwrite=False)))  # noqa: S301


def test_schema_follows_the_columns() -> None:
    assert PulsarSource(dict(READ)).schema() == "`value` BINARY"
    with pytest.raises(InvalidSpecError, match="not supported by this source"):
        PulsarSource(dict(READ)).reader(StructType().add("value", "string").add("key", "string"))
    whole = PulsarSource({name: READ[name] for name in ("service.url", "topic")}).schema()
    assert all(f"`{name}`" in whole for name in COLUMN_NAMES)


def test_batch_and_stream_options_are_not_mixed() -> None:
    with pytest.raises(InvalidSpecError, match="predefinedSubscription"):
        PulsarSource(READ | {"predefinedSubscription": "s"}).reader(VALUE)
    with pytest.raises(InvalidSpecError, match="endingOffsets"):
        PulsarSource(READ | {"endingOffsets": "latest"}).streamReader(VALUE)
    with pytest.raises(InvalidSpecError, match="maxBytesPerTrigger must be a positive number"):
        PulsarSource(READ | {"maxBytesPerTrigger": "1"}).streamReader(VALUE)
    with pytest.raises(InvalidSpecError, match="must not be latest"):
        PulsarSource(READ | {"startingOffsets": "latest"}).reader(VALUE)
    assert isinstance(
        PulsarSource(READ | {"startingOffsets": "earliest"}).reader(VALUE), BatchReader
    )


@pytest.mark.parametrize(
    "schema",
    [
        StructType().add("id", LongType()),
        StructType().add("value", LongType()),
        StructType().add("__key", "string"),
        StructType().add("value", "string").add("__topic", "string"),
        StructType()
        .add("value", "string")
        .add("__messageProperties", MapType(StringType(), LongType())),
    ],
)
def test_rows_that_are_no_messages_are_refused(schema: StructType) -> None:
    with pytest.raises(RedriveError):
        PulsarSource(dict(WRITE)).writer(schema, overwrite=False)


def test_overwrite_of_topic_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="overwritten"):
        PulsarSource(dict(WRITE)).writer(VALUE, overwrite=True)


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
    place=MessagePlace(2, ((7, 8),), 9, 10),
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


def test_columns_have_the_types_of_spark() -> None:
    assert set(COLUMNS) == set(NAMES)
    schema = StructType()
    for name in NAMES:
        schema = schema.add(name, TYPES[COLUMNS[name][0]])
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
def test_written_row_equals_the_read_one(
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


def test_text_is_written_as_utf8_and_binary_key_refused() -> None:
    batch = pa.RecordBatch.from_pydict({"value": ["ü"], "__topic": ["orders"]})
    (message,) = messages_of_batch(batch)
    assert (message["value"], message["__topic"]) == ("ü".encode(), "orders")
    with pytest.raises(RedriveError, match="a key must be text"):
        list(messages_of_batch(pa.RecordBatch.from_pydict({"value": [b""], "__key": [b"\xff"]})))


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        ("__eventTime", pa.array([0], pa.timestamp("us", tz="UTC")), "0 µs since 1970"),
        (
            "__eventTime",
            pa.array([999], pa.timestamp("us", tz="UTC")),
            "at least 1970-01-01",
        ),
        (
            "__eventTime",
            pa.array([-1_000], pa.timestamp("us", tz="UTC")),
            "at least 1970-01-01",
        ),
        (
            "__messageProperties",
            pa.array([[("a", "1"), ("b", None)]], pa.map_(pa.string(), pa.string())),
            "must not be NULL; got 'b'",
        ),
        ("__topic", pa.array([b"\xff"]).view(pa.string()), "a text of the column __topic"),
        ("__key", pa.array([b"\xff"]).view(pa.string()), "a key must be text"),
    ],
)
def test_row_that_no_message_carries_is_refused(
    column: str, values: pa.Array, problem: str
) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b""]), values], ["value", column])
    with pytest.raises(RedriveError, match=problem):
        list(messages_of_batch(batch))


def test_text_value_of_any_bytes_is_written() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([b"\xff"]).view(pa.string())], ["value"])
    assert [message["value"] for message in messages_of_batch(batch)] == [b"\xff"]
