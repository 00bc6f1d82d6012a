"""Slices of a topic, offsets as text, and admission of batches of a stream."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.naming import TopicName
from redrive.reading.positions import NOWHERE, EntryId, Position, place_of
from redrive.reading.ranges import Acknowledged, Partition, Span
from redrive.spark import slices
from redrive.spark.options import InvalidOptionError
from redrive.spark.slices import (
    BEGINNING,
    END,
    WHOLE,
    DataLossError,
    Extent,
    Filters,
    InvalidCheckpointError,
    Offset,
    PushedFilter,
    advance_offset,
    check_unread,
    ending_offsets,
    offset_from_json,
    offset_to_json,
    starting_offsets,
)

PARTITION = TopicName("shop", "prod", "orders").partition(2)
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "In": lambda value, among: value in among,
}


def extent_of(*ledgers: tuple[int, int], complete: bool = True) -> Extent:
    held = frozenset(ledger for ledger, _ in ledgers)
    filled = tuple(each for each in ledgers if each[1])
    newest, entries = max(ledgers, default=(-1, 0))
    tail = EntryId(newest, entries - 1)
    return Extent(PARTITION, Partition(2, filled, tail=tail, held=held), complete=complete)


ledgers = st.dictionaries(st.integers(0, 12), st.integers(0, 40), max_size=6).map(
    lambda found: extent_of(*sorted(found.items()))
)
small = st.integers(-1, 13)
bounds = st.builds(Position, small, st.integers(-1, 42), st.sampled_from([0, 1, WHOLE]))
conditions = st.lists(
    st.builds(
        PushedFilter,
        st.sampled_from(["__ledger", "__entry", "__partition"]),
        st.sampled_from(sorted(set(COMPARE) - {"In"})),
        small,
    )
    | st.builds(
        PushedFilter,
        st.sampled_from(["__ledger", "__entry", "__partition"]),
        st.just("In"),
        st.lists(small, max_size=4).map(tuple),
    ),
    max_size=3,
)


@pytest.fixture
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_ENTRIES", 10)


def wanted(position: Position, asked: list[PushedFilter]) -> bool:
    has = {"__ledger": position.ledger, "__entry": position.entry, "__partition": 2}
    return all(COMPARE[each.kind](has[each.column], each.value) for each in asked)


@pytest.mark.usefixtures("_small_slices")
@given(ledgers, bounds | st.just(BEGINNING), bounds | st.just(END), conditions)
def test_each_message_is_in_one_slice_if_it_is_asked_for(
    of: Extent, behind: Position, through: Position, asked: list[PushedFilter]
) -> None:
    found = list(slices.cut(of, behind, through, Filters(asked)))
    for ledger, entries in of.partition.ledgers:
        for entry in range(entries):
            for index in (0, 1):  # a batch of two
                position = Position(ledger, entry, index)
                times = sum(each.holds(position) for each in found)
                within = behind < position <= through
                assert times <= within
                assert times or not (within and wanted(position, asked))
    for each in found:
        assert each.begin < each.behind or each.behind == BEGINNING or each.begin == each.behind[:2]
        assert 0 < sum(span.size for span in each.spans) < 20
        assert each.spans[-1].end == each.through.entry_id
        assert each.through.entry_id <= of.partition.end


@pytest.mark.usefixtures("_small_slices")
@given(ledgers, st.sampled_from([each for each in COMPARE if each != "In"]), small)
def test_no_ledger_is_read_that_a_condition_excludes(of: Extent, kind: str, value: int) -> None:
    filters = Filters([PushedFilter("__ledger", kind, value)])
    for each in slices.cut(of, BEGINNING, END, filters):
        assert all(COMPARE[kind](ledger, value) for ledger, *_ in each.spans)


@pytest.mark.usefixtures("_small_slices")
def test_a_partition_is_skipped_by_its_name_or_its_number() -> None:
    for condition in (
        PushedFilter("__topic", "EqualTo", str(PARTITION.without_partition())),
        PushedFilter("__topic", "In", ("a", "b")),
        PushedFilter("__partition", "LessThan", 2),
    ):
        assert not list(slices.cut(extent_of((1, 5)), BEGINNING, END, Filters([condition])))
    asked = [
        PushedFilter("__topic", "EqualTo", str(PARTITION)),
        PushedFilter("value", "IsNull", None),
    ]
    assert list(slices.cut(extent_of((1, 5)), BEGINNING, END, Filters(asked)))


@pytest.mark.usefixtures("_small_slices")
def test_without_ledgers_there_is_one_slice_that_begins_early_enough_for_chunks() -> None:
    of = extent_of((9, 500), complete=False)
    (found,) = slices.cut(of, Position(9, 300, WHOLE), END, Filters())
    assert (found.begin, found.behind, found.through) == (
        EntryId(9, 200),
        Position(9, 300, WHOLE),
        Position(9, 499, WHOLE),
    )
    assert found.spans == (Span(9, 301, 499),)
    (found,) = slices.cut(of, BEGINNING, END, Filters())
    assert found.begin == NOWHERE
    assert found.spans == (Span(9, 0, 499),)


@pytest.mark.usefixtures("_small_slices")
def test_what_is_gone_before_its_first_batch_was_read_is_found() -> None:
    begin = extent_of((3, 5), (4, 2)).begin
    slices.check_held(extent_of((3, 5), (4, 2)), begin)
    with pytest.raises(DataLossError):
        slices.check_held(extent_of((4, 2)), begin)
    assert extent_of((3, 0)).begin == extent_of((3, 5), complete=False).begin == BEGINNING


@pytest.mark.usefixtures("_small_slices")
def test_what_is_gone_is_found() -> None:
    of = extent_of((3, 5), (4, 0))
    for ledger, entry in [NOWHERE, (3, -1), (3, 4), (4, -1)]:
        slices.check_held(of, Position(ledger, entry, WHOLE))
    for ledger, entry in [(2, 7), (4, 0), (5, 0)]:
        with pytest.raises(DataLossError, match="does not hold what follows on"):
            slices.check_held(of, Position(ledger, entry, WHOLE))
    slices.check_held(extent_of((3, 5), complete=False), Position(2, 7, WHOLE))


@pytest.mark.usefixtures("_small_slices")
@pytest.mark.parametrize(
    ("passed", "lost"),
    [((2, 7), False), ((2, 5), False), ((3, -1), True), ((2, 8), True), ((3, 0), True)],
)
def test_nothing_is_lost_that_a_subscription_stands_before(
    passed: tuple[int, int], *, lost: bool
) -> None:
    of = extent_of((3, 5))
    kept = replace(of.partition, acknowledged=Acknowledged(EntryId(*passed)))
    with pytest.raises(DataLossError) if lost else nullcontext():
        slices.check_held(replace(of, partition=kept), Position(2, 7, WHOLE))


@pytest.mark.usefixtures("_small_slices")
def test_a_time_that_no_calendar_has_is_left_to_spark() -> None:
    """Whoever sends a message sets its event time: in nanoseconds, too."""
    filters = Filters(
        [PushedFilter("__eventTime", "GreaterThan", datetime(2026, 1, 1, tzinfo=UTC))]
    )
    assert filters.keep_times(0, 1_800_000_000_000_000_000)
    assert not filters.keep_times(0, None)


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


def partition_extent(index: int, *ledgers: tuple[int, int], entry_bytes: float = 100.0) -> Extent:
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
).map(
    lambda found: [
        partition_extent(index, *sorted(each.items())) for index, each in enumerate(found)
    ]
)


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
    of = partition_extent(0, (4, 3))
    read = {of.topic: Position(4, 2, 5)}
    assert advance_offset([of], read)[of.topic] == Position(4, 2, WHOLE)


def test_without_anything_new_nothing_moves() -> None:
    of = partition_extent(0, (4, 3), (5, 0))
    for behind in (Position(4, 2, WHOLE), Position(5, -1, WHOLE)):
        assert advance_offset([of], {of.topic: behind}) == {of.topic: behind}


def test_another_topic_of_the_same_name_is_read_from_its_beginning() -> None:
    of = partition_extent(0, (4, 3))
    ahead = advance_offset([of], {of.topic: Position(9, 9, WHOLE)})
    assert ahead[of.topic] == Position(4, 2, WHOLE)


def test_a_topic_that_is_gone_is_a_loss() -> None:
    of = partition_extent(0, (4, 3))
    check_unread([of], {of.topic: Position(4, 2, WHOLE)})
    with pytest.raises(DataLossError, match="not there any more"):
        check_unread([of], {ORDERS.partition(1): BEGINNING})
    with pytest.raises(DataLossError, match="does not hold"):
        check_unread([of], {of.topic: Position(3, 2, WHOLE)})
