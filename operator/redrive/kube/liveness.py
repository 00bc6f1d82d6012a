"""Liveness: heartbeats of the operator's parts, and whether one of them has stalled.

The event loop and every watch send a heartbeat in each of their rounds. The command's endpoint
reads them from a thread of its own, so that it answers while the event loop hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

STALL_SECONDS = 60.0
"""A part without a heartbeat for longer has stalled."""
BEAT_SECONDS = 5.0
EVENT_LOOP = "event loop"


class Liveness:
    """The last heartbeat of each part; may be read from any thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[str, float] = {}
        self.ready = False

    def beat(self, part: str) -> None:
        """Record a heartbeat of *part*, which has to send the next within `STALL_SECONDS`."""
        self._beats[part] = self._clock()

    def forget(self, part: str) -> None:
        """Expect no more heartbeats of *part*."""
        self._beats.pop(part, None)

    def silent_for(self) -> dict[str, float]:
        """Return for each part how many seconds ago its last heartbeat was."""
        now = self._clock()
        return {part: now - at for part, at in tuple(self._beats.items())}

    def has_stalled(self) -> bool:
        """Whether a part has sent no heartbeat for longer than it may."""
        return any(silent > STALL_SECONDS for silent in self.silent_for().values())

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Send heartbeats of the event loop while the block runs."""
        task = asyncio.create_task(self._beat_for_ever(), name="heartbeat")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _beat_for_ever(self) -> None:
        while True:
            self.beat(EVENT_LOOP)
            await asyncio.sleep(BEAT_SECONDS)
