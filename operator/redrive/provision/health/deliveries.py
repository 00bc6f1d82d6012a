"""How many of a subscription's deliveries were retries lately: a sliding window; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

WINDOW_SECONDS = 600.0


@dataclass(frozen=True)
class _Step:
    """What was delivered between two looks.

    Attributes:
        at: the moment of the later look.
    """

    at: float
    first: int
    retries: int


@dataclass(frozen=True)
class Deliveries:
    """What was delivered in the last ten minutes, by counters that a broker sets back at times.

    Made by the first look, it has counted nothing yet. It keeps one value for each look within the
    window.

    Attributes:
        since: the moment of the first look, in the seconds of any clock that never goes back.
        now: the moment of the last look.
        source: the counter of the source topic's subscription at the last look; None where that
            does not exist.
        retry: that of the retry topic's.
    """

    since: float
    now: float
    source: int | None
    retry: int | None
    _steps: tuple[_Step, ...] = ()

    @classmethod
    def begin(cls, now: float, source: int | None, retry: int | None) -> Deliveries:
        """Take note of the counters as they are at the first look."""
        return cls(now, now, source, retry)

    def seen(self, now: float, source: int | None, retry: int | None) -> Deliveries:
        """Return the window after another look."""
        step = _Step(now, _since(self.source, source), _since(self.retry, retry))
        steps = (kept for kept in self._steps if kept.at > now - WINDOW_SECONDS)
        return replace(self, now=now, source=source, retry=retry, _steps=(*steps, step))

    @property
    def first(self) -> int:
        """Return how many messages were delivered from the source topic."""
        return sum(step.first for step in self._steps)

    @property
    def retries(self) -> int:
        """Return how many messages were delivered from the retry topic."""
        return sum(step.retries for step in self._steps)

    @property
    def last(self) -> tuple[int, int]:
        """Return first deliveries and retries since the look before the last."""
        return (self._steps[-1].first, self._steps[-1].retries) if self._steps else (0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether the looks go back for as long as the window."""
        return self.now - self.since >= WINDOW_SECONDS


def _since(before: int | None, now: int | None) -> int:
    """Return by how much a counter has grown.

    One that fell was set back, maybe for a single partition of many: what it grew by is not known,
    and to guess it from what is left could make a storm of nothing.
    """
    if before is None or now is None or now < before:
        return 0
    return now - before
