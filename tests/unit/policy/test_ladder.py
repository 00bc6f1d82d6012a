from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy.ladder import PRESETS, Ladder, check_delay
from redrive.policy.values import format_duration

ladders = st.from_type(Ladder)
SECOND = timedelta(seconds=1)
TEN_DAYS = timedelta(days=10)


def written(preset: str) -> str:
    return " ".join(format_duration(rung) for rung in PRESETS[preset])


@given(ladders, st.data())
def test_retry_n_has_the_delay_of_rung_n(ladder: Ladder, data: st.DataObject) -> None:
    retry = data.draw(st.integers(1, len(ladder.rungs)))
    assert ladder.delay(retry) == ladder.rungs[retry - 1]


@given(ladders, st.integers(0, 10_000))
def test_last_rung_repeats_beyond_the_ladder(ladder: Ladder, beyond: int) -> None:
    assert ladder.delay(len(ladder.rungs) + beyond) == ladder.rungs[-1]


@given(ladders, st.integers(max_value=0))
def test_retries_count_from_one(ladder: Ladder, retry: int) -> None:
    with pytest.raises(ValueError, match="retries count from 1"):
        ladder.delay(retry)


def test_presets_equal_those_of_their_systems() -> None:
    assert written("TDMQ") == "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    assert written("RocketMQ") == "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    assert written("ApsaraMQ") == "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def test_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidSpecError, match=r"got 'kafka'; use one of TDMQ, RocketMQ, ApsaraMQ"):
        Ladder.from_preset("kafka")


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_is_found_by_name(preset: str) -> None:
    assert Ladder.from_preset(preset).rungs == PRESETS[preset]


@given(ladders, st.integers(1, 20), st.floats(0, 1))
@example(Ladder((SECOND,), 1.0), 1, 1.0)
def test_jitter_shortens_delay_by_at_most_its_share(
    ladder: Ladder, retry: int, luck: float
) -> None:
    whole = ladder.delay(retry)
    shortened = ladder.delay(retry, luck)
    assert max(SECOND, whole * (1 - ladder.jitter)) <= shortened <= whole
    assert ladder.delay(retry, 1) == max(SECOND, whole * (1 - ladder.jitter))


@pytest.mark.parametrize("jitter", [-0.1, 1.1, float("nan")])
def test_jitter_outside_0_to_1_is_refused(jitter: float) -> None:
    with pytest.raises(InvalidSpecError, match=rf"must be from 0 to 1; got {jitter}; choose"):
        Ladder((SECOND,), jitter)


def test_exponential_ladder_grows_by_factor_up_to_its_maximum() -> None:
    ladder = Ladder.from_exponential("1s", 2, "10s", 0.5)
    assert [rung.total_seconds() for rung in ladder.rungs] == [1, 2, 4, 8, 10]
    assert ladder.jitter == 0.5
    assert ladder.delay(99) == timedelta(seconds=10)
    assert Ladder.from_exponential("1m", 3, "1m").rungs == (timedelta(minutes=1),)


@given(st.floats(1.1, 100), st.integers(1, 864_000), st.integers(1, 864_000))
def test_exponential_ladder_rises_from_initial_to_maximum(
    factor: float, one: int, other: int
) -> None:
    first, longest = sorted((one, other))
    rungs = Ladder.from_exponential(f"{first}s", factor, f"{longest}s").rungs
    assert (rungs[0], rungs[-1]) == (timedelta(seconds=first), timedelta(seconds=longest))
    assert list(rungs) == sorted(rungs)
    assert all(rung == timedelta(seconds=round(rung.total_seconds())) for rung in rungs)


@pytest.mark.parametrize(
    ("initial", "factor", "longest", "message"),
    [
        ("1s", 1.0, "1m", "from 1.1 to 100; got 1.0"),
        ("1s", 101, "1m", "from 1.1 to 100; got 101"),
        ("1s", float("nan"), "1m", "from 1.1 to 100; got nan"),
        ("2m", 2, "1m", "got 'initial 2m, max 1m'; increase max"),
        ("0s", 2, "1m", "the initial delay must be from 1 s"),
        ("1s", 2, "11d", "the longest delay must be from 1 s"),
    ],
)
def test_invalid_exponential_ladder_is_refused(
    initial: str, factor: float, longest: str, message: str
) -> None:
    with pytest.raises(InvalidSpecError, match=message):
        Ladder.from_exponential(initial, factor, longest)


@pytest.mark.parametrize("delay", [SECOND, TEN_DAYS])
def test_delay_at_its_limits_is_accepted(delay: timedelta) -> None:
    assert check_delay(delay, "a delay") == delay
    assert Ladder((delay,)).rungs == (delay,)


@pytest.mark.parametrize("delay", [timedelta(0), -SECOND, SECOND / 2, TEN_DAYS + SECOND])
def test_rung_out_of_range_is_refused_with_its_number(delay: timedelta) -> None:
    with pytest.raises(
        InvalidSpecError, match=r"rung 2 .* from 1 s to 864000 s .* got '-?[\d.]+ s'"
    ):
        Ladder((SECOND, delay))


@pytest.mark.parametrize("count", [0, 1_001])
def test_ladder_has_from_1_to_1000_rungs(count: int) -> None:
    with pytest.raises(InvalidSpecError, match=f"from 1 to 1000 rungs; got {count};"):
        Ladder((SECOND,) * count)
    assert Ladder((SECOND,) * 1_000).delay(1_000) == SECOND


@given(ladders)
def test_ladder_with_a_shorter_later_rung_descends(ladder: Ladder) -> None:
    ascending = Ladder(tuple(sorted(ladder.rungs)))
    assert not ascending.descends
    assert ladder.descends == (ladder.rungs != ascending.rungs)


def test_fixed_ladder_repeats_its_delay() -> None:
    ladder = Ladder.from_fixed("1m30s")
    assert [ladder.delay(retry) for retry in (1, 2, 1_000)] == [timedelta(seconds=90)] * 3
