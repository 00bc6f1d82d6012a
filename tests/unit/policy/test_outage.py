from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy.model import OutageLimits, OutcomeWindow

LIMITS = OutageLimits()
outcomes = st.lists(st.none() | st.tuples(st.sampled_from("abc"), st.sampled_from("123456")))
limits = st.integers(1, 30).flatmap(
    lambda window: st.builds(
        OutageLimits,
        window=st.just(window),
        min_messages=st.integers(1, window),
        failure_percent=st.integers(1, 100),
    )
)


@given(limits, outcomes, st.sampled_from("abc"))
def test_an_outage_is_a_share_of_the_latest_outcomes_and_many_messages(
    limits: OutageLimits, outcomes: list[tuple[str, str] | None], cause: str
) -> None:
    window = OutcomeWindow(limits.window)
    for outcome in outcomes:
        window.add(outcome)
    latest = outcomes[-limits.window :]
    failures = [outcome for outcome in latest if outcome is not None and outcome[0] == cause]
    assert window.is_outage(cause, limits) == (
        len(set(failures)) >= limits.min_messages
        and len(failures) * 100 >= limits.failure_percent * len(latest)
    )


@given(st.integers(0, 10_000))
def test_one_failure_in_twenty_is_never_an_outage(seed: int) -> None:
    luck, window = random.Random(seed), OutcomeWindow(LIMITS.window)  # noqa: S311 - a simulation
    for number in range(5_000):
        window.add(("cause", f"{number}") if luck.random() < 0.05 else None)
        assert not window.is_outage("cause", LIMITS)


def test_a_dependency_that_is_down_is_an_outage_after_fifty_failures_at_most() -> None:
    window = OutcomeWindow(LIMITS.window)
    for _ in range(1_000):
        window.add(None)
    for number in range(50):
        assert not window.is_outage("cause", LIMITS)
        window.add(("cause", f"{number}"))
    assert window.is_outage("cause", LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 0), ("window", 10_001), ("min_messages", 0), ("min_messages", 101),
        ("failure_percent", 0), ("failure_percent", 101), ("max_probe_interval", timedelta()),
        ("max_probe_interval", timedelta(hours=2)), ("max_pause", timedelta(days=8)),
    ],
)  # fmt: skip
def test_limits_out_of_bounds_are_refused(field: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="outage breaker"):
        OutageLimits(**{field: value})
