"""Retry delays: the back-off before each retry.

A ladder lists the delays before retry 1, 2, 3 …; its last rung repeats. Delay *levels* are a second
ladder: rung k is the delay of `level=k`. Both tables come from RocketMQ and its descendants, where
level increment and delay levels share one list of 18 values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import MappingProxyType

from redrive.errors import InvalidSpecError
from redrive.policy.values import (
    Converted,
    check_instance,
    parse_duration,
    reads_directly,
    to_timedelta,
)

MIN_DELAY = timedelta(seconds=1)
MAX_DELAY = timedelta(seconds=864_000)
MAX_RUNGS = 1_000

LEVELS: tuple[timedelta, ...] = tuple(
    map(parse_duration, "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h".split())
)
"""The 18 default delay levels."""

MAX_LEVELS = 100
MIN_FACTOR, MAX_FACTOR = 1.1, 100.0
"""Growth of an exponential ladder from rung to rung; slower growth would need too many rungs."""


def check_delay(delay: float | timedelta, name: str) -> timedelta:
    """Return *delay* as a timedelta if it is from 1 s to 864 000 s (10 days).

    Raises:
        InvalidSpecError: it is out of these bounds, or not a duration. The message contains *name*.
    """
    delay = to_timedelta(delay, name)
    if not MIN_DELAY <= delay <= MAX_DELAY:
        raise InvalidSpecError(
            f"{name} must be from 1 s to 864000 s (10 days)",
            got=f"{delay.total_seconds():g} s",
            remedy="choose a delay within these bounds",
        )
    return delay


def _check_list(rungs: object, remedy: str) -> None:
    if isinstance(rungs, str) or not isinstance(rungs, Sequence):
        raise InvalidSpecError(
            "the rungs of a delay ladder must be a list", got=rungs, remedy=remedy
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rungs(rungs: Sequence[float | timedelta]) -> tuple[timedelta, ...]:
    _check_list(rungs, "pass a list of seconds or timedeltas, or use Ladder.from_delays for text")
    return tuple(
        check_delay(rung, f"rung {number} of the delay ladder")
        for number, rung in enumerate(rungs, start=1)
    )


@reads_directly
@dataclass(frozen=True)
class Ladder:
    """The delays before retry 1, 2, 3 …: 1 to 1 000 rungs, each from 1 s to 864 000 s.

    Attributes:
        jitter: maximum share of a delay, from 0 to 1, by which it is shortened at random. Messages
            that failed together then do not return together.

    Raises:
        InvalidSpecError: there is no rung, or too many; or a rung or the jitter is out of bounds.
    """

    rungs: Converted[Sequence[float | timedelta], tuple[timedelta, ...]] = Converted(_rungs)
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Validate the number of rungs and the jitter."""
        if not 1 <= len(self.rungs) <= MAX_RUNGS:
            raise InvalidSpecError(
                f"a delay ladder must have from 1 to {MAX_RUNGS} rungs",
                got=len(self.rungs),
                remedy="list at least one delay, or name a preset",
            )
        if not _is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise InvalidSpecError(
                "the jitter of a delay ladder must be from 0 to 1",
                got=self.jitter,
                remedy="choose a value within these bounds; 0.5 shortens delays by up to a half",
            )

    @classmethod
    def from_preset(cls, name: str) -> Ladder:
        """Return one of `PRESETS`."""
        check_instance(name, str, "the preset of a delay ladder")
        if name not in PRESETS:
            raise InvalidSpecError(
                "the delay ladder has an unknown preset",
                got=name[:64],
                remedy=f"use one of {', '.join(PRESETS)}",
            )
        return cls(PRESETS[name])

    @classmethod
    def from_delays(cls, delays: Sequence[str], jitter: float = 0.0) -> Ladder:
        """Return a ladder of *delays* in the form of a manifest."""
        _check_list(delays, 'pass a list such as ["10s", "1m"]')
        return cls(tuple(map(parse_duration, delays)), jitter)

    @classmethod
    def from_fixed(cls, delay: str) -> Ladder:
        """Return a ladder with one delay for every retry."""
        return cls.from_delays([delay])

    @classmethod
    def from_exponential(
        cls, initial: str, factor: float, longest: str, jitter: float = 0.0
    ) -> Ladder:
        """Return a ladder that starts with *initial* and grows by *factor* up to *longest*.

        Raises:
            InvalidSpecError: the factor is not from 1.1 to 100, or a delay is out of bounds.
        """
        first = check_delay(parse_duration(initial), "the initial delay")
        last = check_delay(parse_duration(longest), "the longest delay")
        if not _is_number(factor) or not MIN_FACTOR <= factor <= MAX_FACTOR:
            raise InvalidSpecError(
                f"the factor of an exponential ladder must be from {MIN_FACTOR:g} to "
                f"{MAX_FACTOR:g}",
                got=factor,
                remedy="choose a value within these bounds; 2 doubles the delay each time",
            )
        if last < first:
            raise InvalidSpecError(
                "the longest delay of an exponential ladder must not be shorter than its first",
                got=f"initial {initial}, max {longest}",
                remedy="increase max, or reduce initial",
            )
        rungs = [first]
        while rungs[-1] < last:
            grown = round(first.total_seconds() * factor ** len(rungs))
            rungs.append(min(timedelta(seconds=grown), last))
        return cls(tuple(rungs), jitter)

    @property
    def descends(self) -> bool:
        """Return True if a retry has a shorter delay than the one before it."""
        return any(later < earlier for earlier, later in pairwise(self.rungs))

    def delay(self, retry: int, luck: float = 0.0) -> timedelta:
        """Return the delay before retry number *retry*, which counts from 1.

        Args:
            luck: random number for each delay, from 0 (the whole delay) to 1 (shortened by the
                whole jitter, but never below 1 s).
        """
        if retry < 1:
            msg = f"retries count from 1, got {retry}: a bug in redrive, please report it"
            raise ValueError(msg)
        rung = self.rungs[min(retry, len(self.rungs)) - 1]
        return max(MIN_DELAY, rung * (1 - self.jitter * luck))


PRESETS: Mapping[str, tuple[timedelta, ...]] = MappingProxyType(
    {
        # TDMQ for Pulsar: level increment starts at level 1.
        "TDMQ": LEVELS,
        # RocketMQ: level 0 means level 3 + reconsume times, limited to the highest.
        "RocketMQ": LEVELS[2:],
        # ApsaraMQ: 16 rungs, and 2 h for every further retry.
        "ApsaraMQ": LEVELS[2:],
    }
)
DEFAULT_PRESET = "TDMQ"


DEFAULT_LEVELS = Ladder(LEVELS)
