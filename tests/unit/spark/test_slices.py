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

from redrive.errors import InvalidSpecError
from redrive.policy.naming import TopicName
from redrive.reading.positions import NOWHERE, EntryId, Position, place_of
from redrive.reading.ranges import Acknowledged, Partition, Span
from redrive.spark import slices
from redrive.spark.slices import (
    BEGINNING,
    END,
    WHOLE,
    DataLossError,
    Extent,
    Filters,
    Offset,
    PushedFilter,
    advance_offset,
    check_unread,
    ending_offsets,
    offset_from_json,
    offset_to_json,
    starting_offsets,
)
from tests.support.reasons import raises

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
    filled = tuple(ledger for ledger in ledgers if ledger[1])
    newest, entries = max(ledgers, default=(-1, 0))
    tail = EntryId(newest, entries - 1)
    return Extent(PARTITION, Partition(2, filled, tail=tail, held=held), complete=complete)


ledgers = st.dictionaries(st.integers(0, 12), st.integers(0, 40), max_size=6).map(
    lambda sizes: extent_of(*sorted(sizes.items()))
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
    return all(
        COMPARE[condition.kind](has[condition.column], condition.value) for condition in asked
    )


@pytest.mark.usefixtures("_small_slices")
@given(ledgers, bounds | st.just(BEGINNING), bounds | st.just(END), conditions)
def test_wanted_message_is_in_exactly_one_slice(
    extent: Extent, behind: Position, through: Position, asked: list[PushedFilter]
) -> None:
    pieces = list(slices.cut(extent, behind, through, Filters(asked)))
    for ledger, entries in extent.partition.ledgers:
        for entry in range(entries):
            for index in (0, 1):  # a batch of two
                position = Position(ledger, entry, index)
                times = sum(piece.holds(position) for piece in pieces)
                within = behind < position <= through
                assert times <= within
                assert times or not (within and wanted(position, asked))
    for piece in pieces:
        assert (
            piece.begin < piece.behind
            or piece.behind == BEGINNING
            or piece.begin == piece.behind[:2]
        )
        assert 0 < sum(span.size for span in piece.spans) < 20
        assert piece.spans[-1].end == piece.through.entry_id
        assert piece.through.entry_id <= extent.partition.end


@pytest.mark.usefixtures("_small_slices")
@given(ledgers, st.sampled_from([piece for piece in COMPARE if piece != "In"]), small)
def test_excluded_ledgers_are_not_read(extent: Extent, kind: str, value: int) -> None:
    filters = Filters([PushedFilter("__ledger", kind, value)])
    for piece in slices.cut(extent, BEGINNING, END, filters):
        assert all(COMPARE[kind](ledger, value) for ledger, *_ in piece.spans)


@pytest.mark.usefixtures("_small_slices")
def test_partition_is_skipped_by_name_or_number() -> None:
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
def test_open_topic_has_one_slice_with_room_for_chunks() -> None:
    extent = extent_of((9, 500), complete=False)
    (piece,) = slices.cut(extent, Position(9, 300, WHOLE), END, Filters())
    assert (piece.begin, piece.behind, piece.through) == (
        EntryId(9, 200),
        Position(9, 300, WHOLE),
        Position(9, 499, WHOLE),
    )
    assert piece.spans == (Span(9, 301, 499),)
    (piece,) = slices.cut(extent, BEGINNING, END, Filters())
    assert piece.begin == NOWHERE
    assert piece.spans == (Span(9, 0, 499),)


@pytest.mark.usefixtures("_small_slices")
def test_loss_before_first_batch_is_detected() -> None:
    begin = extent_of((3, 5), (4, 2)).begin
    slices.check_held(extent_of((3, 5), (4, 2)), begin)
    with pytest.raises(DataLossError):
        slices.check_held(extent_of((4, 2)), begin)
    assert extent_of((3, 0)).begin == extent_of((3, 5), complete=False).begin == BEGINNING


@pytest.mark.usefixtures("_small_slices")
def test_lost_entries_are_detected() -> None:
    extent = extent_of((3, 5), (4, 0))
    for ledger, entry in [NOWHERE, (3, -1), (3, 4), (4, -1)]:
        slices.check_held(extent, Position(ledger, entry, WHOLE))
    for ledger, entry in [(2, 7), (4, 0), (5, 0)]:
        with pytest.raises(DataLossError, match="no longer has the messages after"):
            slices.check_held(extent, Position(ledger, entry, WHOLE))
    slices.check_held(extent_of((3, 5), complete=False), Position(2, 7, WHOLE))


@pytest.mark.usefixtures("_small_slices")
@pytest.mark.parametrize(
    ("passed", "lost"),
    [((2, 7), False), ((2, 5), False), ((3, -1), True), ((2, 8), True), ((3, 0), True)],
)
def test_acknowledged_entries_are_not_lost(passed: tuple[int, int], *, lost: bool) -> None:
    extent = extent_of((3, 5))
    kept = replace(extent.partition, acknowledged=Acknowledged(EntryId(*passed)))
    with pytest.raises(DataLossError) if lost else nullcontext():
        slices.check_held(replace(extent, partition=kept), Position(2, 7, WHOLE))


@pytest.mark.usefixtures("_small_slices")
def test_time_beyond_calendar_is_left_to_spark() -> None:
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
def test_offset_survives_a_checkpoint(read: dict[TopicName, Position]) -> None:
    written = json.loads(json.dumps(offset_to_json(read)))
    assert offset_from_json(written) == read


@given(numbers, numbers, st.integers(-1, 1_000))
def test_message_id_has_its_place(ledger: int, entry: int, index: int) -> None:
    written = pulsar.MessageId(3, ledger, entry, index).serialize()
    assert place_of(written) == (EntryId(ledger, entry), index)


@given(numbers, numbers, st.none() | st.integers(0, 1_000), st.booleans())
def test_starting_and_ending_messages_are_included(
    ledger: int,
    entry: int,
    index: int | None,
    as_bytes: bool,  # noqa: FBT001
) -> None:
    text: object = f"{ledger}:{entry}" + ("" if index is None else f":{index}")
    if as_bytes:
        whole = pulsar.MessageId(-1, ledger, entry, -1 if index is None else index).serialize()
        text = [byte - 256 if byte > 127 else byte for byte in whole]  # as Java writes bytes
    offsets = json.dumps({str(ORDERS): text})
    behind, through = starting_offsets(offsets).of(ORDERS), ending_offsets(offsets).of(ORDERS)
    named = Position(ledger, entry, index or 0)
    assert behind < named <= through
    before = Position(ledger, entry, index - 1) if index else Position(ledger, entry - 1, WHOLE)
    assert not behind < before
    assert not Position(ledger, entry + 1, 0) <= through
    assert (Position(ledger, entry, (index or 0) + 1) <= through) == (index is None)


def test_named_offsets_and_unnamed_topics_have_defaults() -> None:
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
def test_invalid_offset_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="startingOffsets must be earliest or latest"):
        starting_offsets(text)


def test_offset_of_unread_topic_is_refused() -> None:
    """Else its position would be ignored, and all of the topic be read."""
    offsets = starting_offsets(json.dumps({str(ORDERS): "12:0"}))
    offsets.check("startingOffsets", [ORDERS])
    with pytest.raises(InvalidSpecError, match=r"startingOffsets names .*got '.*/orders'"):
        offsets.check("startingOffsets", [ORDERS.partition(0), ORDERS.partition(1)])


def test_ending_offset_earliest_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="endingOffsets must be latest, or"):
        ending_offsets("earliest")


def test_checkpoint_of_other_source_is_refused() -> None:
    with raises("InvalidCheckpoint"):
        offset_from_json({str(ORDERS): "17"})


def partition_extent(index: int, *ledgers: tuple[int, int], entry_bytes: float = 100.0) -> Extent:
    newest, entries = max(ledgers, default=(-1, 0))
    partition = Partition(
        index,
        tuple(ledger for ledger in ledgers if ledger[1]),
        tail=EntryId(newest, entries - 1),
        held=frozenset(ledger for ledger, _ in ledgers),
        entry_bytes=entry_bytes,
    )
    return Extent(ORDERS.partition(index), partition)


topics = st.lists(
    st.dictionaries(st.integers(0, 9), st.integers(0, 30), max_size=4), min_size=1, max_size=3
).map(
    lambda topics: [
        partition_extent(index, *sorted(sizes.items())) for index, sizes in enumerate(topics)
    ]
)


def entries(extents: Sequence[Extent]) -> list[tuple[TopicName, int, int]]:
    return [
        (extent.topic, ledger, entry)
        for extent in extents
        for ledger, count in extent.partition.ledgers
        for entry in range(count)
    ]


@given(topics, st.none() | st.integers(1, 5_000))
def test_stream_reads_each_entry_once_within_its_limit(
    extents: list[Extent], limit: int | None
) -> None:
    read: Offset = {}
    seen: list[tuple[TopicName, int, int]] = []
    for _ in range(400):
        ahead = advance_offset(extents, read, limit)
        batch = [
            (extent.topic, ledger, entry)
            for extent in extents
            for piece in slices.cut(
                extent, read.get(extent.topic, BEGINNING), ahead[extent.topic], Filters()
            )
            for _, ledger, entry in entries([extent])
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


def test_partly_read_entry_is_read_to_its_end() -> None:
    extent = partition_extent(0, (4, 3))
    read = {extent.topic: Position(4, 2, 5)}
    assert advance_offset([extent], read)[extent.topic] == Position(4, 2, WHOLE)


def test_stream_without_new_entries_does_not_advance() -> None:
    extent = partition_extent(0, (4, 3), (5, 0))
    for behind in (Position(4, 2, WHOLE), Position(5, -1, WHOLE)):
        assert advance_offset([extent], {extent.topic: behind}) == {extent.topic: behind}


def test_recreated_topic_is_read_from_its_beginning() -> None:
    extent = partition_extent(0, (4, 3))
    ahead = advance_offset([extent], {extent.topic: Position(9, 9, WHOLE)})
    assert ahead[extent.topic] == Position(4, 2, WHOLE)


def test_missing_topic_of_stream_is_a_loss() -> None:
    extent = partition_extent(0, (4, 3))
    check_unread([extent], {extent.topic: Position(4, 2, WHOLE)})
    with pytest.raises(DataLossError, match="no longer exist"):
        check_unread([extent], {ORDERS.partition(1): BEGINNING})
    with pytest.raises(DataLossError, match="no longer has"):
        check_unread([extent], {extent.topic: Position(3, 2, WHOLE)})
