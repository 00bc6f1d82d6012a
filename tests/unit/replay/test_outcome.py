"""What is found in the target belongs to the Replay whose name it carries, selected now or not."""

from __future__ import annotations

from redrive.reading.positions import Position, Source
from redrive.reading.ranges import Range
from redrive.replay.outcome import Found, RangeOutcome

OF = Range(0, 7, 0, 9_999)


def found(*positions: tuple[int, int]) -> Found:
    """Return what Replay `first` has stored: entries, and indexes in them."""
    result = Found()
    for entry, index in positions:
        result.add(OF, Source("first", 0, Position(7, entry, index)))
    return result


def test_what_another_replay_has_stored_stays_its_own() -> None:
    second = RangeOutcome({}, "second")
    second.found(found((3, 0), (5, 0)))
    second.store((4, 0), 1)
    second.store((5, 0), 1)
    result = second.result(OF, {})
    assert result.moved == {"second": 1 << 4, "first": 1 << 5}
    assert result.partly == {"first": {3: 0b1}}

    third = RangeOutcome(result.partly, "third")
    assert third.is_stored((3, 0))
    assert third.store((3, 0), 1)
    assert third.result(OF, {}).moved == {"first": 1 << 3}


def test_an_entry_may_be_moved_by_several_replays() -> None:
    second = RangeOutcome({"first": {3: 0b001}}, "second")
    assert not second.store((3, 1), 3)
    assert second.result(OF, {}).partly == {"first": {3: 0b001}, "second": {3: 0b010}}


def test_what_another_replay_has_sent_to_a_replicated_target_is_none_of_this_topic() -> None:
    known, any_of_them = Found(frozenset({"first"})), Found()
    for found in (known, any_of_them):
        for uid, entry in (("first", 3), ("of another cluster", 4)):
            found.add(OF, Source(uid, 0, Position(7, entry, 0)))
    assert known.by == {3: {0: "first"}}
    assert any_of_them.by.keys() == {3, 4}
