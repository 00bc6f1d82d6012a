"""Drift: what somebody changes at a broker is found by looking at every policy again, in turn.

A broker tells nobody of a change, and for subscriptions, partitions and topic policies it has no
call for many topics at once below the super-user. So the rounds have a pace: the more policies,
the longer a round. What a look finds amiss is repaired as on any other look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redrive.cluster.resources import Key
from redrive.cluster.table import Table

ROUND_SECONDS = 30.0
"""How long a round takes, unless that were too fast for the broker."""
CALLS_PER_SECOND = 20.0
CALLS_PER_LOOK = 16
"""How many calls to the broker a look takes at most where nothing is amiss."""


class Rounds:
    """Wakes one policy after the other, for ever; must be made in a running event loop.

    Args:
        wake: has a policy looked at.
    """

    def __init__(self, policies: Table, wake: Callable[[Key], None]) -> None:
        self._policies = policies
        self._wake = wake
        self._task = asyncio.create_task(self._walk(), name="rounds")

    async def stop(self) -> None:
        """End the rounds."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _walk(self) -> None:
        while True:
            keys = [Key.of(body) for body in self._policies]
            if not keys:
                await asyncio.sleep(ROUND_SECONDS)
            for key in keys:
                await asyncio.sleep(pause(len(keys)))
                self._wake(key)


def pause(policies: int) -> float:
    """Return the seconds between the looks at two policies, of so many."""
    return max(ROUND_SECONDS / policies, CALLS_PER_LOOK / CALLS_PER_SECOND)
