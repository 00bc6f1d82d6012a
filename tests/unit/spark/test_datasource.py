"""What Spark sends to its workers can be sent, and what can't be meant is refused."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.datasource import EqualTo, IsNotNull, Not
from pyspark.sql.types import LongType, MapType, StringType, StructType

from redrive.spark.datasource import BatchReader, PulsarSource
from redrive.spark.options import COLUMN_NAMES, InvalidOptionError
from redrive.spark.rows import UnwritableError

READ = {"service.url": "pulsar://p:6650", "topic": "orders", "columns": "value"}
WRITE = {"service.url": "pulsar://p:6650", "topic": "orders"}
VALUE = StructType().add("value", "binary")


def test_readers_and_writers_are_sent_to_workers() -> None:
    source = PulsarSource(dict(READ))
    batch = source.reader(VALUE)
    filters = [EqualTo(("__partition",), 1), Not(EqualTo(("__entry",), 1)), IsNotNull(("value",))]
    assert batch.pushFilters(filters) == filters
    pickle.loads(pickle.dumps(batch))  # noqa: S301  our own
    pickle.loads(pickle.dumps(source.streamReader(VALUE)))  # noqa: S301
    pickle.loads(pickle.dumps(PulsarSource(dict(WRITE)).writer(VALUE, overwrite=False)))  # noqa: S301


def test_the_schema_follows_the_columns() -> None:
    assert PulsarSource(dict(READ)).schema() == "`value` BINARY"
    with pytest.raises(InvalidOptionError, match="schema of a read"):
        PulsarSource(dict(READ)).reader(StructType().add("value", "string").add("key", "string"))
    whole = PulsarSource({name: READ[name] for name in ("service.url", "topic")}).schema()
    assert all(f"`{name}`" in whole for name in COLUMN_NAMES)


def test_options_of_a_stream_are_refused_in_a_batch_and_those_of_a_batch_in_a_stream() -> None:
    with pytest.raises(InvalidOptionError, match="predefinedSubscription"):
        PulsarSource(READ | {"predefinedSubscription": "s"}).reader(VALUE)
    with pytest.raises(InvalidOptionError, match="endingOffsets"):
        PulsarSource(READ | {"endingOffsets": "latest"}).streamReader(VALUE)
    with pytest.raises(InvalidOptionError, match="maxBytesPerTrigger is a number"):
        PulsarSource(READ | {"maxBytesPerTrigger": "1"}).streamReader(VALUE)
    with pytest.raises(InvalidOptionError, match="can't be latest"):
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
    with pytest.raises(UnwritableError):
        PulsarSource(dict(WRITE)).writer(schema, overwrite=False)


def test_a_topic_is_not_overwritten() -> None:
    with pytest.raises(InvalidOptionError, match="overwritten"):
        PulsarSource(dict(WRITE)).writer(VALUE, overwrite=True)
