"""Positions become sequence ids that a broker can tell repetitions by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.replay.position import (
    LIMITS,
    EntryId,
    Position,
    PositionOutOfRangeError,
    sequence_id,
    target_partition,
)

positions = st.builds(
    Position,
    st.integers(0, LIMITS.ledger - 1),
    st.integers(0, LIMITS.entry - 1),
    st.integers(0, LIMITS.batch_index - 1),
)


@given(positions, positions)
def test_ids_keep_the_order_of_positions_and_never_meet(one: Position, other: Position) -> None:
    assert (one < other) == (sequence_id(one) < sequence_id(other))
    assert (one == other) == (sequence_id(one) == sequence_id(other))


def test_ids_begin_with_1_because_0_counts_as_none() -> None:
    assert sequence_id(Position(0, 0, 0)) == 1


def test_the_last_id_fits_into_63_bits() -> None:
    last = Position(*(limit - 1 for limit in LIMITS))
    assert 2**62 < sequence_id(last) < 2**63


@pytest.mark.parametrize("part", Position._fields)
@pytest.mark.parametrize("value", [-1, None])
def test_a_position_that_no_id_can_be_made_of_is_refused(part: str, value: int | None) -> None:
    wrong = getattr(LIMITS, part) if value is None else value
    with pytest.raises(PositionOutOfRangeError, match=f"the {part} of a dead letter's position"):
        sequence_id(Position(7, 7, 7)._replace(**{part: wrong}))


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
