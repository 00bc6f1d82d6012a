"""A dead letter survives the way through Spark, whatever it is made of."""

from __future__ import annotations

import pulsar
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.envelope import CAUSE_TYPE, RECONSUMETIMES, REPLAYS
from redrive.reading import rows
from redrive.reading.positions import EntryId, Position, encode_nested, place_of
from redrive.reading.rows import DeadLetterRow
from tests.support.messages import AS_BASE64, NO_TEXT
from tests.support.raw_entries import read_alone

text = st.text(max_size=20)
moments = st.integers(1, 2**64 - 1)  # a program may mean nanoseconds
letters = st.builds(
    DeadLetterRow,
    partition=st.integers(-1, 100),
    position=st.builds(
        Position, st.integers(0, 2**62), st.integers(0, 2**31), st.integers(0, 2**20)
    ),
    batch_size=st.integers(1, 1_000),
    message_id=st.just(pulsar.MessageId(-1, 1, 2, -1)),
    first_chunk=st.none() | st.builds(EntryId, st.integers(0, 2**62), st.integers(0, 2**31)),
    encrypted=st.booleans(),
    unreadable=st.booleans(),
    schema_version=st.none() | st.integers(0, 2**130),
    key=st.none() | text.filter(bool),
    ordering_key=st.none() | text.filter(bool),
    value=st.none() | st.binary(max_size=50),
    properties=st.dictionaries(text, text, max_size=5),
    publish_time=moments,
    event_time=st.none() | moments,
)


def held(milliseconds: int) -> int:
    """Return what Spark has room for, which compares with written moments as the time does."""
    return min(milliseconds * 1_000, 2**63 - 1)


@given(st.lists(letters, max_size=5))
def test_a_row_has_all_that_a_selection_may_ask_for(some: list[DeadLetterRow]) -> None:
    batch = rows.to_batch(some, rows.COLUMNS)
    # Python's own moments end with the year 9999.
    found = batch.drop_columns(["publish_time", "event_time"]).to_pylist()
    assert [Position(r["ledger"], r["entry"], r["batch_index"]) for r in found] == [
        letter.position for letter in some
    ]
    for name in ("key", "ordering_key", "value", "encrypted", "unreadable"):
        assert [row[name] for row in found] == [getattr(letter, name) for letter in some]
    assert [row["first_chunk"] for row in found] == [
        letter.first_chunk and str(letter.first_chunk) for letter in some
    ]
    assert [row["schema_version"] for row in found] == [
        None if letter.schema_version is None else min(letter.schema_version, 2**63 - 1)
        for letter in some
    ]
    assert [row["published"] for row in found] == [
        min(letter.publish_time, 2**63 - 1) for letter in some
    ]
    assert [dict(row["properties"]) for row in found] == [letter.properties for letter in some]
    published = batch["publish_time"].cast(pa.int64()).to_pylist()
    assert published == [held(letter.publish_time) for letter in some]
    assert [row["size"] for row in found] == [len(letter.value or b"") for letter in some]


def test_only_the_columns_that_are_asked_for_are_written() -> None:
    carried = {CAUSE_TYPE: "TimeoutError", REPLAYS: "2", RECONSUMETIMES: "not a number"}
    letter = DeadLetterRow.of(read_alone(), -1)._replace(properties=carried)
    names = ("replays", "cause_type", "reconsume_times")
    assert rows.to_batch([letter], names).to_pylist() == [
        {"replays": 2, "cause_type": "TimeoutError", "reconsume_times": 0}
    ]
    assert rows.ddl(names) == "replays INT, cause_type STRING, reconsume_times INT"


def test_keys_that_are_no_text_are_read_as_the_base64_that_consumers_send_on_too() -> None:
    letter = DeadLetterRow.of(
        read_alone(encode_nested(6, NO_TEXT) + encode_nested(18, NO_TEXT)), -1
    )
    assert (letter.key, letter.ordering_key) == (AS_BASE64, AS_BASE64)
    letter = DeadLetterRow.of(read_alone(encode_nested(6, "größe".encode())), -1)
    assert (letter.key, letter.ordering_key) == ("größe", None)


def test_properties_that_are_no_text_do_not_end_the_reading() -> None:
    letter = DeadLetterRow.of(
        read_alone(encode_nested(4, encode_nested(1, b"a") + encode_nested(2, NO_TEXT))), -1
    )
    assert letter.unreadable
    assert letter.properties == {}
    letter = DeadLetterRow.of(
        read_alone(encode_nested(4, encode_nested(1, b"a") + encode_nested(2, "ä".encode()))), -1
    )
    assert not letter.unreadable
    assert letter.properties == {"a": "ä"}


@pytest.mark.parametrize("broken", ["08", "08ff", "0d00000000"])
def test_what_is_no_message_id_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        place_of(bytes.fromhex(broken))
