"""What came of what was wanted, against sets of entries."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from redrive.reading.positions import NOWHERE, EntryId
from redrive.reading.ranges import Partition, Span, spans_hold, spans_of_entries, spans_without

entries = st.sets(st.builds(EntryId, st.integers(0, 2), st.integers(0, 15)))


def put_together(these: set[EntryId]) -> list[Span]:
    return [
        span
        for ledger in (0, 1, 2)
        for span in spans_of_entries(
            ledger, sorted(each.entry for each in these if each.ledger == ledger)
        )
    ]


def taken_apart(these: list[Span]) -> list[EntryId]:
    return [EntryId(of, entry) for of, first, last in these for entry in range(first, last + 1)]


@given(entries, entries)
def test_what_is_missing_is_what_was_wanted_and_not_seen(
    wanted: set[EntryId], seen: set[EntryId]
) -> None:
    missing = spans_without(put_together(wanted), put_together(seen))
    assert taken_apart(missing) == sorted(wanted - seen)
    for ledger in (0, 1, 2):
        for entry in range(17):
            place = EntryId(ledger, entry)
            assert spans_hold(missing, place) == (place in wanted - seen)


@given(entries)
def test_entries_that_follow_on_each_other_are_put_together(these: set[EntryId]) -> None:
    together = put_together(these)
    assert taken_apart(together) == sorted(these)
    assert sum(span.size for span in together) == len(these)
    for one, other in itertools.pairwise(together):
        assert one.end.ledger < other.ledger or one.last + 1 < other.first


@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.builds(EntryId, st.integers(0, 3), st.integers(-1, 9)),
)
def test_a_partition_tells_what_lies_behind_an_entry(counts: list[int], entry: EntryId) -> None:
    partition = Partition(0, tuple(enumerate(counts)))
    all_of_it = taken_apart(partition.behind(NOWHERE))
    assert len(all_of_it) == sum(counts)
    assert taken_apart(partition.behind(entry)) == [each for each in all_of_it if each > entry]
