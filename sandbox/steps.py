"""Shows the current step of a long set-up on standard error.

Called by all modules that fetch, build or start a component, one step at a time. On a terminal a
step is a spinner with its time. Elsewhere, as in a CI log, it is a line at the start, every 30 s
and at the end.
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
def step(title: str) -> Iterator[None]:
    """Show *title*, such as ``start Pulsar``, as running until the block ends, then its seconds."""
    started = time.monotonic()
    outcome = "failed"
    try:
        with _spinner(title) if _console.is_terminal else _heartbeat(title, started):
            yield
        outcome = "done"
    finally:
        _console.print(f"{outcome:>6}: {title} ({time.monotonic() - started:.1f} s)")


@contextmanager
def _spinner(title: str) -> Iterator[None]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_console, transient=True) as progress:
        progress.add_task(title, total=None)
        yield


@contextmanager
def _heartbeat(title: str, started: float) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            _console.print(f"{'...':>6}: {title} ({time.monotonic() - started:.0f} s so far)")

    _console.print(f"{'start':>6}: {title}")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
