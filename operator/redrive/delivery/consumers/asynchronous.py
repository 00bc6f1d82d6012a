"""asyncio facades of the consumers and of the producer.

Each has the same surface as the object without `Async` in its name, which does the work in threads
and decides everything. The loop never waits for it. A call that is cancelled loses no message.
Messages go to the loop one by one as they are awaited, or as `bridge` runs handlers there.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Generic, Self, TypeVar, Unpack, overload

import pulsar

from redrive.delivery.assembly import Options, RetryOptions, check_options
from redrive.delivery.concurrency import CLOSE_TIMEOUT, AsyncClosing, Deadline, to_seconds
from redrive.delivery.consumers.bridge import Bridge, CallThreads, opened, run_in_thread
from redrive.delivery.consumers.broadcast import BroadcastConsumer, BroadcastOptions
from redrive.delivery.consumers.consumer import (
    HANDLER_TIMEOUT,
    PolicyConsumer,
    PolicyState,
    RetryConsumer,
)
from redrive.delivery.consumers.simple import SimpleConsumer
from redrive.delivery.forking import OwnerProcess, heed_sigterm
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.delivery.processor import Processor
from redrive.delivery.retry_producer import (
    ProducerOptions,
    RetryProducer,
    check_producer_options,
)
from redrive.errors import InvalidSpecError
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy
from redrive.policy.values import check_count, to_timedelta
from redrive.policy.verdict import Done, FailureRules

SLICE = timedelta(seconds=0.25)
"""Time for which a thread waits for a message before it checks that it is still awaited."""


_Consumer = TypeVar("_Consumer", bound=PolicyConsumer | BroadcastConsumer)


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
        """Hand out nothing more: `run` returns once its in-flight messages are settled."""
        if not self._owner.is_parent:
            self._opened.stop()

    async def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
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

    def _close(self, timeout: float | timedelta | None) -> None:
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
        """Return the result of *take* within *timeout*, of which each call waits for a part."""
        remaining = SLICE if timeout is None else to_timedelta(timeout, "a time to wait")
        while True:
            wait = min(remaining, SLICE)
            messages = await self._threads.take(take, wait)
            if messages:
                return messages
            if timeout is not None:
                remaining -= wait
                if remaining <= timedelta():
                    return []

    async def _run(
        self,
        run: Callable[..., None],
        handler: Callable[..., Awaitable[object]],
        timeout: float | timedelta | None,
        **options: object,
    ) -> None:
        """Have *run* of the consumer handle messages by *handler*, on the loop."""
        bridge = Bridge(asyncio.get_running_loop())
        handle = bridge.handler(handler, timeout)
        running = functools.partial(run, handle, timeout=timeout, **options)
        await run_in_thread(running, bridge, self.stop)


_Receiver = TypeVar("_Receiver", bound=RetryConsumer | BroadcastConsumer)


class AsyncReceiver(AsyncBase[_Receiver]):
    """Receives one message after another, and can be paused."""

    @overload
    async def receive(self) -> pulsar.Message: ...
    @overload
    async def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    async def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message, or None after *timeout*; see `RetryConsumer.receive`."""
        receive = self._opened.receive  # here: an inherited consumer has no threads

        def take(wait: timedelta) -> list[pulsar.Message]:
            message = receive(wait)
            return [] if message is None else [message]

        return next(iter(await self._take(take, timeout)), None)

    def pause(self) -> None:
        """Hand out no message until `resume`; see `RetryConsumer.pause`."""
        self._opened.pause()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._opened.resume()


_PolicyConsumer = TypeVar("_PolicyConsumer", bound=PolicyConsumer)


class AsyncPolicyConsumer(PolicyState, AsyncBase[_PolicyConsumer]):
    """Consumes the source and the retry topic of a policy by a `PolicyConsumer`."""

    @property
    def _processor(self) -> Processor:
        return self._opened._processor  # noqa: SLF001 - none of the API

    async def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled; see `acknowledge` of the consumer without `Async`."""
        consumer = self._opened
        if self._processor.may_wait and not self._threads.closed:
            await self._threads.settle(consumer.acknowledge, message)
        else:
            consumer.acknowledge(message)  # the client notes it, and tells the broker later


AsyncHandler = (
    Callable[[pulsar.Message], Awaitable[object]]
    | Callable[[pulsar.Message, Attempt], Awaitable[object]]
)
AsyncBatchHandler = Callable[
    [list[pulsar.Message]], Awaitable[Sequence[Done | BaseException | None] | None]
]


class AsyncRetryConsumer(AsyncPolicyConsumer[RetryConsumer], AsyncReceiver[RetryConsumer]):
    """Consumes a topic, retries failed messages later, and dead-letters those that keep failing.

    Use it as an asynchronous context manager, within the life of *client*, an ordinary
    `pulsar.Client`: entering it subscribes. Arguments, methods and guarantees are those of
    `RetryConsumer`, which does the work in threads of its own. For one event loop.

    A call that is cancelled loses no message: one that `receive` would have returned is handed out
    again, and a settlement that has begun is ended.

    Args:
        client: see `RetryConsumer`, as for *policy*, *name*, *schema*, *crypto*, *redaction*,
            *nack_delay*, *on_event*, *disconnect_timeout*, *max_in_flight_bytes*, *ack_timeout*,
            *crash_log*, *handle_again_when_unsent*, *prefetch*, *tracing* and *middleware*.

    Raises:
        SubscribeError: on entering, the broker refused one of the two subscriptions.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[RetryOptions],
    ) -> None:
        check_options(options, RetryOptions)
        super().__init__(functools.partial(RetryConsumer, client, policy, **options))

    async def receive_batch(self, size: int, wait: float | timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages; see `RetryConsumer.receive_batch`."""
        check_count(size, "size", least=0)
        end = time.monotonic() + to_seconds(wait)
        messages: list[pulsar.Message] = []
        try:
            while True:
                remaining = timedelta(seconds=max(0.0, end - time.monotonic()))
                messages += await self._threads.take(
                    self._opened.receive_batch, size - len(messages), min(remaining, SLICE)
                )
                if len(messages) >= size or remaining <= SLICE:
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
        timeout: float | timedelta | None = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        As `RetryConsumer.run`, but for this: a handler is awaited on the loop, and one that is out
        of time is cancelled. When this call is cancelled it stops the consumer and cancels its
        handlers, whose messages stay unacknowledged.

        SIGTERM calls `stop` meanwhile, if the loop runs in the main thread and the program does
        nothing of its own at SIGTERM.

        Args:
            workers: at most so many handlers run at a time. Where middleware wraps them, each costs
                a thread that waits for it.
        """
        await self._run(
            self._opened.run, handler, timeout,
            explicit=explicit, rules=rules, workers=workers, max_rate=max_rate,
        )  # fmt: skip

    async def run_batches(  # noqa: PLR0913 - as of RetryConsumer
        self,
        handler: AsyncBatchHandler,
        *,
        size: int = 100,
        wait: float | timedelta = timedelta(seconds=1),
        explicit: bool = False,
        rules: FailureRules = FailureRules(),
        workers: int = 1,
        timeout: float | timedelta | None = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages in batches; see `run`, and `RetryConsumer.run_batches`."""
        await self._run(
            self._opened.run_batches, handler, timeout, size=size, wait=wait,
            explicit=explicit, rules=rules, workers=workers, max_rate=max_rate,
        )  # fmt: skip


class AsyncSimpleConsumer(AsyncPolicyConsumer[SimpleConsumer]):
    """Consumes a topic on request: each message is the caller's for as long as was asked for.

    Use it as an asynchronous context manager, within the life of *client*, an ordinary
    `pulsar.Client`: entering it subscribes. Arguments, methods and guarantees are those of
    `SimpleConsumer`, which does the work in threads of its own. For one event loop.

    The message of a cancelled `receive` is handed out again, as the same attempt.

    Args:
        client: see `RetryConsumer`, as for *policy*, *name*, *schema*, *crypto*, *redaction*,
            *on_event*, *disconnect_timeout*, *max_in_flight_bytes*, *crash_log*, *tracing* and
            *middleware*.

    Raises:
        SubscribeError: on entering, the broker refused one of the two subscriptions.
        InvalidSpecError: on entering, the policy is ordered.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[Options],
    ) -> None:
        check_options(options, Options)
        super().__init__(functools.partial(SimpleConsumer, client, policy, **options))

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        heed_sigterm()  # in the thread that handles signals
        return self

    async def receive(
        self,
        max_messages: int,
        invisible: float | timedelta,
        timeout: float | timedelta | None = None,
    ) -> list[pulsar.Message]:
        """Return up to *max_messages*; see `SimpleConsumer.receive`."""
        return await self._take(
            lambda wait: self._opened.receive(max_messages, invisible, wait), timeout
        )

    async def fail(
        self,
        message: pulsar.Message,
        *,
        delay: float | timedelta | None = None,
        cause: BaseException | None = None,
    ) -> None:
        """Settle *message* as failed; see `SimpleConsumer.fail`."""
        await self._threads.settle(self._opened.fail, message, delay=delay, cause=cause)

    def change_invisible_duration(
        self, message: pulsar.Message, invisible: float | timedelta
    ) -> None:
        """Have *message* stay invisible; see `SimpleConsumer.change_invisible_duration`."""
        self._opened.change_invisible_duration(message, invisible)


class AsyncBroadcastConsumer(AsyncReceiver[BroadcastConsumer]):
    """Gets every message that is sent to a topic from now on, as every other consumer does.

    Use it as an asynchronous context manager, within the life of *client*, an ordinary
    `pulsar.Client`: entering it begins to read. Arguments, methods and guarantees are those of
    `BroadcastConsumer`, which does the work in threads of its own. For one event loop.

    A message that a cancelled `receive` would have returned is handed out again.

    Args:
        client: see `BroadcastConsumer`, as for *topic*, *name*, *schema*, *crypto*, *redaction*,
            *on_event*, *disconnect_timeout* and *prefetch*.

    Raises:
        SubscribeError: on entering, the broker refused to let this role read.
    """

    def __init__(
        self, client: pulsar.Client, topic: str, **options: Unpack[BroadcastOptions]
    ) -> None:
        check_options(options, BroadcastOptions)
        super().__init__(functools.partial(BroadcastConsumer, client, topic, **options))

    @property
    def topic(self) -> str:
        """Return the topic that is read."""
        return self._opened.topic

    @property
    def connected(self) -> bool:
        """Return True if there is a connection; see `BroadcastConsumer.connected`."""
        return self._opened.connected

    async def run(
        self,
        handler: AsyncHandler,
        *,
        explicit: bool = False,
        workers: int = 1,
        timeout: float | timedelta | None = HANDLER_TIMEOUT,
        max_rate: float | None = None,
    ) -> None:
        """Handle messages until `stop` or `close` is called, or SIGTERM comes.

        As `AsyncRetryConsumer.run`, but that a message which fails is dropped.
        """
        await self._run(
            self._opened.run, handler, timeout,
            explicit=explicit, workers=workers, max_rate=max_rate,
        )  # fmt: skip


class AsyncRetryProducer(AsyncClosing):
    """Produces to a topic, and sends a message again when no receipt came for it in time.

    Use it as an asynchronous context manager: entering it opens all that a `RetryProducer` opens at
    once, and raises the same errors. Arguments and guarantees are those of `RetryProducer`.

    Args:
        client: see `RetryProducer`, as for *topic*, *name*, *schema*, *compression*, *crypto*,
            *send_retries*, *timeout* and *in_flight*.
    """

    def __init__(
        self, client: pulsar.Client, topic: str, **options: Unpack[ProducerOptions]
    ) -> None:
        check_producer_options(options)
        self._open = functools.partial(RetryProducer, client, topic, **options)
        self._threads = ThreadPoolExecutor(options.get("in_flight", 1), "redrive-producer")
        self._producer: RetryProducer | None = None
        self._owner = OwnerProcess("producer")

    async def send(  # noqa: PLR0913 - parts of a message
        self,
        content: object,
        *,
        properties: Mapping[str, str] | None = None,
        partition_key: str = "",
        ordering_key: str = "",
        event_timestamp: int = 0,
        deliver_after: float | timedelta | None = None,
    ) -> pulsar.MessageId | None:
        """Send a message; see `RetryProducer.send`.

        One that has not begun when the producer is left is not sent: ProducerClosedError says so.
        Cancelling this keeps a message from being sent that has not begun to be; one that has goes
        its way, and may or may not be stored.
        """
        self._owner.check()
        if self._producer is None:
            raise InvalidSpecError(
                "a producer is open between entering and leaving it",
                remedy="send within `async with AsyncRetryProducer(…) as producer:`",
            )
        send = functools.partial(
            self._producer.send,
            content,
            properties=properties,
            partition_key=partition_key,
            ordering_key=ordering_key,
            event_timestamp=event_timestamp,
            deliver_after=deliver_after,
        )
        return await asyncio.wrap_future(self._threads.submit(send))

    async def __aenter__(self) -> Self:
        self._owner.check()
        self._producer = await opened(self._open, self._threads)
        return self

    async def close(self, timeout: float | timedelta | None = CLOSE_TIMEOUT) -> None:
        """Leave the broker, once every send has ended; see `RetryProducer.close`."""
        producer, self._producer = self._producer, None
        if self._owner.is_parent:
            return
        closing = ThreadPoolExecutor(1, "redrive-closing")  # the others may all be sending
        try:
            if producer is not None:
                await asyncio.shield(asyncio.wrap_future(closing.submit(producer.close, timeout)))
        finally:
            closing.shutdown(wait=False)
            self._threads.shutdown(wait=False)
