"""Retry number → delay.

A ladder is the list of delays before retry 1, 2, 3 …; past its last rung the last rung repeats.
Apart from it there are delay *levels*, a ladder too: rung k is what a caller means by `level=k`.
Both tables come from RocketMQ and its descendants, where level increment and delay levels share
one list of 18 words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from types import MappingProxyType

from redrive.errors import InvalidSpecError
from redrive.policy.values import Converted, parse_duration, to_timedelta

MIN_DELAY = timedelta(seconds=1)
MAX_DELAY = timedelta(seconds=864_000)
MAX_RUNGS = 1_000

LEVELS: tuple[timedelta, ...] = tuple(
    map(parse_duration, "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h".split())
)
"""The 18 delay levels that hold where a policy defines none."""

MAX_LEVELS = 100
MIN_FACTOR, MAX_FACTOR = 1.1, 100.0
"""How much an exponential ladder may grow from rung to rung: slower growth takes too many rungs."""


def check_delay(delay: float | timedelta, what: str) -> timedelta:
    """Return *delay* if a broker can be asked for it, from 1 s to 864 000 s (10 days).

    Raises:
        InvalidSpecError: it is shorter or longer, or no duration; *what* names the delay in the
            message.
    """
    delay = to_timedelta(delay, what)
    if not MIN_DELAY <= delay <= MAX_DELAY:
        raise InvalidSpecError(
            f"{what} must be from 1 s to 864000 s (10 days)",
            got=f"{delay.total_seconds():g} s",
            remedy="choose a delay within these bounds",
        )
    return delay


def _rungs(rungs: Sequence[float | timedelta]) -> tuple[timedelta, ...]:
    if isinstance(rungs, str) or not isinstance(rungs, Sequence):
        raise InvalidSpecError(
            "the rungs of a delay ladder are a list",
            got=rungs,
            remedy="give a list of seconds or timedeltas, or use Ladder.from_delays for text",
        )
    return tuple(
        check_delay(rung, f"rung {number} of the delay ladder")
        for number, rung in enumerate(rungs, start=1)
    )


@dataclass(frozen=True)
class Ladder:
    """The delays before retry 1, 2, 3 …, each from 1 s to 864 000 s, 1 to 1 000 of them.

    Attributes:
        jitter: up to which share of itself, from 0 to 1, a delay is shortened at random, so that
            messages which failed together do not come again together.

    Raises:
        InvalidSpecError: no rung, too many, or one or the jitter out of bounds.
    """

    rungs: Converted[Sequence[float | timedelta], tuple[timedelta, ...]] = Converted(_rungs)
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no consumer could follow."""
        if not 1 <= len(self.rungs) <= MAX_RUNGS:
            raise InvalidSpecError(
                f"a delay ladder has from 1 to {MAX_RUNGS} rungs",
                got=len(self.rungs),
                remedy="list at least one delay, or name a preset",
            )
        if not isinstance(self.jitter, (int, float)) or not 0 <= self.jitter <= 1:
            raise InvalidSpecError(
                "the jitter of a delay ladder is a share from 0 to 1",
                got=self.jitter,
                remedy="choose one within these bounds; 0.5 shortens delays by up to a half",
            )

    @classmethod
    def from_preset(cls, name: str) -> Ladder:
        """Take one of `PRESETS` by name."""
        if name not in PRESETS:
            raise InvalidSpecError(
                "the delay ladder names an unknown preset",
                got=name[:64],
                remedy=f"use one of {', '.join(PRESETS)}",
            )
        return cls(PRESETS[name])

    @classmethod
    def from_delays(cls, delays: Sequence[str], jitter: float = 0.0) -> Ladder:
        """Take the rungs as written in a manifest."""
        return cls(tuple(map(parse_duration, delays)), jitter)

    @classmethod
    def from_fixed(cls, delay: str) -> Ladder:
        """Wait the same time before every retry."""
        return cls.from_delays([delay])

    @classmethod
    def from_exponential(
        cls, initial: str, factor: float, longest: str, jitter: float = 0.0
    ) -> Ladder:
        """Wait *initial* at first, then *factor* times as long each time, until it is *longest*.

        Raises:
            InvalidSpecError: the factor is not from 1.1 to 100, or a delay is out of bounds.
        """
        first = check_delay(parse_duration(initial), "the initial delay")
        last = check_delay(parse_duration(longest), "the longest delay")
        if not MIN_FACTOR <= factor <= MAX_FACTOR:
            raise InvalidSpecError(
                f"the factor of an exponential ladder is from {MIN_FACTOR:g} to {MAX_FACTOR:g}",
                got=factor,
                remedy="choose one within these bounds; 2 doubles the delay each time",
            )
        if last < first:
            raise InvalidSpecError(
                "the longest delay of an exponential ladder is shorter than its first",
                got=f"initial {initial}, max {longest}",
                remedy="raise max, or lower initial",
            )
        rungs = [first]
        while rungs[-1] < last:
            grown = round(first.total_seconds() * factor ** len(rungs))
            rungs.append(min(timedelta(seconds=grown), last))
        return cls(tuple(rungs), jitter)

    @property
    def descends(self) -> bool:
        """Whether some retry waits a shorter time than the one before it: legal, rarely meant."""
        return any(later < earlier for earlier, later in pairwise(self.rungs))

    def delay(self, retry: int, luck: float = 0.0) -> timedelta:
        """Return the time to wait before retry number *retry*, which counts from 1.

        Args:
            luck: drawn for each delay, from 0 (the whole delay) to 1 (as short as the jitter
                lets it be, but never below 1 s).
        """
        if retry < 1:
            msg = f"retries count from 1, got {retry}: a bug in redrive, please report it"
            raise ValueError(msg)
        rung = self.rungs[min(retry, len(self.rungs)) - 1]
        return max(MIN_DELAY, rung * (1 - self.jitter * luck))


PRESETS: Mapping[str, tuple[timedelta, ...]] = MappingProxyType(
    {
        # TDMQ for Pulsar: level increment begins at level 1.
        "TDMQ": LEVELS,
        # RocketMQ: level 0 means level 3 + reconsume times, clamped to the highest.
        "RocketMQ": LEVELS[2:],
        # ApsaraMQ: 16 rungs, 2 h for every further retry.
        "ApsaraMQ": LEVELS[2:],
    }
)
DEFAULT_PRESET = "TDMQ"


DEFAULT_LEVELS = Ladder(LEVELS)
