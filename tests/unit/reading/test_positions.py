"""Entry ids, sequence ids, sources and routing; the encoding of protobuf fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.reading.positions import (
    MAX_BATCH,
    EntryId,
    Position,
    Source,
    Tail,
    Try,
    decode_fields,
    encode_nested,
    encode_number,
    offset_of,
    sequence_id,
    target_partition,
    to_signed,
)
from redrive.reading.ranges import RANGE_ENTRIES

positions = st.builds(
    Position, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, MAX_BATCH - 1)
)
tries = st.builds(Try, st.integers(1, 2**28), st.integers(0, 255))
offsets = st.integers(0, RANGE_ENTRIES - 1)
indexes = st.integers(0, MAX_BATCH - 1)
sent = st.tuples(tries, offsets, indexes)


@given(sent, sent)
def test_ids_rise_with_the_try_then_with_the_position_and_never_meet(
    one: tuple[Try, int, int], other: tuple[Try, int, int]
) -> None:
    assert (one < other) == (sequence_id(*one) < sequence_id(*other))
    assert (one == other) == (sequence_id(*one) == sequence_id(*other))


@given(sent)
def test_try_and_offset_are_read_back_from_an_id(one: tuple[Try, int, int]) -> None:
    assert (Try.of(sequence_id(*one)), offset_of(sequence_id(*one))) == one[:2]
    assert 0 < sequence_id(*one) < 2**63


def test_no_id_is_of_no_try() -> None:
    assert Try.of(-1) == Try(0, 0)


@given(st.from_regex(r"[a-z0-9-]{1,36}", fullmatch=True), st.integers(-1, 99), positions)
def test_a_source_is_read_as_it_was_written(uid: str, partition: int, position: Position) -> None:
    source = Source(uid, partition, position)
    assert Source.parse(str(source)) == source


@given(st.text(max_size=40))
def test_what_is_no_source_is_none_and_no_error(text: str) -> None:
    found = Source.parse(text)
    assert found is None or str(found) == text


@pytest.mark.parametrize("forged", ["", "u@1:2:3", "u@a:1:2:3", "u@0:1:2:3 ", "@0:1:2:3"])
def test_a_forged_source_is_none(forged: str) -> None:
    assert Source.parse(forged) is None


@given(st.one_of(st.none(), st.text()), positions, st.integers(1, 100))
def test_a_message_always_goes_to_the_same_partition(
    key: str | None, position: Position, partitions: int
) -> None:
    chosen = target_partition(key, position, partitions)
    assert 0 <= chosen < partitions
    assert chosen == target_partition(key, position, partitions)


@given(st.text(min_size=1), positions, positions, st.integers(1, 100))
def test_messages_with_one_key_go_to_one_partition(
    key: str, one: Position, other: Position, partitions: int
) -> None:
    assert target_partition(key, one, partitions) == target_partition(key, other, partitions)


def test_messages_without_a_key_spread_over_all_partitions() -> None:
    chosen = [target_partition(None, Position(3, entry, 0), 4) for entry in range(400)]
    assert all(60 < chosen.count(partition) < 140 for partition in range(4))


def test_routing_is_the_same_in_every_version() -> None:
    # A run that is interrupted may go on with a newer image: it must route as before.
    assert [target_partition("order-1", Position(1, 2, 0), n) for n in (2, 3, 7)] == [0, 2, 5]
    assert [target_partition(None, Position(1, 2, 0), n) for n in (2, 3, 7)] == [0, 2, 3]


def test_an_entry_id_is_written_as_brokers_do() -> None:
    assert EntryId.parse("12:-1") == EntryId(12, -1)
    assert str(EntryId(12, 7)) == "12:7"


def test_nothing_is_stored_above_the_last_id_of_the_only_try_there_was() -> None:
    behind = Tail(EntryId(7, 8), generation=2, partitions=3, through=50)
    only, last = Try(2, 0), sequence_id(Try(2, 0), 30, 1)
    assert behind.stored_through(last, only, 100) == 30
    assert behind.stored_through(last, Try(2, 1), 100) == 50
    assert behind.stored_through(-1, only, 100) == 50
    # The last lease sent less than the one before, whose ids are lower.
    earlier = behind._replace(generation=1)
    assert earlier.stored_through(last, only, 100) == 50
    assert earlier._replace(through=None).stored_through(last, only, 100) == 99


def test_a_tail_of_several_leases_knows_what_holds_for_all_of_them() -> None:
    one = Tail(EntryId(7, 8), generation=1, partitions=3, through=50)
    assert one.joined(None) == one
    assert one.joined(Tail(EntryId(9, 0), 2, 3, 70)) == one._replace(through=70)
    assert one.joined(Tail(EntryId(9, 0), 2, 4, 20)) == one._replace(partitions=None)
    assert one.joined(Tail(EntryId(9, 0))) == one._replace(partitions=None, through=None)


NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.integers(1, 2**29 - 1)


def test_numbers_are_written_as_the_encoding_has_them() -> None:
    # 150 and "testing" are the examples of its documentation.
    assert encode_number(1, 150) == bytes.fromhex("089601")
    assert encode_nested(2, b"testing") == bytes.fromhex("120774657374696e67")


@given(st.dictionaries(FIELDS, NUMBERS | st.binary(max_size=300)))
def test_what_is_written_is_read_again(values: dict[int, int | bytes]) -> None:
    written = b"".join(
        encode_number(field, value) if isinstance(value, int) else encode_nested(field, value)
        for field, value in values.items()
    )
    numbers, nested = decode_fields(written)
    assert {**numbers, **nested} == values


@given(st.integers(-(2**63), 2**63 - 1))
def test_numbers_keep_their_sign(value: int) -> None:
    numbers, _ = decode_fields(encode_number(1, value % 2**64))
    assert to_signed(numbers[1]) == value


@pytest.mark.parametrize("broken", ["08", "08ff", "0d00000000", "1203abcd", "12ffffff7f"])
def test_what_is_no_message_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        decode_fields(bytes.fromhex(broken))


@given(st.binary(max_size=64))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    try:
        numbers, nested = decode_fields(data)
    except ValueError:
        return
    assert all(value >= 0 for value in numbers.values())
    assert sum(map(len, nested.values())) <= len(data)
