"""A stream reads each entry once, whatever its limit, and comes to the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.naming import TopicName
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Partition
from redrive.spark import slices
from redrive.spark.slices import (
    BEGINNING,
    WHOLE,
    DataLossError,
    Extent,
    Filters,
    Offset,
    advance_offset,
    check_unread,
)

ORDERS = TopicName("shop", "prod", "orders")


def extent(index: int, *ledgers: tuple[int, int], entry_bytes: float = 100.0) -> Extent:
    newest, entries = max(ledgers, default=(-1, 0))
    partition = Partition(
        index,
        tuple(each for each in ledgers if each[1]),
        tail=EntryId(newest, entries - 1),
        held=frozenset(ledger for ledger, _ in ledgers),
        entry_bytes=entry_bytes,
    )
    return Extent(ORDERS.partition(index), partition)


topics = st.lists(
    st.dictionaries(st.integers(0, 9), st.integers(0, 30), max_size=4), min_size=1, max_size=3
).map(lambda found: [extent(index, *sorted(each.items())) for index, each in enumerate(found)])


def entries(extents: Sequence[Extent]) -> list[tuple[TopicName, int, int]]:
    return [
        (each.topic, ledger, entry)
        for each in extents
        for ledger, count in each.partition.ledgers
        for entry in range(count)
    ]


@given(topics, st.none() | st.integers(1, 5_000))
def test_every_entry_is_read_once_and_a_batch_keeps_to_its_limit(
    extents: list[Extent], limit: int | None
) -> None:
    read: Offset = {}
    seen: list[tuple[TopicName, int, int]] = []
    for _ in range(400):
        ahead = advance_offset(extents, read, limit)
        batch = [
            (each.topic, ledger, entry)
            for each in extents
            for piece in slices.cut(
                each, read.get(each.topic, BEGINNING), ahead[each.topic], Filters()
            )
            for _, ledger, entry in entries([each])
            if piece.holds(Position(ledger, entry, 0))
        ]
        # Each partition advances by one entry at least, so it may exceed its share by one.
        assert limit is None or len(batch) * 100 <= limit + len(extents) * 100
        seen += batch
        if ahead == read or not batch:
            break
        read = ahead
    assert sorted(seen) == sorted(entries(extents))
    assert advance_offset(extents, ahead, limit) == ahead


def test_an_entry_that_was_read_in_part_is_read_to_its_end() -> None:
    of = extent(0, (4, 3))
    read = {of.topic: Position(4, 2, 5)}
    assert advance_offset([of], read)[of.topic] == Position(4, 2, WHOLE)


def test_without_anything_new_nothing_moves() -> None:
    of = extent(0, (4, 3), (5, 0))
    for behind in (Position(4, 2, WHOLE), Position(5, -1, WHOLE)):
        assert advance_offset([of], {of.topic: behind}) == {of.topic: behind}


def test_another_topic_of_the_same_name_is_read_from_its_beginning() -> None:
    of = extent(0, (4, 3))
    ahead = advance_offset([of], {of.topic: Position(9, 9, WHOLE)})
    assert ahead[of.topic] == Position(4, 2, WHOLE)


def test_a_topic_that_is_gone_is_a_loss() -> None:
    of = extent(0, (4, 3))
    check_unread([of], {of.topic: Position(4, 2, WHOLE)})
    with pytest.raises(DataLossError, match="not there any more"):
        check_unread([of], {ORDERS.partition(1): BEGINNING})
    with pytest.raises(DataLossError, match="does not hold"):
        check_unread([of], {of.topic: Position(3, 2, WHOLE)})
