"""Ends calls of the client that take too long; called by `producers` and `sends`.

The client waits for ever in a send while it connects again and again, as it does when the broker
refuses a delay for being too long. Only closing the producer ends that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_LOOK_EVERY_SECONDS = 1.0


class SendWatchdog:
    """Gives up what takes longer than so many *seconds*; looked at by a thread of its own.

    The calls themselves stay in the threads that make them: to hand each to another thread and back
    would cost more than all else that a retry does here.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: dict[object, tuple[float, Callable[[], None]]] = {}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @contextlib.contextmanager
    def during(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Call *give_up*, which must not raise, if what is done inside takes too long."""
        if self._thread is None:
            self._start()
        call = object()
        self._calls[call] = (time.monotonic() + self._seconds, give_up)
        try:
            yield
        finally:
            self._calls.pop(call, None)

    def close(self) -> None:
        """End the thread; for those who make no more calls."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="redrive-send-watchdog", daemon=True
                )
                self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_SECONDS):
            # A copy, made in one step: calls begin and end meanwhile.
            for call, (end, give_up) in list(self._calls.items()):
                if time.monotonic() > end and self._calls.pop(call, None) is not None:
                    give_up()
