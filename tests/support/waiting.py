"""Waiting for a state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


def pauses(seconds: float, first: float = 0.1, longest: float = 0.5) -> Iterator[None]:
    """Pause before each further check of a lasting state, longer each time: a check costs a call.

    Ends after so many *seconds*.
    """
    deadline, pause = time.monotonic() + seconds, first
    while time.monotonic() < deadline:
        yield
        time.sleep(pause)
        pause = min(pause * 1.25, longest)

LONGEST_PAUSE = 1.0


def wait_until(holds: Callable[[], object], seconds: float = 180.0, every: float = 0.1) -> None:
    """Wait until *holds* returns True; fail after a long time.

    Args:
        every: the first pause between two calls; each is a tenth longer than the one before.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(every)
        every = max(every, min(1.1 * every, LONGEST_PAUSE))
