"""An event for signal handlers; called by `fetcher`."""

from __future__ import annotations

from queue import Empty, SimpleQueue


class SignalSafeEvent:
    """Starts unset and is set once, for good.

    Unlike `threading.Event`, a signal handler may set it at any moment, even while the thread
    that it interrupts is inside one of these methods.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Let all threads through that wait, or will."""
        self._tokens.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False if it is not after *timeout* seconds."""
        try:
            self._tokens.get(timeout=timeout)
        except Empty:
            return False
        self._tokens.put(None)  # for the next that waits
        return True
