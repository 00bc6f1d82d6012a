"""The cost of importing redrive, compared with importing only the client."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.benchmarks.figures import Figure

RUNS = 15
MOST = 2.0
SOURCES = Path(__file__).parents[3] / "operator"
PROGRAMS = {
    "pulsar": "import pulsar",
    "redrive": "import redrive",
    "names": "from redrive import PolicyFile, RetryConsumer",
}


def test_importing_costs_less_than_twice_the_client(figures: list[Figure], tmp_path: Path) -> None:
    taken: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for program in PROGRAMS.values():
        _seconds(program, tmp_path)  # compiles it
    for _ in range(RUNS):
        for name, program in PROGRAMS.items():
            taken[name].append(_seconds(program, tmp_path))
    median = {name: statistics.median(seconds) * 1_000 for name, seconds in taken.items()}
    ratio = median["names"] / median["pulsar"]
    figures += [
        Figure("import", "import pulsar", median["pulsar"], "ms"),
        Figure("import", "import redrive", median["redrive"], "ms"),
        Figure("import", PROGRAMS["names"], median["names"], "ms"),
        Figure("import", "ratio", ratio, "of import pulsar", at_most=MOST),
    ]


def _seconds(program: str, byte_code: Path) -> float:
    """Run a Python until it ends. The byte code it writes is used by the next run.

    Installed packages have byte code as well, because pip compiles them.
    """
    kept = {"PYTHONPYCACHEPREFIX": str(byte_code), "PYTHONDONTWRITEBYTECODE": ""}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(SOURCES)} | kept,
        check=True,
    )
    return time.perf_counter() - began
