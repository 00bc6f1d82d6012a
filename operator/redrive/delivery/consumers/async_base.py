"""What all asyncio consumers share: another consumer does their work, in threads.

The loop never waits for it. A call that is cancelled loses no message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, Protocol, Self, TypeVar

import pulsar

from redrive.delivery.bounded import Deadline
from redrive.delivery.closing import CLOSE_TIMEOUT, AsyncClosing
from redrive.delivery.forking import OwnerProcess
from redrive.delivery.handling.threads import CallThreads
from redrive.delivery.opening import opened
from redrive.errors import InvalidSpecError
from redrive.policy.durations import given

SLICE = timedelta(seconds=0.25)
"""How long a thread waits for a message before it checks that it is still awaited."""


class BlockingConsumer(Protocol):
    """What does the work."""

    @property
    def name(self) -> str:
        """Return its name."""

    def hand_back(self, message: pulsar.Message) -> None:
        """Undo the reception of *message*."""

    def stop(self) -> None:
        """Hand out nothing more."""

    def close(self, timeout: float | timedelta = CLOSE_TIMEOUT) -> None:
        """Leave the subscriptions."""


_Consumer = TypeVar("_Consumer", bound=BlockingConsumer)


class AsyncBase(AsyncClosing, Generic[_Consumer]):
    """An asynchronous context manager: entering it opens the consumer that does the work.

    Args:
        make: opens it, which may wait for the broker.
    """

    def __init__(self, make: Callable[[], _Consumer]) -> None:
        self._open = make
        self._consumer: _Consumer | None = None
        self._closed = False
        self._owner = OwnerProcess("consumer")
        self._threads = CallThreads(self.hand_back)

    def hand_back(self, message: pulsar.Message) -> None:
        """Have `receive` hand *message* out again, as the same attempt."""
        self._opened.hand_back(message)

    @property
    def name(self) -> str:
        """Return the name of this consumer."""
        return self._opened.name

    def stop(self) -> None:
        """Hand out nothing more: `run` returns once its messages in hand are settled."""
        if not self._owner.is_parent:
            self._opened.stop()

    async def close(self, timeout: float | timedelta = CLOSE_TIMEOUT) -> None:
        """Stop, wait until every settlement and `run` has ended, and leave the subscriptions.

        See `close` of the consumer without `Async` in its name.
        """
        if self._closed or self._owner.is_parent:
            return
        self._closed = True
        await self._threads.close(functools.partial(self._close, timeout))

    async def __aenter__(self) -> Self:
        self._owner.check()
        self._consumer = await opened(self._open, self._threads.settling)
        return self

    def _close(self, timeout: float | timedelta) -> None:
        deadline = Deadline(timeout)
        self._opened.stop()
        self._threads.wait_settled(deadline)  # those that wait for a thread, too
        self._opened.close(deadline.left())

    @property
    def _opened(self) -> _Consumer:
        self._owner.check()
        if self._consumer is None:
            kind = type(self).__name__
            raise InvalidSpecError(
                "a consumer consumes once it was entered",
                remedy=f"consume within `async with {kind}(…) as consumer:`",
            )
        return self._consumer

    async def _take(
        self,
        take: Callable[[timedelta], list[pulsar.Message]],
        timeout: float | timedelta | None,
    ) -> list[pulsar.Message]:
        """Return what *take* brings within *timeout*, of which each call waits for a part."""
        left = SLICE if timeout is None else given(timeout, "a time to wait")
        while True:
            wait = min(left, SLICE)
            messages = await self._threads.take(take, wait)
            if messages:
                return messages
            if timeout is not None:
                left -= wait
                if left <= timedelta():
                    return []

    async def _take_one(
        self,
        take: Callable[[timedelta], pulsar.Message | None],
        timeout: float | timedelta | None,
    ) -> pulsar.Message | None:
        """As `_take`, of what brings one message."""

        def take_list(wait: timedelta) -> list[pulsar.Message]:
            message = take(wait)
            return [] if message is None else [message]

        return next(iter(await self._take(take_list, timeout)), None)
