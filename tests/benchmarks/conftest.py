"""The reporting of benchmarks.

Benchmarks are functions `test_…` in files `bench_*.py`, which only `make bench` runs. Files
`test_*.py` beside them test their parts with small numbers, in `make test`.
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
    """Collects figures for the table. The benchmark fails at its end if one exceeds its bounds.

    It does not fail earlier, so that later figures are measured, too. Its figures are printed at
    once: the whole run takes long, and may be interrupted.
    """
    figures = pytestconfig.stash[FIGURES]
    before = len(figures)
    yield figures
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        show(figures[before:], Console(width=120))
    missed = [figure for figure in figures[before:] if not figure.kept]
    assert not missed, "; ".join(
        f"{figure.quantity}: {figure.value:g} {figure.unit}, {figure.bound}" for figure in missed
    )


@pytest.fixture
def minutes(pytestconfig: pytest.Config) -> float:
    """The duration of a long run in minutes."""
    return float(pytestconfig.getoption("--minutes") or 3.0)


def pytest_terminal_summary(config: pytest.Config) -> None:
    """Print the table."""
    if figures := config.stash[FIGURES]:
        show(figures, Console(width=120))
