"""Durations, sizes, patterns with `*`, and ladders of delays."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
from redrive.policy.ladder import PRESETS, Ladder, check_delay
from redrive.policy.values import (
    Converted,
    Patterns,
    format_duration,
    parse_duration,
    parse_size,
    reads_directly,
    size_text,
    to_timedelta,
)

counts = st.integers(0, 99_999_999)


@given(st.integers(0, 10**9))
def test_duration_round_trips(seconds: int) -> None:
    duration = timedelta(seconds=seconds)
    assert parse_duration(format_duration(duration)) == duration


@given(counts, counts, counts, counts)
def test_duration_units_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    written = f"{days}d{hours}h{minutes}m{seconds}s"
    assert parse_duration(written) == timedelta(
        days=days, hours=hours, minutes=minutes, seconds=seconds
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("90s", 90), ("1m30s", 90), ("5m", 300), ("2h", 7_200), ("10d", 864_000)],
)
def test_duration_is_parsed_as_in_manifests(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59, "59s"), (60, "1m"), (90, "1m30s"), (3_600, "1h"), (90_061, "1d1h1m1s")],
)
def test_duration_is_formatted_in_its_shortest_form(seconds: int, text: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == text


def test_duration_is_formatted_without_fractions() -> None:
    assert format_duration(timedelta(seconds=1, milliseconds=999)) == "1s"


@pytest.mark.parametrize(
    "text",
    "|5|s|1.5s|-1s|+1s|1 s|1s |1S|1w|1s1m|1m1m|1ms|٣s|1s\n|100000000s".split("|"),
)
def test_invalid_duration_is_refused_with_value_and_remedy(text: str) -> None:
    with pytest.raises(InvalidSpecError) as refusal:
        parse_duration(text)
    assert f"got {text!r}" in str(refusal.value)
    assert "write it like 90s, 1m30s, 2h or 10d" in str(refusal.value)


@given(st.text(max_size=50))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    try:
        duration = parse_duration(text)
    except InvalidSpecError:
        return
    assert duration >= timedelta(0)


def test_duration_refusal_shortens_a_long_value() -> None:
    with pytest.raises(InvalidSpecError) as refusal:
        parse_duration("x" * 10_000)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("duration", [90, 90.0, timedelta(seconds=90)])
def test_duration_argument_is_seconds_or_timedelta(duration: float | timedelta) -> None:
    assert to_timedelta(duration, "a delay") == timedelta(seconds=90)


@pytest.mark.parametrize("duration", ["90s", None, True, float("nan"), float("inf"), 1e300, [90]])
def test_invalid_duration_argument_is_refused_by_name(duration: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="a number of seconds, or a timedelta; got"):
        to_timedelta(duration, "a delay")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1Ki", 1024),
        ("512Mi", 512 * 2**20),
        ("10Gi", 10 * 2**30),
        ("3Ti", 3 * 2**40),
        ("1k", 1_000),
        ("1M", 10**6),
        ("2G", 2 * 10**9),
        ("1T", 10**12),
    ],
)
def test_size_is_parsed_as_a_kubernetes_quantity(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "1", "0Mi", "-1Mi", "1.5Gi", "1 Gi", "1GB", "1gi", "1Mi\n", "Gi", "\u0661Mi"]
)
def test_size_without_unit_or_whole_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpecError, match="write it like 512Mi or 10Gi"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1_023, "1023 B"),
        (1_536, "1.5 KiB"),
        (1_023 * 2**10, "1023 KiB"),
        (430 * 2**20, "430 MiB"),
        (10 * 2**30, "10 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_size_is_shown_without_an_exponent(size: int, text: str) -> None:
    assert size_text(size) == text


STARS = {"/": "[^/]*", ".": "[^.]*", "\n": ".*"}


@given(
    but=st.sampled_from(sorted(STARS)),
    patterns=st.lists(st.text("ab*/.\n", max_size=8), max_size=3),
    name=st.text("ab*/.\n", max_size=8),
)
def test_pattern_matches_as_a_regular_expression(but: str, patterns: list[str], name: str) -> None:
    regexes = [STARS[but].join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    expected = any(re.fullmatch(regex, name) for regex in regexes)
    assert Patterns(tuple(patterns), but).match(name) is expected


@given(
    but=st.sampled_from(sorted(STARS)),
    pattern=st.text("ab*/.\n", max_size=12),
    stands_for=st.lists(st.text("ab*/.\n", max_size=3), min_size=12, max_size=12),
)
def test_wildcard_matches_any_allowed_replacement(
    but: str, pattern: str, stands_for: list[str]
) -> None:
    allowed = iter(text.replace(but, "") for text in stands_for)
    name = re.sub(r"[*]", lambda _: next(allowed), pattern)
    assert Patterns((pattern,), but).match(name)


@pytest.mark.parametrize("but", STARS)
@pytest.mark.parametrize("stars", [9, 60, 2_000])
def test_pattern_of_many_stars_is_matched_quickly(stars: int, but: str) -> None:
    name = "a" * 4_096
    assert Patterns(("*a" * stars + "*",), but).match(name)
    assert not Patterns(("*a" * stars + "b",), but).match(name)
    assert not Patterns(("*a" * stars + "b*",), but).match(name)
    assert not Patterns((f"a*{but}" * stars + "b",), but).match(f"a{but}" * stars)


def test_converted_field_without_its_decorator_is_not_read() -> None:
    @dataclass(frozen=True)
    class Plain:
        seconds: Converted[str, float] = Converted(float, 1.0)

    plain = Plain("2")
    with pytest.raises(TypeError, match="Plain lacks the decorator reads_directly"):
        print(plain.seconds)  # noqa: T201
    assert reads_directly(Plain)("2").seconds == 2.0


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
