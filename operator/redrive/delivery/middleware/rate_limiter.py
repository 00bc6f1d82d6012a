"""Spaces the work of a consumer evenly over time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pulsar

from redrive.delivery.middleware.chain import Middleware, Take
from redrive.delivery.parts import Clock
from redrive.errors import InvalidSpecError


class RateLimiter(Middleware):
    """Lets at most *rate* messages begin per second, whatever came before: no credit is saved up.

    May be used by several threads, which take their turns.

    Args:
        rate: None for as many as come.
        sleep: waits, or raises what ends the waiting.

    Raises:
        InvalidSpecError: *rate* is not positive.
    """

    def __init__(self, rate: float | None, clock: Clock, sleep: Callable[[float], None]) -> None:
        if rate is not None and not rate > 0:  # nor what is no number
            raise InvalidSpecError(
                "max_rate is a positive number of messages per second",
                got=rate,
                remedy="use pause() to handle nothing for a while",
            )
        self._each = None if rate is None else 1 / rate
        self._clock = clock
        self._sleep = sleep
        self._free = float("-inf")
        self._turn = threading.Lock()

    def take(self, take: Take) -> Take:
        """Take no messages before it is time for them.

        The waiting is done before: of what has been taken, the time to settle it may be running.
        """
        each = self._each
        if each is None:
            return take

        def take_in_time() -> list[pulsar.Message]:
            with self._turn:
                seconds = self._free - self._clock.monotonic()
                if seconds > 0:
                    self._sleep(seconds)
                messages = take()
                self._free = self._clock.monotonic() + len(messages) * each
            return messages

        return take_in_time
