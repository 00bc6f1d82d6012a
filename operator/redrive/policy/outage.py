"""When failures count as an outage of what handlers depend on: limits, and the window of outcomes.

One message that fails is retried. When most fail for one cause, retries are of no use: the consumer
pauses instead, and probes. `delivery.middleware.outage_breaker` does that; pure.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from dataclasses import dataclass
from datetime import timedelta

from redrive.errors import InvalidSpecError
from redrive.policy import durations
from redrive.policy.converted import Converted

BEACON = "redrive.outage"
"""What the broker's statistics show of a consumer that has paused: a producer on the retry topic
with this in its metadata, and the cause as the value."""

MAX_WINDOW = 10_000
MIN_INTERVAL = timedelta(seconds=1)
MAX_INTERVAL = timedelta(hours=1)
MAX_PAUSE = timedelta(days=7)


@dataclass(frozen=True)
class OutageLimits:
    """When a consumer pauses because what its handler depends on is down, and for how long.

    Attributes:
        min_messages: so many different messages have failed for the cause, 1 … `window`.
        failure_percent: and so many of a hundred outcomes in the window are failures for it.
        window: of so many outcomes, the latest of this consumer, 1 … 10 000.
        max_probe_interval: one message is tried after 1 s, then with back-off, and at least this
            often: 1 s … 1 h, in seconds or as a timedelta.
        max_pause: after this a consumer goes on as if there were no outage, until a message
            succeeds: 1 s … 7 days, in seconds or as a timedelta.

    Raises:
        InvalidSpecError: one of them is out of bounds.
    """

    min_messages: int = 10
    failure_percent: int = 50
    window: int = 100
    max_probe_interval: Converted[float | timedelta, timedelta] = Converted(
        functools.partial(durations.given, what="maxProbeInterval of an outage breaker"),
        timedelta(seconds=30),
    )
    max_pause: Converted[float | timedelta, timedelta] = Converted(
        functools.partial(durations.given, what="maxPause of an outage breaker"),
        timedelta(hours=6),
    )

    def __post_init__(self) -> None:
        """Refuse what no consumer could follow."""
        _check("window", self.window, 1, MAX_WINDOW)
        _check("minMessages", self.min_messages, 1, self.window)
        _check("failurePercent", self.failure_percent, 1, 100)
        _check("maxProbeInterval", self.max_probe_interval, MIN_INTERVAL, MAX_INTERVAL)
        _check("maxPause", self.max_pause, MIN_INTERVAL, MAX_PAUSE)


def _check(name: str, value: int | timedelta, least: object, most: object) -> None:
    if not least <= value <= most:  # type: ignore[operator]  # each is of one type
        raise InvalidSpecError(
            f"{name} of an outage breaker is from {least} to {most}",
            got=str(value),
            remedy="choose a value within these bounds, or leave it out",
        )


class OutcomeWindow:
    """The latest outcomes of a consumer: for which cause a message failed, or none.

    Args:
        size: how many are remembered.
    """

    def __init__(self, size: int) -> None:
        self._outcomes: deque[tuple[str, str] | None] = deque(maxlen=size)
        # By cause, how often each message has failed for it, as far as the window goes back.
        self._failures: dict[str, Counter[str]] = {}

    def add(self, failure: tuple[str, str] | None) -> None:
        """Note one outcome: the cause and the first id of a message that failed for it."""
        if len(self._outcomes) == self._outcomes.maxlen:
            self._forget(self._outcomes[0])
        self._outcomes.append(failure)
        if failure is not None:
            cause, first_id = failure
            self._failures.setdefault(cause, Counter())[first_id] += 1

    def is_outage(self, cause: str, limits: OutageLimits) -> bool:
        """Whether so many messages have failed for *cause* that single ones are not to blame.

        One message that fails again and again is one message.
        """
        failures = self._failures.get(cause, Counter())
        share = failures.total() * 100 >= limits.failure_percent * len(self._outcomes)
        return share and len(failures) >= limits.min_messages

    def _forget(self, failure: tuple[str, str] | None) -> None:
        if failure is None:
            return
        cause, first_id = failure
        failures = self._failures[cause]
        failures[first_id] -= 1
        if not failures[first_id]:
            del failures[first_id]
        if not failures:
            del self._failures[cause]
