"""How fast a run is, and how long it still takes. Pure: the time is an argument."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

WINDOW_SECONDS = 30.0
"""Over so long a rate is measured."""
MIN_SECONDS = 1.0


class Speed:
    """Measures the rate of a run from its last accounts."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, int]] = deque()

    def note(self, now: float, moved: int) -> None:
        """Take note of how far the run is.

        Args:
            now: in seconds, of a clock that never goes back.
            moved: how many messages are moved, by earlier attempts too.
        """
        self._noted.append((now, moved))
        while len(self._noted) > 1 and self._noted[1][0] <= now - WINDOW_SECONDS:
            self._noted.popleft()

    def restart(self) -> None:
        """Forget all: the run has rested."""
        self._noted.clear()

    @property
    def rate(self) -> float | None:
        """Return how many messages are moved in a second; None while that is not known."""
        if not self._noted:
            return None
        (begin, before), (end, after) = self._noted[0], self._noted[-1]
        if end - begin < MIN_SECONDS:
            return None
        return max(0.0, (after - before) / (end - begin))

    def remaining(self, left: int) -> timedelta | None:
        """Return how long it takes to move *left* messages; None while that is not known."""
        return timedelta(seconds=round(left / self.rate)) if self.rate else None
