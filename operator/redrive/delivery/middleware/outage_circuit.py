"""Circuit of one dependency: begin and end of an outage, held messages and probes. Pure.

closed ─ most fail for one cause ─▶ open ─ a probe succeeds ─▶ closed
                                    └ for too long, or overridden ─▶ ignored ─ a success ─▶ closed
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

from redrive.policy.model import OutageLimits, OutcomeWindow

_FIRST_PAUSE_SECONDS = 1.0
_EARLY_SECONDS = 0.001
"""Time by which a returned message may be early, because clocks are rounded."""

_M = TypeVar("_M")


class Outage(NamedTuple):
    """An outage for which a consumer has paused.

    Attributes:
        cause: common cause of the failures: the class of the exception, or the result of a rule.
        dependency: dependency of these messages by the breaker's rule; otherwise empty.
        since: time at which the consumer paused.
    """

    cause: str
    dependency: str
    since: datetime


class AfterFailure(enum.Enum):
    """Result of a failed attempt."""

    COUNTED = enum.auto()
    """It counts as an attempt."""
    HELD = enum.auto()
    """The message is held, and retried as the same attempt."""
    BEGINS = enum.auto()
    """The message is held, and an outage begins."""


@dataclass
class _OpenOutage(Generic[_M]):
    """An outage.

    Attributes:
        tried: messages that failed in it, by key, the least recently tried first.
        untried: messages that were received since.
        alarms: messages that return when a probe is due, and True if they were tried.
        probing: in-flight probes with their start.
    """

    outage: Outage
    began: float
    next_probe: float
    pause: float = _FIRST_PAUSE_SECONDS
    tried: dict[str, _M] = field(default_factory=dict)
    untried: dict[str, _M] = field(default_factory=dict)
    alarms: dict[str, tuple[_M, bool]] = field(default_factory=dict)
    probing: dict[str, tuple[_M, float]] = field(default_factory=dict)


class Circuit(Generic[_M]):
    """Decides about the messages of one dependency. Times are seconds of the same clock.

    Messages are identified by keys, so copies that the broker redelivers are not held twice.
    """

    def __init__(self, dependency: str, limits: OutageLimits) -> None:
        self._dependency = dependency
        self._limits = limits
        self._window = OutcomeWindow(limits.window)
        self._open: _OpenOutage[_M] | None = None
        self._ignored = False

    @property
    def outage(self) -> Outage | None:
        """Return the current outage; None without one."""
        return None if self._open is None else self._open.outage

    @property
    def held(self) -> int:
        """Return the number of held messages."""
        now = self._open
        return 0 if now is None else len(now.tried) + len(now.untried) + len(now.alarms)

    @property
    def untried(self) -> int:
        """Return the number of held messages that were not handled in this outage."""
        now = self._open
        if now is None:
            return 0
        return len(now.untried) + sum(not tried for _, tried in now.alarms.values())

    @property
    def probing(self) -> bool:
        """True if a probe is in-flight."""
        return self._open is not None and bool(self._open.probing)

    def follow(self, limits: OutageLimits) -> None:
        """Use *limits* from now on."""
        if limits != self._limits:
            self._limits, self._window = limits, OutcomeWindow(limits.window)

    def succeeded(self, key: str) -> bool:
        """Count a success; return True if it ends the outage.

        Only a probe does: other messages that succeed were begun before the outage.
        """
        if self._open is not None:
            return key in self._open.probing
        if self._ignored:
            self._ignored, self._window = False, OutcomeWindow(self._limits.window)
        self._window.add(None)
        return False

    def failed(  # noqa: PLR0913, PLR0917 - all facts of a failure
        self,
        key: str,
        message: _M,
        cause: str,
        first_id: str,
        at: datetime,
        now: float,
        luck: float,
    ) -> AfterFailure:
        """Decide about a message that failed for *cause*.

        Args:
            first_id: identifies a message; the same for all its attempts.
            luck: from 0 to 1, shortens the time until the next probe by up to a half.
        """
        if self._ignored:
            return AfterFailure.COUNTED
        if self._open is None:
            self._window.add((cause, first_id))
            if not self._window.is_outage(cause, self._limits):
                return AfterFailure.COUNTED
            outage = Outage(cause, self._dependency, at)
            self._open = _OpenOutage(outage, now, now + _FIRST_PAUSE_SECONDS, tried={key: message})
            return AfterFailure.BEGINS
        if self._open.probing.pop(key, None) is not None:
            longest = self._limits.max_probe_interval.total_seconds()
            self._open.pause = min(2 * self._open.pause, longest)
            self._open.next_probe = now + self._open.pause * (1 - luck / 2)
        elif cause != self._open.outage.cause:
            return AfterFailure.COUNTED
        self._open.tried[key] = message
        return AfterFailure.HELD

    def settled(self, key: str, now: float) -> None:
        """Count a settlement that is unrelated to the dependency."""
        if self._open is None:
            if not self._ignored:
                self._window.add(None)
        elif self._open.probing.pop(key, None) is not None:
            self._open.next_probe = now + self._open.pause

    def admit(self, key: str, message: _M, now: float) -> _M | None:
        """Return the message to handle after *message* was received; None for none.

        Other messages are held.
        """
        here = self._open
        if here is None:
            return message
        if key in here.probing:
            return message if here.probing[key][0] is message else None  # it was returned
        alarm = here.alarms.get(key)
        if alarm is None or alarm[0] is not message:
            if alarm is None and key not in here.tried:
                here.untried.setdefault(key, message)
            return None
        del here.alarms[key]
        (here.tried if alarm[1] else here.untried)[key] = message
        if now < here.next_probe - _EARLY_SECONDS:
            return None
        queue = here.untried or here.tried
        probe = next(iter(queue))
        here.probing[probe] = queue.pop(probe), now
        return here.probing[probe][0]

    def next_alarm(self, now: float) -> tuple[_M, float] | None:
        """Return a message to return later, and the delay in seconds; None for none.

        With an in-flight probe there is none, unless it takes longer than the probe interval.
        """
        here = self._open
        if here is None or here.alarms:
            return None
        longest = self._limits.max_probe_interval.total_seconds()
        if any(now - since < longest for _, since in here.probing.values()):
            return None
        queue = here.tried or here.untried
        if not queue:
            return None
        key = next(iter(queue))
        message = queue.pop(key)
        here.alarms[key] = message, queue is here.tried
        return message, max(0.0, here.next_probe - now)

    def is_overdue(self, now: float) -> bool:
        """Return True if the outage has lasted longer than a consumer may pause."""
        return (
            self._open is not None
            and now - self._open.began >= self._limits.max_pause.total_seconds()
        )

    def end(self, *, ignored: bool) -> list[_M]:
        """End the outage, and return the held messages; those with an alarm return by it.

        Args:
            ignored: True if the outage continues, and is ignored until a message succeeds.
        """
        here, self._open = self._open, None
        self._ignored = ignored
        self._window = OutcomeWindow(self._limits.window)
        return [] if here is None else [*here.tried.values(), *here.untried.values()]
