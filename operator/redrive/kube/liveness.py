"""Signs of life: what the operator does again and again, and whether it has stopped doing so.

The event loop and every watch give a sign each time they come round; the command's endpoint asks,
from a thread of its own, so that a loop that hangs can't keep that to itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

STALL_SECONDS = 60.0
"""How long a sign of life may stay away."""
BEAT_SECONDS = 5.0
EVENT_LOOP = "event loop"


class Liveness:
    """What was last heard of each part; may be asked from any thread.

    Args:
        clock: seconds that only ever rise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[str, float] = {}
        self.ready = False

    def beat(self, part: str) -> None:
        """Take note that *part* lives; it is missed once it gave no sign for `STALL_SECONDS`."""
        self._beats[part] = self._clock()

    def silent_for(self) -> dict[str, float]:
        """Return for each part how many seconds ago its last sign of life was."""
        now = self._clock()
        return {part: now - at for part, at in tuple(self._beats.items())}

    def has_stalled(self) -> bool:
        """Whether a part has given no sign of life for longer than it may."""
        return any(silent > STALL_SECONDS for silent in self.silent_for().values())

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Give signs of life of the event loop while the block runs."""
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
