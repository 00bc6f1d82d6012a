"""Call a function at moments that change; used by `simple` and `ack_timeouts`."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

from redrive.delivery.forking import OwnerProcess


class Timer:
    """Calls *fire*, in a thread of its own, whenever the moment has come that *next_due* tells.

    Args:
        next_due: returns a moment of `time.monotonic`, or None for no call.
        fire: raises nothing.
    """

    def __init__(self, next_due: Callable[[], float | None], fire: Callable[[], None]) -> None:
        self._next_due = next_due
        self._fire = fire
        self._closing = False
        self._owner = OwnerProcess("timer")
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redrive-timer", daemon=True)
        self._thread.start()
        # A thread that is inside the client when the interpreter goes away aborts the process.
        atexit.register(self.close)

    def look(self) -> None:
        """Ask *next_due* again: the moment has changed."""
        self._changed.set()

    def close(self) -> None:
        """Fire no more; a call that has begun is waited for."""
        atexit.unregister(self.close)
        if self._owner.is_parent:  # whose thread may have had the lock of the event
            return
        self._closing = True
        self._changed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closing:
            due = self._next_due()
            wait = None if due is None else due - time.monotonic()
            if wait is None or wait > 0:
                self._changed.wait(wait)
                self._changed.clear()
                continue
            self._fire()
