from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from tests.benchmarks.figures import Figure, show


@pytest.mark.parametrize(
    ("value", "at_least", "at_most", "expected"),
    [
        (5, None, None, True),
        (5, None, 5, True),
        (5.1, None, 5, False),
        (5, 5, None, True),
        (4.9, 5, None, False),
        (7, 5, 6, False),
    ],
)
def test_a_figure_is_kept_within_its_bounds(
    value: float, at_least: float | None, at_most: float | None, *, expected: bool
) -> None:
    assert Figure("b", "what", value, "s", at_most=at_most, at_least=at_least).kept is expected


def test_table_shows_value_bound_and_verdict() -> None:
    out = StringIO()
    rows = [
        Figure("provision", "1000 policies", 41.27, "s", at_most=57),
        Figure("provision", "memory", 260.4, "MB", at_most=250),
        Figure("delivery", "messages", 123_456.0, "/s"),
    ]
    show(rows, Console(file=out, width=120))
    first, second, third = (
        [word.strip() for word in line.split("│")[1:-1]]
        for line in out.getvalue().splitlines()
        if line.startswith("│")
    )
    assert first == ["provision", "1000 policies", "41.3 s", "at most 57", "kept"]
    assert second == ["provision", "memory", "260 MB", "at most 250", "MISSED"]
    assert third == ["delivery", "messages", "123,456 /s", "", ""]
