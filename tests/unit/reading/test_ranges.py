"""All that rests is in exactly one range, and each run cuts alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from redrive.reading import bitmap, ranges
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import RANGE_ENTRIES, Acknowledged, Partition, Range

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
