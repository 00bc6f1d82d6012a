"""Waiting for a state, and durations without the time in which this process was suspended."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_PAUSE = 1.0


def pauses(seconds: float = 180.0, first: float = 0.1) -> Iterator[None]:
    """Pause after each check of a state, a tenth longer each time, until the time is over.

    Args:
        seconds: the time.
        first: the first pause.
    """
    deadline, pause = time.monotonic() + seconds, first
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause)
        pause = max(pause, min(1.1 * pause, LONGEST_PAUSE))


def wait_until(holds: Callable[[], object], seconds: float = 180.0, every: float = 0.1) -> None:
    """Wait until *holds* returns True; fail after a long time, and show what all threads do.

    Args:
        every: the first pause between two calls; each is a tenth longer than the one before.
    """
    for _ in pauses(seconds, every):
        if holds():
            return
    faulthandler.dump_traceback()
    raise AssertionError(f"not within {seconds:g} s")


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
