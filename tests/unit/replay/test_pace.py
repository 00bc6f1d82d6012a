"""A task never sends faster than its rate, and makes up for what took a moment too long."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.replay.sending import CATCH_UP_SECONDS, Pace

rates = st.floats(0.1, 20_000)
lateness = st.lists(st.floats(0, 3 * CATCH_UP_SECONDS), min_size=2, max_size=200)


def sent_at(rate: float, late: Iterable[float]) -> list[float]:
    """When messages are sent if each is late by so many seconds, beside what the pace asks for."""
    pace, now, sent = Pace(), 0.0, []
    for delay in late:
        now += delay
        while wait := pace.due_in(now, rate):
            now += wait
        pace.sent(now, rate)
        sent.append(now)
    return sent


@given(rates, lateness)
def test_from_the_first_message_on_the_rate_is_kept(rate: float, late: list[float]) -> None:
    sent = sent_at(rate, late)
    for count, at in enumerate(sent):
        assert count <= (at - sent[0]) * rate + 1e-3


@pytest.mark.parametrize("rate", [1.0, 700.0, 5_000.0])
def test_what_is_late_for_less_than_a_message_takes_costs_no_rate(rate: float) -> None:
    sent = sent_at(rate, [0.9 / rate] * 1_000)
    assert len(sent) / (sent[-1] - sent[0]) == pytest.approx(rate, rel=0.01)


def test_without_a_limit_nothing_waits() -> None:
    pace = Pace()
    pace.sent(0, None)
    assert pace.due_in(0, None) == 0


def test_a_rate_that_rises_counts_at_once() -> None:
    pace = Pace()
    pace.sent(0, 0.001)
    assert pace.due_in(0, 100.0) == 0.01
