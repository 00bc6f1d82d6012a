"""What is opened in a thread while an asyncio loop waits: nothing stays open unused.

Called by `async_consumer` and `async_retry_producer` when a program enters them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Protocol, TypeVar


class _Closes(Protocol):
    def close(self) -> None: ...


Opened = TypeVar("Opened", bound=_Closes)


async def opened(make: Callable[[], Opened], threads: Executor) -> Opened:
    """Return what *make* opens in one of *threads*.

    When this is cancelled the opening goes on; what it opened is closed then. Left open,
    subscriptions would hold messages that no thread takes, and a producer keep its name at the
    broker.

    Raises:
        RedriveError: as *make* does.
    """
    opening = threads.submit(make)
    try:
        return await asyncio.shield(asyncio.wrap_future(opening))
    except asyncio.CancelledError:
        threads.submit(_close, opening)
        raise


def _close(opening: Future[Opened]) -> None:
    if opening.exception() is None:
        opening.result().close()
