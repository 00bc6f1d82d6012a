"""How often one broker is asked, by all who ask: connections that lead to it share a `Pace`.

Used by `rounds` and by the reader of statistics.
"""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class Pace:
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


class Paces:
    """A `Pace` for each broker, for as long as somebody holds it."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._paces = WeakValueDictionary[str | None, Pace]()

    def of(self, broker: str | None) -> Pace:
        """Return what all share who ask *broker*, as `connections.broker_of` names it."""
        return self._paces.setdefault(broker, Pace(self._between))
