"""Behaviour of the asynchronous consumer alone; the contract suite covers the rest."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pulsar
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from redrive import (
    AsyncRetryConsumer,
    Attempt,
    ConsumerStoppedError,
    Done,
    Event,
    NotRunError,
    Policy,
    RetryConsumer,
)
from redrive.delivery.middleware.chain import Middleware, Settle, Settlement
from redrive.delivery.reporting import Name
from redrive.errors import InvalidSpecError
from redrive.opentelemetry import Tracing
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import AsyncInMemoryConsumer, InMemoryConsumer
from tests.support.fake_client import FakeClient
from tests.support.memory_brokers import BlockingBroker

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=1, ladder=Ladder.from_fixed("5s")
)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    "name", [name for name in dir(RetryConsumer) if not name.startswith("_")] + ["__init__"]
)
def test_async_consumer_has_the_surface_of_the_other(name: str) -> None:
    theirs, ours = getattr(RetryConsumer, name), getattr(AsyncRetryConsumer, name)
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    theirs, ours = (inspect.signature(method).parameters for method in (theirs, ours))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


async def test_cause_trace_contains_only_the_handler() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")

    async def fail(_message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        raise LookupError("no such order")

    await consumer.run(fail)
    (dead,) = consumer.dead_letters
    properties = dead.properties()
    assert properties["REDRIVE_CAUSE_TYPE"] == "LookupError"
    assert properties["REDRIVE_CAUSE_MESSAGE"] == "no such order"
    (line,) = properties["REDRIVE_CAUSE_TRACE"].splitlines()
    assert ".fail:" in line


async def test_handler_beyond_its_timeout_is_cancelled() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    cancelled = 0

    async def hang(_message: pulsar.Message) -> None:
        nonlocal cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    began = time.monotonic()
    await consumer.run(hang, timeout=0.5 * SECOND)
    assert time.monotonic() - began < 30
    assert cancelled == 2
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "HandlerTimeoutError"


async def test_loop_runs_while_a_message_is_settled() -> None:
    async def handle(_message: pulsar.Message) -> None:
        await asyncio.sleep(0)

    broker = BlockingBroker(POLICY, "acknowledge")
    consumer = AsyncInMemoryConsumer(POLICY, broker=broker)
    consumer.send(b"x")
    running = asyncio.create_task(consumer.run(handle))
    assert await asyncio.to_thread(broker.blocked.wait, 30)
    broker.release.set()
    await running
    assert broker.unsettled() == []


async def test_handler_with_cancelled_work_has_failed() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")

    async def handle(_message: pulsar.Message) -> None:
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    await consumer.run(handle)
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "HandlerCancelledError"


async def test_handler_without_await_is_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    with caplog.at_level(logging.INFO, "redrive"):
        await consumer.run(lambda _: Done(), explicit=True)  # type: ignore[arg-type]
    assert caplog.records == []
    assert consumer.broker.unsettled() == []


async def test_async_handler_with_second_argument_gets_the_attempt() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    attempts: list[tuple[int, str]] = []

    async def handle(_message: object, attempt: Attempt) -> None:
        attempts.append((attempt.number, "" if attempt.cause is None else attempt.cause.type))
        await asyncio.sleep(0)
        if attempt.number == 1:
            raise LookupError

    await consumer.run(handle)
    assert attempts == [(1, ""), (2, "LookupError")]


@pytest.mark.parametrize("error", [asyncio.CancelledError, ConnectionError])
async def test_cancelled_run_cancels_handlers_and_keeps_messages(
    error: type[BaseException],
) -> None:
    consumer = AsyncInMemoryConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"x")
    handling, ended = asyncio.Event(), asyncio.Event()

    async def hang(_message: pulsar.Message) -> None:
        handling.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise error from None

    running = asyncio.create_task(consumer.run(hang))
    await handling.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert consumer.dead_letters == []
    assert [message.data() for message in consumer.broker.unsettled()] == [b"x"]


async def test_handler_runs_in_the_span_of_its_attempt() -> None:
    tracer = TracerProvider().get_tracer("test")
    consumer = AsyncInMemoryConsumer(POLICY, tracing=Tracing(tracer))
    consumer.send(b"x")
    spans = []

    async def handle(_message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        spans.append(trace.get_current_span())

    await consumer.run(handle)
    (span,) = spans
    assert span.get_span_context().is_valid
    assert not trace.get_current_span().get_span_context().is_valid


async def test_consumer_before_async_with_is_refused() -> None:
    consumer = AsyncRetryConsumer(cast("pulsar.Client", None), POLICY)
    with pytest.raises(InvalidSpecError, match="async with"):
        await consumer.receive()
    with pytest.raises(InvalidSpecError, match="async with"):
        consumer.stop()


async def test_cancelled_opening_leaves_no_subscription(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entering, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    opened = InMemoryConsumer(POLICY)
    monkeypatch.setattr(opened, "close", closed.set)

    def open_slowly() -> RetryConsumer:
        entering.set()
        go_on.wait(60)
        return opened

    consumer = AsyncRetryConsumer(cast("pulsar.Client", None), POLICY)
    monkeypatch.setattr(consumer, "_open", open_slowly)
    task = asyncio.create_task(consumer.__aenter__())
    await asyncio.to_thread(entering.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not closed.is_set()
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_handler_accepts_an_unlimited_timeout() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    handled = []

    async def handle(message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        handled.append(message.data())

    await consumer.run(handle, timeout=timedelta.max)
    assert handled == [b"x"]
    assert consumer.broker.unsettled() == []


async def test_returned_generator_ends_run_without_dead_letter() -> None:
    consumer = AsyncInMemoryConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"x")

    def generate(_message: pulsar.Message) -> Any:  # noqa: ANN401 - a type checker refuses it
        yield

    def handle(message: pulsar.Message) -> Any:  # noqa: ANN401
        return generate(message)

    with pytest.raises(NotRunError):
        await consumer.run(handle)
    assert consumer.dead_letters == []
    assert [message.data() for message in consumer.broker.unsettled()] == [b"x"]


async def test_cancelled_receive_batch_hands_its_messages_back() -> None:
    client = FakeClient()
    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        batch = asyncio.create_task(consumer.receive_batch(10, timedelta(hours=1)))
        client.deliver(POLICY.topic, b"1", b"2", b"3")
        await asyncio.to_thread(client.wait_until_taken, POLICY.topic)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch
        again = [await consumer.receive(30 * SECOND) for _ in range(3)]
    assert sorted(message.data() for message in again if message) == [b"1", b"2", b"3"]


async def test_batch_ends_at_its_size_or_after_its_wait() -> None:
    client = FakeClient()
    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.topic, b"1", b"2", b"3")
        assert len(await consumer.receive_batch(2, timedelta.max)) == 2
        began = time.monotonic()
        assert len(await consumer.receive_batch(2, 0.5 * SECOND)) == 1
        assert 0.5 <= time.monotonic() - began < 30
        consumer.stop()
        with pytest.raises(ConsumerStoppedError):
            await consumer.receive_batch(2, SECOND)


async def test_handler_can_close_its_consumer() -> None:
    client = FakeClient()
    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.topic, b"1")
        handled = []

        async def handle(message: pulsar.Message) -> None:
            await consumer.close()
            handled.append(message.data())

        await asyncio.wait_for(consumer.run(handle, workers=2), 10)
        assert handled == [b"1"]
        with pytest.raises(ConsumerStoppedError):
            await consumer.receive(SECOND)


async def test_task_of_an_ended_handler_can_close_the_consumer() -> None:
    client = FakeClient()
    consumer = AsyncRetryConsumer(client.as_pulsar(), POLICY)
    await consumer.__aenter__()
    client.deliver(POLICY.topic, b"1")
    over = asyncio.Event()
    closing: list[asyncio.Task[None]] = []

    async def close_later() -> None:
        await over.wait()
        await consumer.close()

    async def handle(_message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        closing.append(asyncio.create_task(close_later()))
        consumer.stop()

    await consumer.run(handle)
    assert client.open != []
    over.set()
    await asyncio.gather(*closing)
    assert client.open == []


async def test_run_cancelled_twice_ends_after_its_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken: list[object] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    handling, ending, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended = []

    async def end_slowly(_message: pulsar.Message) -> None:
        handling.set()
        try:
            await asyncio.sleep(60)
        finally:
            ending.set()
            await go_on.wait()
            ended.append(True)

    running = asyncio.create_task(consumer.run(end_slowly))
    await handling.wait()
    running.cancel()
    await ending.wait()
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [True]
    for thread in threading.enumerate():
        if thread.name == "redrive-run":
            await asyncio.to_thread(thread.join, 10)
    assert broken == []


@pytest.mark.parametrize("count", [1, 40], ids=["begun", "more than threads"])
async def test_cancelled_settlements_end_before_close(count: int) -> None:
    broker = BlockingBroker(POLICY, "store")
    consumer = AsyncInMemoryConsumer(POLICY, broker=broker)
    for _ in range(count):
        consumer.send(b"x")
    messages = [await consumer.receive() for _ in range(count)]
    moving = [asyncio.create_task(consumer.reconsume_later(message)) for message in messages]
    assert await asyncio.to_thread(broker.blocked.wait, 60)
    for task in moving:
        task.cancel()
    await asyncio.wait(moving)
    closing = asyncio.create_task(consumer.close())
    asyncio.get_running_loop().call_later(0.3, broker.release.set)
    await closing
    assert {message.topic for message in broker.unsettled()} == {POLICY.retry_topic}
    assert len(broker.unsettled()) == count


async def test_hung_settlement_delays_close_until_its_timeout() -> None:
    broker = BlockingBroker(POLICY, "acknowledge")
    consumer = AsyncInMemoryConsumer(POLICY, broker=broker)
    consumer.send(b"x")
    moving = asyncio.create_task(consumer.reconsume_later(await consumer.receive()))
    assert await asyncio.to_thread(broker.blocked.wait, 60)
    await consumer.close(timeout=0.2)
    assert not moving.done()
    broker.release.set()
    await moving


class AsksTheLoop(Middleware):
    """Runs a task in the event loop before a message is settled."""

    def __init__(self) -> None:
        self.results: list[bool] = []
        self._loop = asyncio.get_running_loop()

    def settle(self, settle: Settle) -> Settle:
        def ask(settlement: Settlement) -> pulsar.MessageId | None:
            asking = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, result=True), self._loop)
            self.results.append(asking.result(60))
            return settle(settlement)

        return ask


async def test_loop_runs_while_middleware_acknowledges() -> None:
    middleware = AsksTheLoop()
    consumer = AsyncInMemoryConsumer(POLICY, middleware=[middleware])
    consumer.send(b"x")
    await consumer.acknowledge(await consumer.receive())
    assert middleware.results == [True]
    assert consumer.broker.unsettled() == []


async def test_acknowledge_without_waiting_uses_no_thread() -> None:
    by: list[threading.Thread] = []

    class Noting(InMemoryBroker):
        def acknowledge(self, message: InMemoryMessage) -> None:
            by.append(threading.current_thread())
            super().acknowledge(message)

    consumer = AsyncInMemoryConsumer(POLICY, broker=Noting(POLICY))
    consumer.send(b"x")
    await consumer.acknowledge(await consumer.receive())
    assert by == [threading.current_thread()]


DISCARDING = replace(POLICY, max_retries=0, dead_letters=False)
BURST = [b"%d" % number for number in range(300)]


async def test_handler_leaves_no_context_variable_to_the_next() -> None:
    client, seen = FakeClient(), list[str]()
    order: ContextVar[str] = ContextVar("order", default="")

    async def handle(message: pulsar.Message) -> None:
        seen.append(order.get())
        if message.data().endswith(b"0"):
            order.set("set")
            await asyncio.sleep(0)
        if len(seen) == len(BURST):
            consumer.stop()

    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.topic, *BURST)
        await consumer.run(handle)
        assert consumer.in_flight == 0
    assert seen == [""] * len(BURST)


async def test_handlers_that_await_nothing_let_the_loop_run() -> None:
    client, turns = FakeClient(), list[int]()
    handled = 0

    async def take_turns() -> None:
        while True:
            turns.append(handled)
            await asyncio.sleep(0)

    async def handle(_message: pulsar.Message) -> None:
        nonlocal handled
        time.sleep(0.002)  # noqa: ASYNC251 - a busy handler
        handled += 1
        if handled == len(BURST) // 10:
            consumer.stop()

    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.topic, *BURST)
        others = asyncio.create_task(take_turns())
        await consumer.run(handle)
        others.cancel()
    assert set(turns) >= set(range(1, handled - 1))


async def test_pause_in_a_handler_stops_a_burst() -> None:
    client, handled = FakeClient(), list[bytes]()
    resumed = list[asyncio.Task[None]]()

    async def resume() -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(handled) == 200
        consumer.resume()

    async def handle(message: pulsar.Message) -> None:
        handled.append(message.data())
        if len(handled) == 200:
            consumer.pause()
            resumed.append(asyncio.create_task(resume()))
        if len(handled) == len(BURST):
            consumer.stop()

    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.topic, *BURST)
        await consumer.run(handle)
        await asyncio.gather(*resumed)
    assert handled == BURST


async def test_failed_and_late_handlers_of_a_burst_are_settled() -> None:
    client, events = FakeClient(), list[Event]()
    cancelled = 0

    async def handle(message: pulsar.Message) -> None:
        nonlocal cancelled
        if message.data().endswith(b"5"):
            raise LookupError
        if message.data() == b"7":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled += 1
                raise

    def note(event: Event) -> None:
        if event.event is Name.DISCARDED:
            events.append(event)
        if len(events) == len(BURST) // 10 + 1:
            consumer.stop()

    consumer = AsyncRetryConsumer(client.as_pulsar(), DISCARDING, on_event=note)
    async with consumer:
        client.deliver(POLICY.topic, *BURST)
        await consumer.run(handle, workers=3, timeout=0.3)
        assert consumer.in_flight == 0
    assert cancelled == 1


@pytest.mark.parametrize("workers", [1, 5])
async def test_cancelled_run_leaves_a_burst_unsettled(workers: int) -> None:
    client, events = FakeClient(), list[Event]()
    handling, ended = asyncio.Event(), 0

    async def hang(_message: pulsar.Message) -> None:
        nonlocal ended
        handling.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended += 1

    consumer = AsyncRetryConsumer(client.as_pulsar(), DISCARDING, on_event=events.append)
    async with consumer:
        client.deliver(POLICY.topic, *BURST)
        running = asyncio.create_task(consumer.run(hang, workers=workers))
        await handling.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert ended >= 1
    assert {event.event for event in events} <= {Name.LEFT_UNSETTLED}


@pytest.mark.parametrize("error", [pulsar.Interrupted, GeneratorExit])
async def test_exception_that_ends_run_keeps_its_message(error: type[BaseException]) -> None:
    client, events = FakeClient(), list[Event]()
    handled = 0

    async def handle(_message: pulsar.Message) -> None:
        nonlocal handled
        handled += 1
        await asyncio.sleep(0)
        raise error

    consumer = AsyncRetryConsumer(client.as_pulsar(), DISCARDING, on_event=events.append)
    async with consumer:
        client.deliver(POLICY.topic, *BURST)
        with pytest.raises(error):
            await consumer.run(handle)
    assert handled == 1
    assert {event.event for event in events} <= {Name.LEFT_UNSETTLED}
