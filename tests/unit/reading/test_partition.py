"""A broker's internal state is read for what rests in a topic, to the entry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.reading import bitmap, ranges
from redrive.reading.positions import NOWHERE, EntryId
from redrive.reading.ranges import Acknowledged, Partition, Range, SubscriptionMissingError


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
