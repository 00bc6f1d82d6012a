"""Does something at moments that change; called by `simple` and `holding`."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Rings(Protocol):
    """Calls when the next message is out of time; `Alarm` does."""

    def look(self) -> None:
        """Look again when that is."""

    def close(self) -> None:
        """End."""


class Alarm:
    """Calls *ring*, in a thread of its own, whenever the moment has come that *next_due* tells.

    Args:
        next_due: returns a moment of `time.monotonic`, or None for no call.
        ring: raises nothing.
    """

    def __init__(self, next_due: Callable[[], float | None], ring: Callable[[], None]) -> None:
        self._next_due = next_due
        self._ring = ring
        self._closing = False
        self._look = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redrive-alarm", daemon=True)
        self._thread.start()
        # A thread that is inside the client when the interpreter goes away aborts the process.
        atexit.register(self.close)

    def look(self) -> None:
        """Ask *next_due* again: the moment has changed."""
        self._look.set()

    def close(self) -> None:
        """Ring no more; a call that has begun is waited for."""
        atexit.unregister(self.close)
        self._closing = True
        self._look.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing:
            due = self._next_due()
            wait = None if due is None else due - time.monotonic()
            if wait is None or wait > 0:
                self._look.wait(wait)
                self._look.clear()
                continue
            self._ring()
