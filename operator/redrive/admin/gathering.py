"""Many who ask at the same time, one call for all of them.

A broker keeps the permissions of a namespace in one record, and every write to it costs each
loaded topic a read; listing a namespace costs the same for one topic as for a thousand. So what
is asked while a call is under way waits for the end of that call and then goes out together.
Who knows that it may ask soon announces it, and those who ask first wait for it a while.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
        patience: for how many seconds a call waits for asks that were announced.
    """

    def __init__(
        self, call: Callable[[Sequence[Ask]], Awaitable[Answer]], *, patience: float = 0.0
    ) -> None:
        self._call = call
        self._patience = patience
        self._asks: list[Ask] = []
        self._next: asyncio.Task[Answer] | None = None
        self._turn = asyncio.Lock()
        self._announced = 0
        self._all_came = asyncio.Event()

    async def ask(self, ask: Ask) -> Answer:
        """Return the answer of the call that *ask* goes out with."""
        self._asks.append(ask)
        if self._next is None:
            # Of no asker in particular: nothing that it logs is about one object.
            self._next = asyncio.create_task(self._go_out(), context=contextvars.Context())
        return await asyncio.shield(self._next)

    @contextmanager
    def announced(self) -> Iterator[Callable[[Ask], Awaitable[Answer]]]:
        """Announce one ask, which may come within the block, by what this yields, or not at all."""
        waited_for = True
        self._announced += 1
        self._all_came.clear()

        def came() -> None:
            nonlocal waited_for
            self._announced -= waited_for
            waited_for = False
            if not self._announced:
                self._all_came.set()

        async def ask(ask: Ask) -> Answer:
            came()
            return await self.ask(ask)

        try:
            yield ask
        finally:
            came()

    async def _go_out(self) -> Answer:
        async with self._turn:
            if self._announced:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._all_came.wait(), self._patience)
            asks, self._asks, self._next = self._asks, [], None
            return await self._call(asks)
