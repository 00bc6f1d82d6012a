"""Ranges, spans and acknowledged entries of a partition."""

from __future__ import annotations

import itertools
import string
from typing import Any
from urllib.parse import unquote_plus

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
    spans_hold,
    spans_of_entries,
    spans_without,
)
from tests.support.reasons import raises

sizes = st.sampled_from([1, 2, RANGE_ENTRIES - 1, RANGE_ENTRIES, RANGE_ENTRIES + 1, 25_000])
ledgers = st.dictionaries(st.integers(1, 9), sizes, min_size=1, max_size=4).map(
    lambda sizes: tuple(sorted(sizes.items()))
)


@settings(max_examples=25)  # each of up to 100 000 entries
@given(ledgers, st.data())
def test_unacknowledged_entries_are_in_exactly_one_range(
    held: tuple[tuple[int, int], ...], data: st.DataObject
) -> None:
    entries = [EntryId(ledger, entry) for ledger, count in held for entry in range(count)]
    end = data.draw(st.sampled_from(entries))
    through = data.draw(st.sampled_from([EntryId(0, -1), *entries]))
    partition = Partition(0, held, Acknowledged(through))

    resting = [
        piece.range.entry_id(offset)
        for piece in ranges.cut(partition, end)
        for offset in bitmap.members(piece.pending)
    ]

    assert resting == [entry for entry in entries if through < entry <= end]


@given(ledgers)
def test_grown_topic_is_cut_at_the_same_places(
    held: tuple[tuple[int, int], ...],
) -> None:
    before = Partition(0, held)
    grown = Partition(0, (*held[:-1], (held[-1][0], held[-1][1] + 30_000)))
    pieces = [piece.range for piece in ranges.cut(before, before.end)]
    assert [piece.range for piece in ranges.cut(grown, grown.end)][: len(pieces)] == pieces


@given(st.integers(-1, 5), st.integers(0, 2**40), st.integers(0, 60_000))
def test_message_position_has_its_range(partition: int, ledger: int, entry: int) -> None:
    message_range = Range.of(partition, Position(ledger, entry, 0))
    assert message_range.holds(Position(ledger, entry, 0))
    assert message_range.first % RANGE_ENTRIES == 0
    assert message_range.size == RANGE_ENTRIES
    assert Range.parse(str(message_range)) == message_range


@given(st.sets(st.integers(0, 500)), st.sets(st.integers(0, 500)))
def test_bitmap_behaves_as_a_set(one: set[int], other: set[int]) -> None:
    bits, others = bitmap.of(one, 501), bitmap.of(other, 501)
    assert set(bitmap.members(bits | others)) == one | other
    assert set(bitmap.members(bits & ~others)) == one - other
    assert bits.bit_count() == len(one)
    assert all(bitmap.contains(bits, number) == (number in one) for number in range(502))
    assert bitmap.decode(bitmap.encode(bits)) == bits
    assert set(bitmap.members(bitmap.span(3, 7))) == {3, 4, 5, 6, 7}
    assert bitmap.span(7, 6) == bitmap.EMPTY


def test_range_ends_with_its_topic() -> None:
    piece = Range(0, 7, 100, 199)
    ends = [EntryId(6, 900), EntryId(7, 99), EntryId(7, 100), EntryId(7, 150), EntryId(8, -1)]
    assert [piece.offset_through(end) for end in ends] == [-1, -1, 0, 50, 99]
    assert piece.offset_through(EntryId(7, 500)) == 99


entry_sets = st.sets(st.builds(EntryId, st.integers(0, 2), st.integers(0, 15)))


def spans_of(these: set[EntryId]) -> list[Span]:
    return [
        span
        for ledger in (0, 1, 2)
        for span in spans_of_entries(
            ledger, sorted(entry.entry for entry in these if entry.ledger == ledger)
        )
    ]


def entries_of(these: list[Span]) -> list[EntryId]:
    return [
        EntryId(ledger, entry) for ledger, first, last in these for entry in range(first, last + 1)
    ]


@given(entry_sets, entry_sets)
def test_missing_spans_are_wanted_and_not_seen(wanted: set[EntryId], seen: set[EntryId]) -> None:
    missing = spans_without(spans_of(wanted), spans_of(seen))
    assert entries_of(missing) == sorted(wanted - seen)
    for ledger in (0, 1, 2):
        for entry in range(17):
            place = EntryId(ledger, entry)
            assert spans_hold(missing, place) == (place in wanted - seen)


@given(entry_sets)
def test_adjacent_entries_form_one_span(these: set[EntryId]) -> None:
    together = spans_of(these)
    assert entries_of(together) == sorted(these)
    assert sum(span.size for span in together) == len(these)
    for one, other in itertools.pairwise(together):
        assert one.end.ledger < other.ledger or one.last + 1 < other.first


@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.builds(EntryId, st.integers(0, 3), st.integers(-1, 9)),
)
def test_partition_yields_spans_behind_an_entry(counts: list[int], entry: EntryId) -> None:
    partition = Partition(0, tuple(enumerate(counts)))
    all_of_it = entries_of(partition.behind(NOWHERE))
    assert len(all_of_it) == sum(counts)
    assert entries_of(partition.behind(entry)) == [place for place in all_of_it if place > entry]


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


def test_single_acknowledgements_exclude_first_entry_of_range() -> None:
    seen = Acknowledged.from_cursor(cursor("3:0", "[(3:2..3:3],(3:4..4:1]]"))
    assert settled(seen, 2, 3) == [0, 1, 2]
    assert settled(seen, 3, 7) == [0, 3, 5, 6]
    assert settled(seen, 4, 4) == [0, 1]
    assert settled(seen, 5, 4) == []


def test_subscription_at_beginning_acknowledges_nothing() -> None:
    assert settled(Acknowledged.from_cursor(cursor("3:-1")), 3, 5) == []


@given(st.sets(st.integers(0, 60)), st.integers(-1, 60), st.integers(0, 60), st.integers(0, 60))
def test_acknowledged_entries_match_the_cursor(
    acknowledged: set[int], through: int, first: int, last: int
) -> None:
    singles = sorted(entry for entry in acknowledged if entry > through)
    written = ",".join(f"(7:{entry - 1}..7:{entry}]" for entry in singles)
    seen = Acknowledged.from_cursor(cursor(f"7:{through}", f"[{written}]"))
    done = {*range(through + 1), *acknowledged}
    assert settled(seen, 7, 62) == sorted(done)
    part = ranges.settled(Range(0, 7, first, max(first, last)), Partition(0, ((7, 62),), seen))
    entries = range(first, max(first, last) + 1)
    assert list(bitmap.members(part)) == [number - first for number in entries if number in done]


def test_open_ledger_counts_to_last_confirmed_entry() -> None:
    partition = Partition.from_stats(0, stats("9:4", {3: 50, 9: 0}), "")
    assert partition.ledgers == ((3, 50), (9, 5))
    assert partition.end == EntryId(9, 4)


def test_restarted_broker_ends_in_an_older_ledger() -> None:
    partition = Partition.from_stats(0, stats("12:-1", {3: 50, 12: 0}), "")
    assert partition.end == EntryId(3, 49)


def test_trimmed_ledger_has_no_end() -> None:
    partition = Partition.from_stats(0, stats("3:49", {12: 0}), "")
    assert partition.end == NOWHERE


@pytest.mark.parametrize(("name", "cursor_name"), [("a:b", "a%3Ab"), ("über", "%C3%BCber")])
def test_encoded_subscription_is_found(name: str, cursor_name: str) -> None:
    cursors = {cursor_name: cursor("3:1")}
    partition = Partition.from_stats(0, stats("3:4", {3: 0}, cursors), name)
    assert entries_of(partition.behind(NOWHERE))
    with raises("SubscriptionMissing", match=f"got .'{name}'.; wait"):
        Partition.from_stats(0, stats("3:4", {3: 0}, cursors), "redrive")


NAMES = st.text(min_size=1, max_size=20) | st.text(
    "ab:/%+~*. _-&=?#\\\u00fc\u202e\U0001f600", min_size=1, max_size=9
)


def encoded(name: str) -> str:
    """Return the name of a cursor, as `java.net.URLEncoder` writes it."""
    kept = f"{string.ascii_letters}{string.digits}.-*_".encode()
    written = (chr(b) if b in kept else "+" if b == 32 else f"%{b:02X}" for b in name.encode())
    return "".join(written)


@given(NAMES, st.lists(NAMES, max_size=5))
def test_each_subscription_is_read_in_its_own_place(name: str, others: list[str]) -> None:
    """Others may have names that look encoded, like `a%3Ab` beside `a:b`."""
    others = [*others, encoded(name), unquote_plus(name), name.upper()]
    cursors = {encoded(other): cursor("3:4") for other in others if other != name}
    with raises("SubscriptionMissing"):
        Partition.from_stats(0, stats("3:4", {3: 0}, cursors), name)
    cursors[encoded(name)] = cursor("3:1")
    own = Partition.from_stats(0, stats("3:4", {3: 0}, cursors), name)
    assert entries_of(own.behind(NOWHERE))
    assert own.acknowledged == Acknowledged.from_cursor(cursor("3:1"))


def test_topic_without_subscription_is_refused() -> None:
    with raises("SubscriptionMissing", match="has no subscription redrive; got"):
        Partition.from_stats(0, stats("3:4", {3: 0}, {"other": cursor("3:1")}), "redrive")
