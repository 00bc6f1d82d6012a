"""How benchmarks tell what they measured.

They are functions `test_…` in files `bench_*.py`, so that only `make bench` runs them; files
`test_*.py` beside them try their parts with small numbers, in `make test`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console

from tests.benchmarks.figures import Figure, show

FIGURES = pytest.StashKey[list[Figure]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []


@pytest.fixture
def figures(pytestconfig: pytest.Config) -> Iterator[list[Figure]]:
    """Takes figures for the table, which fails in the end if one of them is out of its bounds.

    Not at once: the figures that follow are worth knowing too.
    """
    figures = pytestconfig.stash[FIGURES]
    before = len(figures)
    yield figures
    missed = [figure for figure in figures[before:] if not figure.kept]
    assert not missed, "; ".join(
        f"{figure.what}: {figure.value:g} {figure.unit}, {figure.bound}" for figure in missed
    )


@pytest.fixture
def minutes(pytestconfig: pytest.Config) -> float:
    """How long a long run runs."""
    return float(pytestconfig.getoption("--minutes") or 3.0)


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print the table."""
    if figures := config.stash[FIGURES]:
        show(figures, Console(width=120))
