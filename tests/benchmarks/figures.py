"""The figures of benchmarks with their bounds, printed as a table at the end of `make bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """A measured value, with its documented bounds if any.

    Attributes:
        benchmark: the name of the benchmark, which groups the rows.
        quantity: the measured quantity.
        at_most: the upper bound; None for no bound.
        at_least: the lower bound; None for no bound.
    """

    benchmark: str
    quantity: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def kept(self) -> bool:
        """True if the value is within its bounds."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        """The bounds as text, empty without bounds."""
        most = "" if self.at_most is None else f"at most {self.at_most:,g}"
        least = "" if self.at_least is None else f"at least {self.at_least:,g}"
        return ", ".join(filter(None, (least, most)))


def show(rows: Sequence[Figure], console: Console) -> None:
    """Print *rows* as a table."""
    table = Table(title="Figures", title_justify="left")
    for column in ("benchmark", "figure"):
        table.add_column(column, overflow="fold")
    for column in ("measured", "bound", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        verdict = ("kept" if row.kept else "MISSED") if row.bound else ""
        measured = f"{_short(row.value)} {row.unit}"
        table.add_row(row.benchmark, row.quantity, measured, row.bound, verdict)
    console.print(table)


def _short(value: float) -> str:
    """Return *value* with three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
