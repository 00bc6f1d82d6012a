"""Durations, sizes, and patterns with `*`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.errors import InvalidSpecError
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
