"""Slots that namespaces share fairly: objects of one namespace cannot delay those of another.

They limit calls to brokers and their answers, reconciles of a work queue, and slow computations of
a cache.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

namespace_of_object: ContextVar[str] = ContextVar("namespace_of_object", default="")
"""Namespace of the object that the current task reconciles; empty for calls that serve several."""


class FairSlots:
    """A semaphore that serves waiting namespaces round robin.

    A free slot goes to the next waiting namespace, regardless of the number of its tasks. So the
    first task of a namespace waits for at most one task of each other namespace.

    Args:
        count: number of slots.
        of_namespace: maximum slots of one namespace, less than *count* so that others find a free
            one; defaults to *count*.
    """

    def __init__(self, count: int, of_namespace: int | None = None) -> None:
        self._free = count
        self._limit = count if of_namespace is None else of_namespace
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def slot(self, namespace: str) -> AsyncIterator[None]:
        """Hold a slot while the block runs."""
        await self.acquire(namespace)
        try:
            yield
        finally:
            self.release(namespace)

    async def acquire(self, namespace: str) -> None:
        """Wait for a slot."""
        if self._may_take(namespace) and namespace not in self._waiting:
            self._take(namespace)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # granted at the same time
                self.release(namespace)
            raise

    def release(self, namespace: str) -> None:
        """Release a slot of *namespace* to the next waiting task."""
        self._free += 1
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]
        while (following := self._next()) is not None:
            following.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        """Take a slot for the next waiting task; return its future, or None."""
        for namespace in list(self._waiting):
            queue = self._waiting[namespace]
            while queue and queue[0].done():  # cancelled
                queue.popleft()
            if not queue:
                del self._waiting[namespace]
            elif self._may_take(namespace):
                granted = queue.popleft()
                del self._waiting[namespace]
                if queue:
                    self._waiting[namespace] = queue  # last in the order
                self._take(namespace)
                return granted
        return None

    def _may_take(self, namespace: str) -> bool:
        return self._free > 0 and self._held[namespace] < self._limit

    def _take(self, namespace: str) -> None:
        self._free -= 1
        self._held[namespace] += 1
