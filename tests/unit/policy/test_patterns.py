"""What `*` stands for, as a regular expression has it, at a cost that ends."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.policy.values import Patterns

STARS = {"/": "[^/]*", ".": "[^.]*", "\n": ".*"}


@given(
    but=st.sampled_from(sorted(STARS)),
    patterns=st.lists(st.text("ab*/.\n", max_size=8), max_size=3),
    name=st.text("ab*/.\n", max_size=8),
)
def test_a_pattern_matches_what_a_regular_expression_does(
    but: str, patterns: list[str], name: str
) -> None:
    regexes = [STARS[but].join(map(re.escape, pattern.split("*"))) for pattern in patterns]
    expected = any(re.fullmatch(regex, name) for regex in regexes)
    assert Patterns(tuple(patterns), but).match(name) is expected


@given(
    but=st.sampled_from(sorted(STARS)),
    pattern=st.text("ab*/.\n", max_size=12),
    stands_for=st.lists(st.text("ab*/.\n", max_size=3), min_size=12, max_size=12),
)
def test_a_pattern_matches_what_its_stars_are_replaced_in_unless_they_stand_for_what_they_cannot(
    but: str, pattern: str, stands_for: list[str]
) -> None:
    allowed = iter(text.replace(but, "") for text in stands_for)
    name = re.sub(r"[*]", lambda _: next(allowed), pattern)
    assert Patterns((pattern,), but).match(name)


@pytest.mark.parametrize("but", STARS)
@pytest.mark.parametrize("stars", [9, 60, 2_000])
def test_many_stars_are_compared_in_no_time(stars: int, but: str) -> None:
    name = "a" * 4_096
    assert Patterns(("*a" * stars + "*",), but).match(name)
    assert not Patterns(("*a" * stars + "b",), but).match(name)
    assert not Patterns(("*a" * stars + "b*",), but).match(name)
    assert not Patterns((f"a*{but}" * stars + "b",), but).match(f"a{but}" * stars)
