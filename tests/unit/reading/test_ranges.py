"""Ranges, spans and acknowledged entries of a partition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redrive.reading import bitmap, ranges
from redrive.reading.positions import NOWHERE, EntryId, Position
from redrive.reading.ranges import (
    RANGE_ENTRIES,
    Acknowledged,
    Partition,
    Range,
    Span,
    SubscriptionMissingError,
    spans_hold,
    spans_of_entries,
    spans_without,
)

sizes = st.sampled_from([1, 2, RANGE_ENTRIES - 1, RANGE_ENTRIES, RANGE_ENTRIES + 1, 25_000])
ledgers = st.dictionaries(st.integers(1, 9), sizes, min_size=1, max_size=4).map(
    lambda found: tuple(sorted(found.items()))
)


@settings(max_examples=25)  # each of up to 100 000 entries
@given(ledgers, st.data())
def test_what_rests_lies_in_one_range_and_nothing_else_does(
    held: tuple[tuple[int, int], ...], data: st.DataObject
) -> None:
    entries = [EntryId(ledger, entry) for ledger, count in held for entry in range(count)]
    end = data.draw(st.sampled_from(entries))
    through = data.draw(st.sampled_from([EntryId(0, -1), *entries]))
    partition = Partition(0, held, Acknowledged(through))

    found = [
        piece.range.entry_id(offset)
        for piece in ranges.cut(partition, end)
        for offset in bitmap.members(piece.resting)
    ]

    assert found == [entry for entry in entries if through < entry <= end]


@given(ledgers)
def test_a_topic_that_has_grown_is_cut_in_the_same_places(
    held: tuple[tuple[int, int], ...],
) -> None:
    before = Partition(0, held)
    grown = Partition(0, (*held[:-1], (held[-1][0], held[-1][1] + 30_000)))
    there = [piece.range for piece in ranges.cut(before, before.end)]
    assert [piece.range for piece in ranges.cut(grown, grown.end)][: len(there)] == there


@given(st.integers(-1, 5), st.integers(0, 2**40), st.integers(0, 60_000))
def test_each_message_has_its_range(partition: int, ledger: int, entry: int) -> None:
    of = Range.of(partition, Position(ledger, entry, 0))
    assert of.holds(Position(ledger, entry, 0))
    assert of.first % RANGE_ENTRIES == 0
    assert of.size == RANGE_ENTRIES
    assert Range.parse(str(of)) == of


@given(st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_a_bitmap_is_a_set(one: set[int], other: set[int]) -> None:
    bits, others = bitmap.of(one, 501), bitmap.of(other, 501)
    assert set(bitmap.members(bits | others)) == one | other
    assert set(bitmap.members(bits & ~others)) == one - other
    assert bits.bit_count() == len(one)
    assert all(bitmap.contains(bits, number) == (number in one) for number in range(502))
    assert bitmap.decode(bitmap.encode(bits)) == bits
    assert set(bitmap.members(bitmap.span(3, 7))) == {3, 4, 5, 6, 7}
    assert bitmap.span(7, 6) == bitmap.EMPTY


def test_a_range_ends_where_its_topic_does() -> None:
    of = Range(0, 7, 100, 199)
    ends = [EntryId(6, 900), EntryId(7, 99), EntryId(7, 100), EntryId(7, 150), EntryId(8, -1)]
    assert [of.offset_through(end) for end in ends] == [-1, -1, 0, 50, 99]
    assert of.offset_through(EntryId(7, 500)) == 99


entry_sets = st.sets(st.builds(EntryId, st.integers(0, 2), st.integers(0, 15)))


def spans_of(these: set[EntryId]) -> list[Span]:
    return [
        span
        for ledger in (0, 1, 2)
        for span in spans_of_entries(
            ledger, sorted(each.entry for each in these if each.ledger == ledger)
        )
    ]


def entries_of(these: list[Span]) -> list[EntryId]:
    return [EntryId(of, entry) for of, first, last in these for entry in range(first, last + 1)]


@given(entry_sets, entry_sets)
def test_what_is_missing_is_what_was_wanted_and_not_seen(
    wanted: set[EntryId], seen: set[EntryId]
) -> None:
    missing = spans_without(spans_of(wanted), spans_of(seen))
    assert entries_of(missing) == sorted(wanted - seen)
    for ledger in (0, 1, 2):
        for entry in range(17):
            place = EntryId(ledger, entry)
            assert spans_hold(missing, place) == (place in wanted - seen)


@given(entry_sets)
def test_entries_that_follow_on_each_other_are_put_together(these: set[EntryId]) -> None:
    together = spans_of(these)
    assert entries_of(together) == sorted(these)
    assert sum(span.size for span in together) == len(these)
    for one, other in itertools.pairwise(together):
        assert one.end.ledger < other.ledger or one.last + 1 < other.first


@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.builds(EntryId, st.integers(0, 3), st.integers(-1, 9)),
)
def test_a_partition_tells_what_lies_behind_an_entry(counts: list[int], entry: EntryId) -> None:
    partition = Partition(0, tuple(enumerate(counts)))
    all_of_it = entries_of(partition.behind(NOWHERE))
    assert len(all_of_it) == sum(counts)
    assert entries_of(partition.behind(entry)) == [each for each in all_of_it if each > entry]


def cursor(through: str, ranges: str = "[]") -> dict[str, str]:
    return {"markDeletePosition": through, "individuallyDeletedMessages": ranges}


def stats(
    last: str, ledgers: dict[int, int], cursors: dict[str, Any] | None = None
) -> dict[str, Any]:
    """As a broker writes it: of the ledger it writes to, it lists no entries."""
    return {
        "lastConfirmedEntry": last,
        "ledgers": [{"ledgerId": i, "entries": n} for i, n in ledgers.items()],
        "cursors": cursors or {},
    }


def settled(seen: Acknowledged, ledger: int, entries: int) -> list[int]:
    """Return which of the first *entries* of a ledger are acknowledged."""
    partition = Partition(0, ((ledger, entries),), seen)
    return list(bitmap.members(ranges.settled(Range(0, ledger, 0, entries - 1), partition)))


def test_single_acknowledgements_are_read_as_ranges_without_their_first_entry() -> None:
    seen = Acknowledged.from_cursor(cursor("3:0", "[(3:2..3:3],(3:4..4:1]]"))
    assert settled(seen, 2, 3) == [0, 1, 2]
    assert settled(seen, 3, 7) == [0, 3, 5, 6]
    assert settled(seen, 4, 4) == [0, 1]
    assert settled(seen, 5, 4) == []


def test_a_subscription_at_the_beginning_has_acknowledged_nothing() -> None:
    assert settled(Acknowledged.from_cursor(cursor("3:-1")), 3, 5) == []


@given(st.sets(st.integers(0, 60)), st.integers(-1, 60), st.integers(0, 60), st.integers(0, 60))
def test_what_is_acknowledged_is_told_exactly(
    acknowledged: set[int], through: int, first: int, last: int
) -> None:
    singles = sorted(entry for entry in acknowledged if entry > through)
    written = ",".join(f"(7:{entry - 1}..7:{entry}]" for entry in singles)
    seen = Acknowledged.from_cursor(cursor(f"7:{through}", f"[{written}]"))
    done = {*range(through + 1), *acknowledged}
    assert settled(seen, 7, 62) == sorted(done)
    part = ranges.settled(Range(0, 7, first, max(first, last)), Partition(0, ((7, 62),), seen))
    there = range(first, max(first, last) + 1)
    assert list(bitmap.members(part)) == [each - first for each in there if each in done]


def test_the_ledger_being_written_counts_up_to_the_last_confirmed_entry() -> None:
    partition = Partition.from_stats(0, stats("9:4", {3: 50, 9: 0}), "")
    assert partition.ledgers == ((3, 50), (9, 5))
    assert partition.end == EntryId(9, 4)


def test_after_a_restart_of_the_broker_the_end_is_in_an_older_ledger() -> None:
    partition = Partition.from_stats(0, stats("12:-1", {3: 50, 12: 0}), "")
    assert partition.end == EntryId(3, 49)


def test_a_ledger_that_was_trimmed_is_not_waited_for() -> None:
    partition = Partition.from_stats(0, stats("3:49", {12: 0}), "")
    assert partition.end == NOWHERE


def test_a_topic_without_the_subscription_is_refused() -> None:
    with pytest.raises(SubscriptionMissingError, match="has no subscription redrive; got"):
        Partition.from_stats(0, stats("3:4", {3: 0}, {"other": cursor("3:1")}), "redrive")
