"""How often one broker is called: connections that lead to it share a `RateLimit`.

Used by `resync` and by the reader of statistics.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class RateLimit:
    """Gives turns in the order in which they are asked for, *between* seconds apart."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._free = 0.0

    async def turn(self) -> None:
        """Wait for one."""
        now = asyncio.get_running_loop().time()
        begin = max(self._free, now)
        self._free = begin + self._between
        await asyncio.sleep(begin - now)


class RateLimits:
    """A `RateLimit` for each broker, for as long as it is in use."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._paces = WeakValueDictionary[str | None, RateLimit]()

    def of(self, broker: str | None) -> RateLimit:
        """Return the one for all calls to *broker*, as `connections.broker_of` names it."""
        return self._paces.setdefault(broker, RateLimit(self._between))
