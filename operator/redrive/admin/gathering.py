"""Many who ask at the same time, one call for all of them.

A broker keeps the permissions of a namespace in one record, and every write to it costs each
loaded topic a read; listing a namespace costs the same for one topic as for a thousand. So what
is asked while a call is under way waits for the end of that call and then goes out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class Gathering(Generic[Ask, Answer]):
    """Collects asks while a call is under way, then makes one call for all that came.

    Each ask is answered by a call that began after it was made, so an answer is never older than
    the ask. At most one call is under way. When a call fails, all who wait for it get its error;
    an asker that is cancelled does not disturb the others.

    Args:
        call: answers a list of asks.
    """

    def __init__(self, call: Callable[[Sequence[Ask]], Awaitable[Answer]]) -> None:
        self._call = call
        self._asks: list[Ask] = []
        self._next: asyncio.Task[Answer] | None = None
        self._turn = asyncio.Lock()

    async def ask(self, ask: Ask) -> Answer:
        """Return the answer of the call that *ask* goes out with."""
        self._asks.append(ask)
        if self._next is None:
            self._next = asyncio.create_task(self._go_out())
        return await asyncio.shield(self._next)

    async def _go_out(self) -> Answer:
        async with self._turn:
            asks, self._asks, self._next = self._asks, [], None
            return await self._call(asks)
