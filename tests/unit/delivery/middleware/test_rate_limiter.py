from __future__ import annotations

import itertools
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.delivery.middleware.scheduling import RateLimiter
from redrive.delivery.parts import SystemClock
from redrive.errors import InvalidSpecError
from redrive.testing.broker import VirtualClock

takings = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=50
)


class Watch:
    """A clock that a pace may put forward, and the moments at which something was taken."""

    def __init__(self, rate: float | None) -> None:
        self.clock = VirtualClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.limiter = RateLimiter(rate, self.clock, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def take(self, count: int = 1, took: float = 0) -> float:
        """Take so many messages, which come after so many seconds; tell when they did."""

        def take() -> list[int]:
            self.sleep(took)
            return [0] * count

        assert self.limiter.take(take)() == [0] * count
        return self.clock.monotonic()


@given(st.floats(0.1, 1_000), takings)
def test_no_message_begins_before_those_ahead_of_it_have_had_their_share(
    rate: float, takings: list[tuple[int, float, float]]
) -> None:
    watch, ahead = Watch(rate), None
    for count, idle, took in takings:
        watch.sleep(idle)
        begins = watch.take(count, took)
        if ahead is not None:
            before, begun = ahead
            assert begins - begun >= before / rate - 1e-5
        ahead = (count, begins)


def test_time_that_went_unused_is_not_made_up_for() -> None:
    watch = Watch(2)
    assert [watch.take() for _ in range(3)] == [0.0, 0.5, 1.0]
    watch.sleep(999)
    assert [watch.take() for _ in range(3)] == [1_000.0, 1_000.5, 1_001.0]


def test_without_a_rate_nothing_waits() -> None:
    watch = Watch(None)
    assert [watch.take(1_000) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_threads_that_share_a_pace_take_their_turns() -> None:
    limiter, moments = RateLimiter(20, SystemClock(), time.sleep), []

    def take() -> list[int]:
        moments.append(time.monotonic())
        return [0]

    threads = [threading.Thread(target=limiter.take(take)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(moments) == 5
    assert all(after - before >= 0.049 for before, after in itertools.pairwise(moments))


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_that_lets_nothing_through_is_refused(rate: float) -> None:
    with pytest.raises(InvalidSpecError, match="use pause"):
        Watch(rate)
