"""One read at a broker for many who want to know the same, now or a little later; see `Admin`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from redrive.admin.errors import NotFoundError
from redrive.admin.gathering import Gathering

Answer = TypeVar("Answer")


class Lately(Generic[Answer]):
    """A read that all share who ask at the same time, and what it brought last.

    That there is no such thing is remembered too: many may wait for one that is not there yet. Any
    other failure is not.

    Args:
        read: asks the broker.
    """

    def __init__(self, read: Callable[[], Awaitable[Answer]]) -> None:
        self._read = read
        self._readings = Gathering[None, Answer | NotFoundError](lambda _: self._outcome())
        self._known: tuple[float, Answer | NotFoundError] | None = None

    async def ask(self, *, max_age: float) -> Answer:
        """Return what was read less than *max_age* seconds ago, or read it now.

        Raises:
            NotFoundError: there is, or was then, no such thing.
            AdminError: the read failed.
        """
        asked = asyncio.get_running_loop().time()
        if self._known is not None and asked - self._known[0] < max_age:
            found = self._known[1]
        else:
            found = await self._readings.ask(None)
            self._known = asked, found
        if isinstance(found, NotFoundError):
            # It would else remember all who were told.
            raise found.with_traceback(None)
        return found

    async def _outcome(self) -> Answer | NotFoundError:
        try:
            return await self._read()
        except NotFoundError as error:
            return error
