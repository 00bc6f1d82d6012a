"""Spaces the work of a consumer evenly over time; called by `run`."""

from __future__ import annotations

import threading

from redrive.errors import InvalidSpecError


class Pace:
    """Lets at most *rate* messages begin per second, whatever came before: no credit is saved up.

    May be used by several threads.

    Args:
        rate: None for as many as come.

    Raises:
        InvalidSpecError: *rate* is not positive.
    """

    def __init__(self, rate: float | None) -> None:
        if rate is not None and rate <= 0:
            raise InvalidSpecError(
                "max_rate is a positive number of messages per second",
                got=rate,
                remedy="use pause() to handle nothing for a while",
            )
        self._each = 0.0 if rate is None else 1 / rate
        self._free = float("-inf")
        self._booking = threading.Lock()

    def wait(self, count: int, now: float) -> float:
        """Book *count* messages at the moment *now*; return how many seconds to wait for them."""
        with self._booking:
            begin = max(now, self._free)
            self._free = begin + count * self._each
        return begin - now
