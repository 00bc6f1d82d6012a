"""Slices hold each message that is asked for once, and little else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.naming import TopicName
from redrive.reading.positions import NOWHERE, EntryId, Position
from redrive.reading.ranges import Acknowledged, Partition, Span
from redrive.spark import slices
from redrive.spark.slices import BEGINNING, END, WHOLE, DataLossError, Extent, Filters, PushedFilter

ORDERS = TopicName("shop", "prod", "orders").partition(2)
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "EqualTo": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "In": lambda value, among: value in among,
}


def extent(*ledgers: tuple[int, int], complete: bool = True) -> Extent:
    held = frozenset(ledger for ledger, _ in ledgers)
    filled = tuple(each for each in ledgers if each[1])
    newest, entries = max(ledgers, default=(-1, 0))
    tail = EntryId(newest, entries - 1)
    return Extent(ORDERS, Partition(2, filled, tail=tail, held=held), complete=complete)


ledgers = st.dictionaries(st.integers(0, 12), st.integers(0, 40), max_size=6).map(
    lambda found: extent(*sorted(found.items()))
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


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_ENTRIES", 10)


def wanted(position: Position, asked: list[PushedFilter]) -> bool:
    has = {"__ledger": position.ledger, "__entry": position.entry, "__partition": 2}
    return all(COMPARE[each.kind](has[each.column], each.value) for each in asked)


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


@given(ledgers, st.sampled_from([each for each in COMPARE if each != "In"]), small)
def test_no_ledger_is_read_that_a_condition_excludes(of: Extent, kind: str, value: int) -> None:
    filters = Filters([PushedFilter("__ledger", kind, value)])
    for each in slices.cut(of, BEGINNING, END, filters):
        assert all(COMPARE[kind](ledger, value) for ledger, *_ in each.spans)


def test_a_partition_is_skipped_by_its_name_or_its_number() -> None:
    for condition in (
        PushedFilter("__topic", "EqualTo", str(ORDERS.without_partition())),
        PushedFilter("__topic", "In", ("a", "b")),
        PushedFilter("__partition", "LessThan", 2),
    ):
        assert not list(slices.cut(extent((1, 5)), BEGINNING, END, Filters([condition])))
    asked = [PushedFilter("__topic", "EqualTo", str(ORDERS)), PushedFilter("value", "IsNull", None)]
    assert list(slices.cut(extent((1, 5)), BEGINNING, END, Filters(asked)))


def test_without_ledgers_there_is_one_slice_that_begins_early_enough_for_chunks() -> None:
    of = extent((9, 500), complete=False)
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


def test_what_is_gone_before_its_first_batch_was_read_is_found() -> None:
    begin = extent((3, 5), (4, 2)).begin
    slices.check_held(extent((3, 5), (4, 2)), begin)
    with pytest.raises(DataLossError):
        slices.check_held(extent((4, 2)), begin)
    assert extent((3, 0)).begin == extent((3, 5), complete=False).begin == BEGINNING


def test_what_is_gone_is_found() -> None:
    of = extent((3, 5), (4, 0))
    for ledger, entry in [NOWHERE, (3, -1), (3, 4), (4, -1)]:
        slices.check_held(of, Position(ledger, entry, WHOLE))
    for ledger, entry in [(2, 7), (4, 0), (5, 0)]:
        with pytest.raises(DataLossError, match="does not hold what follows on"):
            slices.check_held(of, Position(ledger, entry, WHOLE))
    slices.check_held(extent((3, 5), complete=False), Position(2, 7, WHOLE))


@pytest.mark.parametrize(
    ("passed", "lost"),
    [((2, 7), False), ((2, 5), False), ((3, -1), True), ((2, 8), True), ((3, 0), True)],
)
def test_nothing_is_lost_that_a_subscription_stands_before(
    passed: tuple[int, int], *, lost: bool
) -> None:
    of = extent((3, 5))
    kept = replace(of.partition, acknowledged=Acknowledged(EntryId(*passed)))
    with pytest.raises(DataLossError) if lost else nullcontext():
        slices.check_held(replace(of, partition=kept), Position(2, 7, WHOLE))


def test_a_time_that_no_calendar_has_is_left_to_spark() -> None:
    """Whoever sends a message sets its event time: in nanoseconds, too."""
    filters = Filters(
        [PushedFilter("__eventTime", "GreaterThan", datetime(2026, 1, 1, tzinfo=UTC))]
    )
    assert filters.keep_times(0, 1_800_000_000_000_000_000)
    assert not filters.keep_times(0, None)
