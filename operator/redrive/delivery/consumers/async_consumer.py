"""`AsyncRetryConsumer`: `RetryConsumer` for asyncio, with the same surface.

It decides nothing: the other consumer does its work in threads, and the loop never waits for it.
Messages go to the loop one by one as they are awaited, and `bridge` runs handlers there.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Unpack, overload

import pulsar

from redrive.delivery import durations
from redrive.delivery.assembly import RetryOptions
from redrive.delivery.consumers.async_base import SLICE
from redrive.delivery.consumers.async_policy_consumer import AsyncPolicyConsumer
from redrive.delivery.consumers.consumer import HANDLER_TIMEOUT, RetryConsumer
from redrive.delivery.handling.bridge import Bridge
from redrive.delivery.handling.threads import run_in_thread
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.envelope import Attempt
from redrive.policy.failure import FailureRules
from redrive.policy.model import Policy
from redrive.policy.verdict import Done

AsyncHandler = (
    Callable[[pulsar.Message], Awaitable[object]]
    | Callable[[pulsar.Message, Attempt], Awaitable[object]]
)
AsyncBatchHandler = Callable[
    [Sequence[pulsar.Message]], Awaitable[Sequence[Done | BaseException | None] | None]
]


class AsyncRetryConsumer(AsyncPolicyConsumer[RetryConsumer]):
    """Consumes a topic, retries later what failed, and lays aside what keeps failing.

    Use it as an asynchronous context manager, within the life of *client*, an ordinary
    `pulsar.Client`: entering it subscribes. Arguments, methods and guarantees are those of
    `RetryConsumer`, which does the work in threads of its own. For one event loop.

    A call that is cancelled loses no message: one that `receive` would have returned is handed out
    again, and a settlement that has begun is ended.

    Raises:
        SubscribeError: on entering, the broker refused one of the two subscriptions.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[RetryOptions],
    ) -> None:
        super().__init__(functools.partial(RetryConsumer, client, policy, **options))

    @overload
    async def receive(self) -> pulsar.Message: ...
    @overload
    async def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    async def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message, or None after *timeout*; see `RetryConsumer.receive`."""
        return await self._take_one(self._opened.receive, timeout)

    async def receive_batch(self, size: int, wait: float | timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages; see `RetryConsumer.receive_batch`."""
        end = time.monotonic() + durations.seconds(wait)
        messages: list[pulsar.Message] = []
        try:
            while True:
                left = timedelta(seconds=max(0.0, end - time.monotonic()))
                messages += await self._threads.take(
                    self._opened.receive_batch, size - len(messages), min(left, SLICE)
                )
                if len(messages) >= size or left <= SLICE:
                    return messages
        except BaseException:
            for message in messages:  # which were not handed out
                self.hand_back(message)
            raise

    async def negative_acknowledge(
        self, message: pulsar.Message, *, cause: BaseException | None = None
    ) -> None:
        """Have the broker deliver *message* again; see `RetryConsumer.negative_acknowledge`."""
        await self._threads.settle(self._opened.negative_acknowledge, message, cause=cause)

    async def reconsume_later(
        self,
        message: pulsar.Message,
        *,
        delay: float | timedelta | None = None,
        level: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed; see `RetryConsumer.reconsume_later`."""
        await self._threads.settle(
            self._opened.reconsume_later, message, delay=delay, level=level, cause=cause
        )

    async def run(  # noqa: PLR0913 - as of RetryConsumer
        self,
        handler: AsyncHandler,
        *,
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        As `RetryConsumer.run`, but for this: a handler is awaited on the loop, and one that is out
        of time is cancelled. When this call is cancelled it stops the consumer and cancels its
        handlers, whose messages stay unacknowledged.

        SIGTERM calls `stop` meanwhile, if the loop runs in the main thread and the program does
        nothing of its own at SIGTERM.

        Args:
            workers: at most so many handlers run at a time; each costs a thread that waits for it.
        """
        bridge = Bridge(asyncio.get_running_loop())
        run = functools.partial(
            self._opened.run, bridge.handler(handler, timeout),
            explicit=explicit, rules=rules, workers=workers, timeout=timeout, max_rate=max_rate,
        )  # fmt: skip
        await run_in_thread(run, bridge, self.stop)

    async def run_batches(  # noqa: PLR0913 - as of RetryConsumer
        self,
        handler: AsyncBatchHandler,
        *,
        size: int = 100,
        wait: float | timedelta = timedelta(seconds=1),
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages in batches; see `run`, and `RetryConsumer.run_batches`."""
        bridge = Bridge(asyncio.get_running_loop())
        run = functools.partial(
            self._opened.run_batches, bridge.handler(handler, timeout), size=size, wait=wait,
            explicit=explicit, rules=rules, workers=workers, timeout=timeout, max_rate=max_rate,
        )  # fmt: skip
        await run_in_thread(run, bridge, self.stop)

    def pause(self) -> None:
        """Hand out no message until `resume`; see `RetryConsumer.pause`."""
        self._opened.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._opened.resume()
