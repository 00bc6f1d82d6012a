"""Summary of a test run: the time that each tier took, and the processes that it started."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest


def tier_seconds(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Sum the seconds of setup, call and teardown by tier: the first folder below `tests`."""
    seconds = defaultdict[str, float](float)
    for report in reports:
        seconds[report.nodeid.split("/")[1]] += report.duration
    return seconds


def started_processes(folder: Path) -> Counter[str]:
    """Count the processes of all sandboxes below *folder* by name: each has a log."""
    logs = (log.stem for log in folder.rglob("logs/*.log"))
    return Counter(name for name in logs if not re.match("pulsar[-_]", name))  # Pulsar's own


def write_summary(terminal: pytest.TerminalReporter, started: Counter[str]) -> None:
    """Write two lines of the tiers and the processes, most expensive first."""
    reports = (
        report
        for group in terminal.stats.values()
        for report in group
        if isinstance(report, pytest.TestReport)
    )
    tiers = sorted(tier_seconds(reports).items(), key=lambda tier: -tier[1])
    shown = ", ".join(f"{tier} {seconds / 60:.1f} min" for tier, seconds in tiers)
    terminal.write_line(f"Time of the workers: {shown}")
    shown = ", ".join(f"{count} {name}" for name, count in started.most_common()) or "none"
    terminal.write_line(f"Processes started: {shown}")
