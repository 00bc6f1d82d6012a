from __future__ import annotations

from redrive.provision.health_checks import WINDOW_SECONDS, Deliveries


def test_the_first_look_counts_nothing_of_what_was_before() -> None:
    window = Deliveries.begin(5.0, 1_000, 2_000)
    assert (window.first, window.retries, window.last) == (0, 0, (0, 0))
    assert not window.is_whole


def test_what_came_between_looks_is_counted_and_goes_after_ten_minutes() -> None:
    window = Deliveries.begin(0.0, 10, 20).seen(60.0, 15, 40).seen(120.0, 16, 41)
    assert (window.first, window.retries, window.last) == (6, 21, (1, 1))
    later = window.seen(60.0 + WINDOW_SECONDS, 16, 41)
    assert (later.first, later.retries, later.last) == (1, 1, (0, 0))
    assert later.is_whole


def test_a_counter_that_was_set_back_counts_on_from_there() -> None:
    window = Deliveries.begin(0.0, 100, 200).seen(60.0, 3, 5)
    assert (window.first, window.retries) == (0, 0)
    assert (window.seen(120.0, 5, 9).first, window.seen(120.0, 5, 9).retries) == (2, 4)


def test_a_subscription_that_comes_later_counts_from_its_first_look() -> None:
    window = Deliveries.begin(0.0, None, 0).seen(60.0, 70, 1).seen(120.0, 75, None)
    assert (window.first, window.retries) == (5, 1)


def test_a_window_does_not_grow_for_ever() -> None:
    window = Deliveries.begin(0.0, 0, 0)
    for look in range(1, 1_000):
        window = window.seen(look * 60.0, look, look)
    assert (window.first, window.retries) == (10, 10)
