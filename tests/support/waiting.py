"""Waiting for a state that comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], object], seconds: float = 180.0) -> None:
    """Wait until it *holds*; fail if it does not in time, which is to end a hopeless wait alone."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)
