from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.delivery.pace import Pace
from redrive.errors import InvalidSpecError

bookings = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10)), min_size=1, max_size=50)


@given(st.floats(0.1, 1_000), bookings)
def test_no_message_begins_before_those_ahead_of_it_have_had_their_share(
    rate: float, booked: list[tuple[int, float]]
) -> None:
    pace, now, ahead = Pace(rate), 0.0, None
    for count, idle in booked:
        now += idle
        wait = pace.wait(count, now)
        assert wait >= 0
        begins = now + wait
        if ahead is not None:
            before, begun = ahead
            assert begins - begun >= before / rate - 1e-6
        ahead = (count, begins)


def test_time_that_went_unused_is_not_made_up_for() -> None:
    pace = Pace(2)
    assert [pace.wait(1, 100.0) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert [pace.wait(1, 1_000.0) for _ in range(3)] == [0.0, 0.5, 1.0]


def test_without_a_rate_nothing_waits() -> None:
    assert Pace(None).wait(1_000, 5.0) == Pace(None).wait(1_000, 5.0) == 0.0


@pytest.mark.parametrize("rate", [0, -1])
def test_a_rate_that_lets_nothing_through_is_refused(rate: float) -> None:
    with pytest.raises(InvalidSpecError, match="use pause"):
        Pace(rate)
