"""How fast one task sends, by the clock of whoever asks. Pure."""

from __future__ import annotations

CATCH_UP_SECONDS = 1.0
"""So much of a delay is made up for: what the broker took longer for, or the sleep itself."""


class Pace:
    """Spreads messages over time.

    From the first one on no more are sent than the rate gives.
    """

    def __init__(self) -> None:
        self._due: float | None = None

    def due_in(self, now: float, rate: float | None) -> float:
        """Return in how many seconds the next message may be sent; 0 for now.

        Args:
            now: in seconds, of a clock that never goes back.
            rate: messages a second; None for no limit.
        """
        if rate is None or self._due is None:
            return 0.0
        # A rate that has risen ends a wait that was reckoned by the old one.
        return max(0.0, min(self._due - now, 1 / rate))

    def sent(self, now: float, rate: float | None) -> None:
        """Take note that a message is sent."""
        if rate is not None:
            begin = now if self._due is None else max(self._due, now - CATCH_UP_SECONDS)
            self._due = begin + 1 / rate
