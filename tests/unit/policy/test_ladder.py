from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy import durations
from redrive.policy.ladder import LEVELS, PRESETS, Ladder, check_delay, level_delay

ladders = st.from_type(Ladder)
SECOND = timedelta(seconds=1)
TEN_DAYS = timedelta(days=10)


def written(preset: str) -> str:
    return " ".join(durations.text_of(rung) for rung in PRESETS[preset])


@given(ladders, st.data())
def test_rung_n_is_the_delay_before_retry_n(ladder: Ladder, data: st.DataObject) -> None:
    retry = data.draw(st.integers(1, len(ladder.rungs)))
    assert ladder.delay(retry) == ladder.rungs[retry - 1]


@given(ladders, st.integers(0, 10_000))
def test_past_its_end_the_last_rung_repeats(ladder: Ladder, beyond: int) -> None:
    assert ladder.delay(len(ladder.rungs) + beyond) == ladder.rungs[-1]


@given(ladders, st.integers(max_value=0))
def test_retries_count_from_one(ladder: Ladder, retry: int) -> None:
    with pytest.raises(ValueError, match="retries count from 1"):
        ladder.delay(retry)


def test_the_presets_are_those_of_the_systems_they_are_named_after() -> None:
    assert written("tdmq") == "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    assert written("rocketmq") == "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    assert written("apsaramq") == "10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidSpecError, match=r"got 'kafka'; use one of tdmq, rocketmq, apsaramq"):
        Ladder.from_preset("kafka")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_taken_by_name(preset: str) -> None:
    assert Ladder.from_preset(preset).rungs == PRESETS[preset]


@given(st.integers(1, 18))
def test_level_k_is_the_kth_word(level: int) -> None:
    assert level_delay(level) == LEVELS[level - 1]


@given(st.integers(min_value=18))
def test_a_level_above_the_highest_means_the_highest(level: int) -> None:
    assert level_delay(level) == timedelta(hours=2)


@pytest.mark.parametrize("delay", [SECOND, TEN_DAYS])
def test_the_bounds_of_a_delay_belong_to_it(delay: timedelta) -> None:
    assert check_delay(delay, "a delay") == delay
    assert Ladder((delay,)).rungs == (delay,)


@pytest.mark.parametrize("delay", [timedelta(0), -SECOND, SECOND / 2, TEN_DAYS + SECOND])
def test_a_delay_out_of_bounds_is_refused_with_its_place(delay: timedelta) -> None:
    with pytest.raises(
        InvalidSpecError, match=r"rung 2 .* from 1 s to 864000 s .* got '-?[\d.]+ s'"
    ):
        Ladder((SECOND, delay))


@pytest.mark.parametrize("count", [0, 1_001])
def test_a_ladder_has_from_one_to_a_thousand_rungs(count: int) -> None:
    with pytest.raises(InvalidSpecError, match=f"from 1 to 1000 rungs; got {count};"):
        Ladder((SECOND,) * count)
    assert Ladder((SECOND,) * 1_000).delay(1_000) == SECOND


@given(ladders)
def test_a_ladder_descends_where_a_rung_is_shorter_than_the_one_before(ladder: Ladder) -> None:
    ascending = Ladder(tuple(sorted(ladder.rungs)))
    assert not ascending.descends
    assert ladder.descends == (ladder != ascending)


def test_a_fixed_ladder_is_one_rung_for_ever() -> None:
    ladder = Ladder.from_fixed("1m30s")
    assert [ladder.delay(retry) for retry in (1, 2, 1_000)] == [timedelta(seconds=90)] * 3
