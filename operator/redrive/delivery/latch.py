"""An event for signal handlers; called by `inbox` and `run`."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class Latch:
    """Starts closed and opens once, for good.

    Unlike `threading.Event`, a signal handler may open it at any moment, even while the thread
    that it interrupts is inside one of these methods.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def open(self) -> None:
        """Let everybody through who waits, or will."""
        self._tokens.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open; False if it is not after *timeout* seconds."""
        try:
            self._tokens.get(timeout=timeout)
        except Empty:
            return False
        self._tokens.put(None)  # for the next who waits
        return True
