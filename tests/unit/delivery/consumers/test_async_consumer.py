"""What is the asynchronous consumer's own; all else it shares with the other one's contract."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
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
    NotRunError,
    Policy,
    RetryConsumer,
)
from redrive.errors import InvalidSpecError
from redrive.opentelemetry import Tracing
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.testing import (
    AsyncInMemoryConsumer,
    InMemoryBroker,
    InMemoryConsumer,
    InMemoryMessage,
)
from tests.support.fake_client import FakeClient

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=1, ladder=Ladder.from_fixed("5s")
)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    "name", [name for name in dir(RetryConsumer) if not name.startswith("_")] + ["__init__"]
)
def test_both_consumers_have_one_surface(name: str) -> None:
    theirs, ours = getattr(RetryConsumer, name), getattr(AsyncRetryConsumer, name)
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    theirs, ours = (inspect.signature(method).parameters for method in (theirs, ours))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


async def test_the_cause_is_that_of_the_handler_and_tells_nothing_of_the_loop() -> None:
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


async def test_a_handler_out_of_time_is_cancelled_and_has_failed() -> None:
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


async def test_the_loop_goes_on_while_a_message_is_settled() -> None:
    settling, go_on = threading.Event(), threading.Event()
    in_time = []

    class Slow(InMemoryBroker):
        def acknowledge(self, message: InMemoryMessage) -> None:
            """Take as long as the loop lets it."""
            settling.set()
            in_time.append(go_on.wait(10))
            super().acknowledge(message)

    async def handle(_message: pulsar.Message) -> None:
        await asyncio.sleep(0)

    consumer = AsyncInMemoryConsumer(POLICY, broker=Slow(POLICY))
    consumer.send(b"x")
    running = asyncio.create_task(consumer.run(handle))
    assert await asyncio.to_thread(settling.wait, 30)
    go_on.set()
    await running
    assert in_time == [True]
    assert consumer.broker.unsettled() == []


async def test_a_handler_whose_work_is_cancelled_elsewhere_has_failed() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")

    async def handle(_message: pulsar.Message) -> None:
        gone = asyncio.get_running_loop().create_future()
        gone.cancel()
        await gone

    await consumer.run(handle)
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "HandlerCancelledError"


async def test_a_handler_that_awaits_nothing_is_a_handler_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    with caplog.at_level(logging.INFO, "redrive"):
        await consumer.run(lambda _: Done(), explicit=True)  # type: ignore[arg-type]
    assert caplog.records == []
    assert consumer.broker.unsettled() == []


async def test_a_handler_that_takes_a_second_argument_gets_the_attempt() -> None:
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


async def test_a_cancelled_run_cancels_its_handlers_and_leaves_their_messages() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    handling = asyncio.Event()
    ended = asyncio.Event()

    async def hang(_message: pulsar.Message) -> None:
        handling.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    running = asyncio.create_task(consumer.run(hang))
    await handling.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert consumer.dead_letters == []
    assert [message.data() for message in consumer.broker.unsettled()] == [b"x"]


async def test_what_a_handler_does_belongs_to_the_span_of_its_attempt() -> None:
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


async def test_a_consumer_consumes_once_it_was_entered() -> None:
    consumer = AsyncRetryConsumer(cast("pulsar.Client", None), POLICY)
    with pytest.raises(InvalidSpecError, match="async with"):
        await consumer.receive()
    with pytest.raises(InvalidSpecError, match="async with"):
        consumer.stop()


async def test_entering_that_is_cancelled_leaves_nothing_subscribed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entering, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    opened = InMemoryConsumer(POLICY)
    monkeypatch.setattr(opened, "close", closed.set)

    def open_slowly() -> RetryConsumer:
        entering.set()
        go_on.wait(10)
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


async def test_a_cancelled_run_settles_nothing_whatever_its_handlers_make_of_that() -> None:
    consumer = AsyncInMemoryConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"x")
    handling = asyncio.Event()

    async def hang(_message: pulsar.Message) -> None:
        handling.set()
        try:
            await asyncio.sleep(60)
        finally:
            raise ConnectionError

    running = asyncio.create_task(consumer.run(hang))
    await handling.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert consumer.dead_letters == []
    assert [message.data() for message in consumer.broker.unsettled()] == [b"x"]


async def test_a_handler_may_take_for_ever() -> None:
    consumer = AsyncInMemoryConsumer(POLICY)
    consumer.send(b"x")
    handled = []

    async def handle(message: pulsar.Message) -> None:
        await asyncio.sleep(0)
        handled.append(message.data())

    await consumer.run(handle, timeout=timedelta.max)
    assert handled == [b"x"]
    assert consumer.broker.unsettled() == []


async def test_a_handler_that_is_a_generator_ends_run_and_dead_letters_nothing() -> None:
    consumer = AsyncInMemoryConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"x")

    def handle(_message: pulsar.Message) -> Any:  # noqa: ANN401 - what a type checker refuses
        yield

    with pytest.raises(NotRunError):
        await consumer.run(handle)
    assert consumer.dead_letters == []
    assert [message.data() for message in consumer.broker.unsettled()] == [b"x"]


async def test_a_cancelled_receive_batch_hands_back_what_it_has_gathered() -> None:
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


async def test_a_batch_is_complete_at_its_size_or_when_the_wait_is_over() -> None:
    client = FakeClient()
    async with AsyncRetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.topic, b"1", b"2", b"3")
        assert len(await consumer.receive_batch(2, timedelta.max)) == 2
        began = time.monotonic()
        assert len(await consumer.receive_batch(2, 1.5 * SECOND)) == 1
        assert 1.5 <= time.monotonic() - began < 30
        consumer.stop()
        with pytest.raises(ConsumerStoppedError):
            await consumer.receive_batch(2, SECOND)


async def test_a_handler_may_close_its_consumer() -> None:
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
