"""Durations without the time in which this process was suspended by the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK = 0.1


@contextmanager
def awake_time() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds since then; a pause of this process adds one tick.

    On a busy machine the result is shorter than the time of a clock, never longer.
    """
    ended, ticks = threading.Event(), 0

    def count() -> None:
        nonlocal ticks
        while not ended.wait(_TICK):
            ticks += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield lambda: ticks * _TICK
    finally:
        ended.set()
        thread.join()
