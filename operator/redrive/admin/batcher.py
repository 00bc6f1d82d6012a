"""Batches requests that are made at the same time into one call.

A broker keeps the permissions of a namespace in one record, and every write to it costs each
loaded topic a read; listing a namespace costs the same for one topic as for a thousand. So
requests that are made while a call is under way wait for its end, and then go out together.
Requests that may be made soon are announced; a call waits for them while they keep coming.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Batcher(Generic[Request, Result]):
    """Collects requests while a call is under way, then makes one call for all of them.

    A request gets the result of a call that began after the request was made, so a result is never
    older than its request. At most one call is under way. When a call fails, all of its requests
    get its error; a request that is cancelled does not disturb the others.

    Args:
        call: makes the call for a list of requests.
        max_gap: the seconds that a call waits for the next of the requests that are announced. It
            waits for those alone that were announced before its turn: later announcements, however
            many, never delay it.
    """

    def __init__(
        self, call: Callable[[Sequence[Request]], Awaitable[Result]], *, max_gap: float = 0.0
    ) -> None:
        self._call = call
        self._max_gap = max_gap
        self._requests: list[Request] = []
        self._next: asyncio.Task[Result] | None = None
        self._turn = asyncio.Lock()
        self._announced: set[object] = set()
        self._one_came = asyncio.Event()

    async def submit(self, request: Request) -> Result:
        """Return the result of the call that *request* is part of."""
        self._requests.append(request)
        if self._next is None:
            # In an empty context: what it logs is about none of the objects that wait for it.
            self._next = asyncio.create_task(self._run(), context=contextvars.Context())
        return await asyncio.shield(self._next)

    @contextmanager
    def announced(self) -> Iterator[Callable[[Request], Awaitable[Result]]]:
        """Announce one request, to be made within the block by what this yields, or not at all."""
        announcement = object()
        self._announced.add(announcement)

        def came() -> None:
            self._announced.discard(announcement)
            self._one_came.set()

        async def submit(request: Request) -> Result:
            came()
            return await self.submit(request)

        try:
            yield submit
        finally:
            came()

    async def _run(self) -> Result:
        async with self._turn:
            await self._collect(frozenset(self._announced))
            requests, self._requests, self._next = self._requests, [], None
            return await self._call(requests)

    async def _collect(self, announced: frozenset[object]) -> None:
        """Return once all of *announced* came, or none of them came for `max_gap`."""
        with suppress(TimeoutError):
            while waited_for := announced & self._announced:
                async with asyncio.timeout(self._max_gap):
                    while waited_for <= self._announced:
                        self._one_came.clear()
                        await self._one_came.wait()
