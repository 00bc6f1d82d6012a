"""`AsyncBroadcastConsumer`: `BroadcastConsumer` for asyncio, with the same surface."""

from __future__ import annotations

import asyncio
import functools
from datetime import timedelta
from typing import Unpack, overload

import pulsar

from redrive.delivery.consumers.async_base import AsyncBase
from redrive.delivery.consumers.async_consumer import AsyncHandler
from redrive.delivery.consumers.broadcast import BroadcastConsumer, BroadcastOptions
from redrive.delivery.consumers.consumer import HANDLER_TIMEOUT
from redrive.delivery.handling.bridge import Bridge
from redrive.delivery.handling.threads import run_in_thread


class AsyncBroadcastConsumer(AsyncBase[BroadcastConsumer]):
    """Gets every message that is sent to a topic from now on, as every other consumer does.

    Use it as an asynchronous context manager, within the life of *client*, an ordinary
    `pulsar.Client`: entering it begins to read. Arguments, methods and guarantees are those of
    `BroadcastConsumer`, which does the work in threads of its own. For one event loop.

    A message that a cancelled `receive` would have returned is handed out again.

    Raises:
        SubscribeError: on entering, the broker refused to let this role read.
    """

    def __init__(
        self, client: pulsar.Client, topic: str, **options: Unpack[BroadcastOptions]
    ) -> None:
        super().__init__(functools.partial(BroadcastConsumer, client, topic, **options))

    @property
    def topic(self) -> str:
        """Return the topic that is read."""
        return self._opened.topic

    @property
    def connected(self) -> bool:
        """Return True if there is a connection; see `BroadcastConsumer.connected`."""
        return self._opened.connected

    @overload
    async def receive(self) -> pulsar.Message: ...
    @overload
    async def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    async def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message, or None after *timeout*; see `BroadcastConsumer.receive`."""
        return await self._take_one(self._opened.receive, timeout)

    async def run(
        self,
        handler: AsyncHandler,
        *,
        explicit: bool = False,
        workers: int = 1,
        timeout: float | timedelta = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        As `AsyncRetryConsumer.run`, but that a message which fails is dropped.
        """
        bridge = Bridge(asyncio.get_running_loop())
        run = functools.partial(
            self._opened.run, bridge.handler(handler, timeout),
            explicit=explicit, workers=workers, timeout=timeout, max_rate=max_rate,
        )  # fmt: skip
        await run_in_thread(run, bridge, self.stop)

    def pause(self) -> None:
        """Hand out no message until `resume`; see `BroadcastConsumer.pause`."""
        self._opened.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._opened.resume()
