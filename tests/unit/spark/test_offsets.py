"""Positions as text: those of options name messages, those of checkpoints what has been read."""

from __future__ import annotations

import json

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.naming import TopicName
from redrive.reading.positions import EntryId, Position, place_of
from redrive.spark.options import InvalidOptionError
from redrive.spark.slices import (
    BEGINNING,
    END,
    WHOLE,
    InvalidCheckpointError,
    ending_offsets,
    offset_from_json,
    offset_to_json,
    starting_offsets,
)

ORDERS = TopicName("shop", "prod", "orders")
numbers = st.integers(0, 2**40)
positions = st.builds(Position, numbers, numbers, st.integers(0, 1_000) | st.just(WHOLE))


@given(st.dictionaries(st.sampled_from([ORDERS, ORDERS.partition(0)]), positions))
def test_what_has_been_read_survives_a_checkpoint(read: dict[TopicName, Position]) -> None:
    written = json.loads(json.dumps(offset_to_json(read)))
    assert offset_from_json(written) == read


@given(numbers, numbers, st.integers(-1, 1_000))
def test_a_message_id_names_its_place(ledger: int, entry: int, index: int) -> None:
    written = pulsar.MessageId(3, ledger, entry, index).serialize()
    assert place_of(written) == (EntryId(ledger, entry), index)


@given(numbers, numbers, st.none() | st.integers(0, 1_000), st.booleans())
def test_a_read_begins_with_the_message_that_starts_it_and_ends_with_the_one_that_ends_it(
    ledger: int,
    entry: int,
    index: int | None,
    as_bytes: bool,  # noqa: FBT001
) -> None:
    text: object = f"{ledger}:{entry}" + ("" if index is None else f":{index}")
    if as_bytes:
        whole = pulsar.MessageId(-1, ledger, entry, -1 if index is None else index).serialize()
        text = [byte - 256 if byte > 127 else byte for byte in whole]  # as Java writes bytes
    given_ = json.dumps({str(ORDERS): text})
    behind, through = starting_offsets(given_).of(ORDERS), ending_offsets(given_).of(ORDERS)
    named = Position(ledger, entry, index or 0)
    assert behind < named <= through
    before = Position(ledger, entry, index - 1) if index else Position(ledger, entry - 1, WHOLE)
    assert not behind < before
    assert not Position(ledger, entry + 1, 0) <= through
    assert (Position(ledger, entry, (index or 0) + 1) <= through) == (index is None)


def test_words_and_what_is_not_named() -> None:
    assert starting_offsets("earliest").of(ORDERS) == BEGINNING
    assert starting_offsets("latest").of(ORDERS) == END
    assert ending_offsets("latest").of(ORDERS) == END
    some = starting_offsets(f'{{"{ORDERS}": "latest"}}')
    assert (some.of(ORDERS), some.of(ORDERS.partition(1))) == (END, BEGINNING)
    assert ending_offsets(f'{{"{ORDERS}": "1:2"}}').of(ORDERS.partition(1)) == END


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "7",
        "[1]",
        '{"a": 7}',
        '{"a": "7"}',
        '{"a": [8]}',
        '{"a/b": "1:2"}',
        '{"a": null}',
        '{"a": [300, "x"]}',
        json.dumps({"a": list(pulsar.MessageId.earliest.serialize())}),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="startingOffsets is neither"):
        starting_offsets(text)


def test_a_name_that_is_no_partition_of_what_is_read_is_refused() -> None:
    """Else its position would be ignored, and all of the topic be read."""
    given = starting_offsets(json.dumps({str(ORDERS): "12:0"}))
    given.check("startingOffsets", [ORDERS])
    with pytest.raises(InvalidOptionError, match=r"startingOffsets names .*got '.*/orders'"):
        given.check("startingOffsets", [ORDERS.partition(0), ORDERS.partition(1)])


def test_an_end_is_not_the_beginning() -> None:
    with pytest.raises(InvalidOptionError, match="endingOffsets is neither latest, nor"):
        ending_offsets("earliest")


def test_the_offset_of_another_source_is_refused() -> None:
    with pytest.raises(InvalidCheckpointError):
        offset_from_json({str(ORDERS): "17"})
