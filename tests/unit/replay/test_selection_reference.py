"""The reference of selections holds all that a condition may use, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from redrive.policy.verdict import DeadReason
from redrive.replay.selection import COLUMNS, FUNCTIONS, MOMENTS, TYPES

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "selection.md"


@pytest.fixture(scope="module")
def text() -> str:
    return REFERENCE.read_text("utf-8")


def quoted(text: str, begin: str, end: str) -> set[str]:
    """Return the names in backquotes between *begin* and the next *end*."""
    return set(re.findall(r"`([^`]+)`", text.partition(begin)[2].partition(end)[0]))


def test_every_column_is_documented_and_no_other(text: str) -> None:
    names = (row.split(" | ")[0] for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE))
    documented = [column for name in names for column in re.findall(r"`([^`]+)`", name)]
    assert sorted(documented) == sorted([*COLUMNS, "properties['name']"])


def test_the_columns_that_hold_moments_are_documented(text: str) -> None:
    rows = re.findall(r"^\| (`.*) \| moment \|", text, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == MOMENTS


def test_every_reason_of_a_dead_letter_is_documented(text: str) -> None:
    assert quoted(text, "| `dead_reason` |", "|\n") == set(DeadReason)


def test_every_function_and_every_type_is_documented(text: str) -> None:
    assert quoted(text, "Functions:", "\n") == set(FUNCTIONS)
    assert quoted(text, "`cast` to ", ".") == set(TYPES)
