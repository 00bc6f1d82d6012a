"""Ends calls of the client that take too long; called by `sends`.

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
    """Gives up calls that take too long; looked at by a thread of its own.

    The calls themselves stay in the threads that make them: to hand each to another thread and back
    would cost more than all else that a retry does here.
    """

    def __init__(self) -> None:
        self._calls: dict[object, tuple[float, Callable[[], None]]] = {}
        self._next_look = 0.0
        self._sooner = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @contextlib.contextmanager
    def during(self, seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
        """Call *give_up*, which must not raise, if the block takes longer than *seconds*."""
        if self._thread is None:
            self._start()
        call, end = object(), time.monotonic() + seconds
        self._calls[call] = end, give_up
        if end < self._next_look:  # seldom: most calls have a second, within which it looks anyway
            self._sooner.set()
        try:
            yield
        finally:
            self._calls.pop(call, None)

    def close(self) -> None:
        """End the thread; for those who make no more calls."""
        self._closed = True
        self._sooner.set()
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
        while True:
            self._sooner.clear()
            if self._closed:
                return
            now = time.monotonic()
            # First: a call that begins meanwhile, and ends before that, sets `_sooner`.
            self._next_look = now + _LOOK_EVERY_SECONDS
            # A copy, made in one step: calls begin and end meanwhile.
            for call, (end, give_up) in list(self._calls.items()):
                if end > now:
                    self._next_look = min(self._next_look, end)
                elif self._calls.pop(call, None) is not None:
                    give_up()
            self._sooner.wait(max(0.0, self._next_look - now))
