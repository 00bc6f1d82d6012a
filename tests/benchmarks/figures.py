"""What benchmarks measured, and what it should have been: a table at the end of `make bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One measured value, with the bound that is promised for it, if any.

    Attributes:
        benchmark: what was run; the rows of one benchmark stand together.
        what: what was measured.
        at_most: above this a promise is broken; None promises nothing.
        at_least: the same from below.
    """

    benchmark: str
    what: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def kept(self) -> bool:
        """Whether the value is within its bounds."""
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        """The bounds in words; nothing where there is none."""
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
        table.add_row(row.benchmark, row.what, measured, row.bound, verdict)
    console.print(table)


def _short(value: float) -> str:
    """Write *value* with three digits that matter, and never as a power of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
