"""Many who ask at the same time, one call for all of them.

A broker keeps the permissions of a namespace in one record, and every write to it costs each
loaded topic a read; listing a namespace costs the same for one topic as for a thousand. So what
is asked while a call is under way waits for the end of that call and then goes out together.
Who knows that it may ask soon announces it, and those who ask first wait for it, for as long as
others keep coming.
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
        patience: how many seconds may pass without any of those coming that a call waits for.
            It waits for those alone that were announced before its turn: others who announce
            themselves all the time never hold it up.
    """

    def __init__(
        self, call: Callable[[Sequence[Ask]], Awaitable[Answer]], *, patience: float = 0.0
    ) -> None:
        self._call = call
        self._patience = patience
        self._asks: list[Ask] = []
        self._next: asyncio.Task[Answer] | None = None
        self._turn = asyncio.Lock()
        self._announced: set[object] = set()
        self._one_came = asyncio.Event()

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
        announcement = object()
        self._announced.add(announcement)

        def came() -> None:
            self._announced.discard(announcement)
            self._one_came.set()

        async def ask(ask: Ask) -> Answer:
            came()
            return await self.ask(ask)

        try:
            yield ask
        finally:
            came()

    async def _go_out(self) -> Answer:
        async with self._turn:
            await self._come(frozenset(self._announced))
            asks, self._asks, self._next = self._asks, [], None
            return await self._call(asks)

    async def _come(self, announced: frozenset[object]) -> None:
        """Return once all of *announced* came, or none of them for as long as patience lasts."""
        with suppress(TimeoutError):
            while waited_for := announced & self._announced:
                async with asyncio.timeout(self._patience):
                    while waited_for <= self._announced:
                        self._one_came.clear()
                        await self._one_came.wait()
