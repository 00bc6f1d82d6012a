"""Waiting for a state."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], seconds: float = 180.0, every: float = 0.1) -> None:
    """Wait until *holds*, called *every* so many seconds, returns True; fail after a long time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(every)
