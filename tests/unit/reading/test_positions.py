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
def test_sequence_ids_rise_with_try_and_position(
    one: tuple[Try, int, int], other: tuple[Try, int, int]
) -> None:
    assert (one < other) == (sequence_id(*one) < sequence_id(*other))
    assert (one == other) == (sequence_id(*one) == sequence_id(*other))


@given(sent)
def test_sequence_id_contains_try_and_offset(one: tuple[Try, int, int]) -> None:
    assert (Try.of(sequence_id(*one)), offset_of(sequence_id(*one))) == one[:2]
    assert 0 < sequence_id(*one) < 2**63


def test_missing_sequence_id_belongs_to_no_try() -> None:
    assert Try.of(-1) == Try(0, 0)


@given(st.from_regex(r"[a-z0-9-]{1,36}", fullmatch=True), st.integers(-1, 99), positions)
def test_source_is_read_as_it_was_written(uid: str, partition: int, position: Position) -> None:
    source = Source(uid, partition, position)
    assert Source.parse(str(source)) == source


@given(st.text(max_size=40))
def test_text_that_is_no_source_is_none(text: str) -> None:
    source = Source.parse(text)
    assert source is None or str(source) == text


@pytest.mark.parametrize("forged", ["", "u@1:2:3", "u@a:1:2:3", "u@0:1:2:3 ", "@0:1:2:3"])
def test_forged_source_is_none(forged: str) -> None:
    assert Source.parse(forged) is None


@given(st.one_of(st.none(), st.text()), positions, st.integers(1, 100))
def test_message_is_always_routed_to_same_partition(
    key: str | None, position: Position, partitions: int
) -> None:
    chosen = target_partition(key, position, partitions)
    assert 0 <= chosen < partitions
    assert chosen == target_partition(key, position, partitions)


@given(st.text(min_size=1), positions, positions, st.integers(1, 100))
def test_messages_with_one_key_share_a_partition(
    key: str, one: Position, other: Position, partitions: int
) -> None:
    assert target_partition(key, one, partitions) == target_partition(key, other, partitions)


def test_messages_without_key_spread_over_partitions() -> None:
    chosen = [target_partition(None, Position(3, entry, 0), 4) for entry in range(400)]
    assert all(60 < chosen.count(partition) < 140 for partition in range(4))


def test_routing_is_the_same_in_every_version() -> None:
    # An interrupted run may resume with a newer image: it must route as before.
    assert [target_partition("order-1", Position(1, 2, 0), n) for n in (2, 3, 7)] == [0, 0, 3]
    assert [target_partition(None, Position(1, 2, 0), n) for n in (2, 3, 7)] == [0, 2, 3]


def test_entry_id_is_written_as_brokers_do() -> None:
    assert EntryId.parse("12:-1") == EntryId(12, -1)
    assert str(EntryId(12, 7)) == "12:7"


def test_tail_of_only_try_ends_at_its_last_id() -> None:
    behind = Tail(EntryId(7, 8), generation=2, partitions=3, through=50)
    only, last = Try(2, 0), sequence_id(Try(2, 0), 30, 1)
    assert behind.stored_through(last, only, 100) == 30
    assert behind.stored_through(last, Try(2, 1), 100) == 50
    assert behind.stored_through(-1, only, 100) == 50
    # The last lease sent less than the one before, whose ids are lower.
    earlier = behind._replace(generation=1)
    assert earlier.stored_through(last, only, 100) == 50
    assert earlier._replace(through=None).stored_through(last, only, 100) == 99


def test_joined_tail_keeps_facts_common_to_all_leases() -> None:
    one = Tail(EntryId(7, 8), generation=1, partitions=3, through=50)
    assert one.joined(None) == one
    assert one.joined(Tail(EntryId(9, 0), 2, 3, 70)) == one._replace(through=70)
    assert one.joined(Tail(EntryId(9, 0), 2, 4, 20)) == one._replace(partitions=None)
    assert one.joined(Tail(EntryId(9, 0))) == one._replace(partitions=None, through=None)


NUMBERS = st.integers(0, 2**64 - 1)
FIELDS = st.integers(1, 2**29 - 1)


def test_protobuf_numbers_match_documented_bytes() -> None:
    # 150 and "testing" are the examples of its documentation.
    assert encode_number(1, 150) == bytes.fromhex("089601")
    assert encode_nested(2, b"testing") == bytes.fromhex("120774657374696e67")


@given(st.dictionaries(FIELDS, NUMBERS | st.binary(max_size=300)))
def test_protobuf_fields_are_read_as_written(values: dict[int, int | bytes]) -> None:
    written = b"".join(
        encode_number(field, value) if isinstance(value, int) else encode_nested(field, value)
        for field, value in values.items()
    )
    numbers, nested = decode_fields(written)
    assert {**numbers, **nested} == values


@given(st.integers(-(2**63), 2**63 - 1))
def test_protobuf_numbers_keep_their_sign(value: int) -> None:
    numbers, _ = decode_fields(encode_number(1, value % 2**64))
    assert to_signed(numbers[1]) == value


@pytest.mark.parametrize("broken", ["08", "08ff", "0d00000000", "1203abcd", "12ffffff7f"])
def test_broken_protobuf_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match="no message"):
        decode_fields(bytes.fromhex(broken))


@given(st.binary(max_size=64))
def test_random_protobuf_is_read_or_refused(data: bytes) -> None:
    try:
        numbers, nested = decode_fields(data)
    except ValueError:
        return
    assert all(value >= 0 for value in numbers.values())
    assert sum(map(len, nested.values())) <= len(data)
