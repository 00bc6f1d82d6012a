"""Waiting for a state."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator

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
