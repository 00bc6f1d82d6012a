"""The rate of a run is that of its last half minute."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.replay.job.progress import WINDOW_SECONDS, Speed


def test_nothing_is_known_at_first_nor_after_a_rest() -> None:
    speed = Speed()
    assert (speed.rate, speed.remaining(5)) == (None, None)
    speed.note(10.0, 400)
    assert (speed.rate, speed.remaining(5)) == (None, None)
    speed.note(12.0, 600)
    assert (speed.rate, speed.remaining(250)) == (100.0, timedelta(seconds=2))
    speed.restart()
    speed.note(500.0, 600)
    assert speed.rate is None


def test_a_run_that_does_not_move_has_no_end() -> None:
    speed = Speed()
    speed.note(0.0, 7)
    speed.note(2.0, 7)
    assert (speed.rate, speed.remaining(3)) == (0.0, None)
    assert speed.remaining(0) is None


@given(st.integers(1, 1_000), st.integers(1, 1_000), st.integers(1, 5))
def test_what_is_long_ago_does_not_count(before: int, after: int, step: int) -> None:
    speed, moved = Speed(), 0
    for second in range(0, 200, step):
        moved += step * (before if second <= 100 else after)
        speed.note(float(second), moved)
    assert speed.rate == pytest.approx(after)
    assert 200 - 2 * step - WINDOW_SECONDS > 100
