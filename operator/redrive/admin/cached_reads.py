"""One read at a broker for all that want to know the same, now or a little later; see `Admin`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from redrive.admin.batcher import Batcher
from redrive.admin.errors import AdminNotFoundError

Answer = TypeVar("Answer")


class CachedRead(Generic[Answer]):
    """A read that is shared by all callers at the same time, and its last answer.

    That something does not exist is cached too: many policies may wait for the same missing topic.
    Any other failure is not.

    Args:
        read: reads it from the broker.
    """

    def __init__(self, read: Callable[[], Awaitable[Answer]]) -> None:
        self._read = read
        self._reads = Batcher[None, Answer | AdminNotFoundError](lambda _: self._outcome())
        self._known: tuple[float, Answer | AdminNotFoundError] | None = None

    async def get(self, *, max_age: float) -> Answer:
        """Return what was read less than *max_age* seconds ago, or read it now.

        Raises:
            AdminNotFoundError: it does not exist, or did not then.
            AdminError: the read failed.
        """
        asked = asyncio.get_running_loop().time()
        if self._known is not None and asked - self._known[0] < max_age:
            found = self._known[1]
        else:
            found = await self._reads.submit(None)
            self._known = asked, found
        if isinstance(found, AdminNotFoundError):
            # Its traceback would grow with every caller that it is raised to.
            raise found.with_traceback(None)
        return found

    async def _outcome(self) -> Answer | AdminNotFoundError:
        try:
            return await self._read()
        except AdminNotFoundError as error:
            return error
