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
        lull: for how many seconds nothing more has to be asked before a call goes out; 0 sends
            it at once.
        patience: how many seconds to wait for such a lull at most.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Ask]], Awaitable[Answer]],
        *,
        lull: float = 0.0,
        patience: float = 0.0,
    ) -> None:
        self._call = call
        self._lull = lull
        self._patience = patience
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
            await self._settle()
            asks, self._asks, self._next = self._asks, [], None
            return await self._call(asks)

    async def _settle(self) -> None:
        waited = 0.0
        while waited < self._patience:
            before = len(self._asks)
            await asyncio.sleep(self._lull)
            waited += self._lull
            if len(self._asks) == before:
                return
