"""Shows what a long set-up is busy with, on standard error.

Called by whatever fetches, builds or starts a part, one step at a time. On a terminal the running
step is a spinner with its time; elsewhere, as in a CI log, it is a line at the start, one every
half minute and one at the end, so that silence never lasts longer than that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

HEARTBEAT_SECONDS = 30.0

_console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show *what* (such as ``start Pulsar``) as running until the block ends, then its seconds."""
    started = time.monotonic()
    outcome = "failed"
    try:
        with _spinner(what) if _console.is_terminal else _heartbeat(what, started):
            yield
        outcome = "done"
    finally:
        _console.print(f"{outcome:>6}: {what} ({time.monotonic() - started:.1f} s)")


@contextmanager
def _spinner(what: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def _heartbeat(what: str, started: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            _console.print(f"{'...':>6}: {what} ({time.monotonic() - started:.0f} s so far)")

    _console.print(f"{'start':>6}: {what}")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
