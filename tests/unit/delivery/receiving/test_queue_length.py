"""When a queue gets short, and long again."""

from __future__ import annotations

from redrive.delivery.receiving.queue_length import LONG, LOOK_SECONDS, SHORT, QueueLength


class Taking:
    """Takes messages at some rate, and looks as often as a topic's thread does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.taken = 0.0
        self.length = QueueLength(self.now)

    def at(self, rate: float, seconds: float, *, dry: bool = False) -> list[int]:
        """Return the lengths that are asked for meanwhile."""
        asked, end = [], self.now + seconds
        while self.now < end:
            self.now += LOOK_SECONDS * 1.01
            self.taken += rate * LOOK_SECONDS * 1.01
            found = self.length.look(int(self.taken), self.now, dry=dry)
            if found is not None:
                asked.append(found)
        return asked


def test_a_queue_gets_short_after_some_seconds_of_slow_handling() -> None:
    taking = Taking()
    assert taking.at(150, 60) == []
    assert taking.at(1, 4) == []
    assert taking.at(150, 1) == []
    assert taking.at(0, 4) == []
    assert set(taking.at(0, 2)) == {SHORT}


def test_a_queue_in_which_nothing_waits_stays_long() -> None:
    taking = Taking()
    assert taking.at(1, 60, dry=True) == []


def test_a_queue_that_is_found_dry_now_and_then_stays_long() -> None:
    taking = Taking()
    for _ in range(20):
        assert taking.at(1, 4) == []
        assert taking.length.look(int(taking.taken), taking.now, dry=True) is None


def test_a_short_queue_gets_long_again_where_messages_are_taken_fast() -> None:
    taking = Taking()
    taking.at(1, 6)
    taking.length.changed()
    assert taking.at(150, 60) == []
    assert taking.at(1_000, 2 * LOOK_SECONDS)[-1] == LONG


def test_a_change_that_did_not_come_about_is_asked_for_ever_more_seldom() -> None:
    taking = Taking()
    pauses = []
    for _ in range(10):
        began = taking.now
        while not taking.at(1, LOOK_SECONDS):
            pass
        pauses.append(round(taking.now - began, -1))
        taking.length.kept(taking.now)
    assert pauses == [10, 10, 20, 40, 80, 160, 320, 600, 600, 600]
