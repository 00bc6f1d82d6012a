"""Never run: mypy, strict, checks that the public API can be used, and can't be misused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import assert_type

import pulsar
import pulsar.schema

import redrive
from redrive import (
    AsyncBroadcastConsumer,
    AsyncRetryConsumer,
    AsyncRetryProducer,
    Attempt,
    BroadcastConsumer,
    Cause,
    CrashLog,
    Done,
    FailureRules,
    Ladder,
    Policy,
    PolicyFile,
    Redaction,
    RedriveError,
    RetryConsumer,
    RetryProducer,
    SimpleConsumer,
    load_policy,
    prometheus,
)
from redrive.delivery.middleware.chain import Middleware
from redrive.opentelemetry import Tracing
from redrive.policy.model import OutageLimits
from redrive.testing.consumers import AsyncInMemoryConsumer, InMemorySimpleConsumer

client = pulsar.Client("pulsar://localhost:6650")
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def handle(message: pulsar.Message) -> None:
    """Handle a message."""


def handle_and_answer(message: pulsar.Message) -> int:
    """Handle a message, and return a value that `run` ignores."""
    return len(message.data())


def handle_attempt(message: pulsar.Message, attempt: Attempt) -> int:
    """Handle a message by its attempt."""
    return len(message.data()) + attempt.number


def handle_two(first: pulsar.Message, second: pulsar.Message, attempt: Attempt) -> None:
    """A signature that `run` refuses."""


def handle_number(message: pulsar.Message, attempt: int) -> None:
    """A signature that `run` refuses."""


def handle_many(messages: Sequence[pulsar.Message]) -> list[Done | Exception | None]:
    """Handle messages, with an answer for each."""
    return [Done() for _ in messages]


def handle_list(messages: list[pulsar.Message]) -> None:
    """Handle messages, all of them."""


async def handle_list_async(messages: list[pulsar.Message]) -> None:
    """Handle messages, all of them."""


async def handle_async(message: pulsar.Message) -> None:
    """Handle a message."""


async def handle_attempt_async(message: pulsar.Message, attempt: Attempt) -> int:
    """Handle a message by its attempt."""
    return len(message.data()) + attempt.number


async def handle_many_async(messages: Sequence[pulsar.Message]) -> list[Done | Exception | None]:
    """Handle messages, with an answer for each."""
    return [Done() for _ in messages]


def policies() -> None:
    """Load and make policies."""
    redrive.Nothing()  # type: ignore[attr-defined]
    assert_type(load_policy(), Policy)
    assert_type(load_policy("policy.json"), Policy)
    assert_type(load_policy(Path("policy.json")), Policy)
    load_policy(b"policy.json")  # type: ignore[arg-type]
    Policy("persistent://shop/prod/orders", "fulfilment", ladder=Ladder([1, SECOND]))
    Policy(3, "fulfilment")  # type: ignore[arg-type]
    Policy("persistent://shop/prod/orders")  # type: ignore[call-arg]
    OutageLimits(max_pause=60, max_probe_interval=SECOND)
    OutageLimits(max_pause="1h")  # type: ignore[arg-type]
    try:
        load_policy()
    except RedriveError as error:
        assert_type(error.reason, str)


def retry_consumer() -> None:
    """Consume in threads."""
    with RetryConsumer(client, load_policy(), name="till-1") as consumer:
        assert_type(consumer, RetryConsumer)
        assert_type(consumer.name, str)
        consumer.receive().data()
        consumer.receive(timedelta(seconds=1)).data()  # type: ignore[union-attr]
        if message := consumer.receive(timedelta(seconds=1)):
            consumer.acknowledge(message)
            consumer.reconsume_later(message)
            consumer.reconsume_later(message, delay=timedelta(seconds=1), cause=ValueError())
            consumer.reconsume_later(message, level=-1, cause=KeyboardInterrupt())
            consumer.reconsume_later(message, delay=5)
            consumer.reconsume_later(message, delay="5s")  # type: ignore[arg-type]
            consumer.reconsume_later(message, cause="broken")  # type: ignore[arg-type]
            consumer.reconsume_later(message, timedelta(seconds=1))  # type: ignore[call-arg]
        consumer.run(handle)
        RetryConsumer(client, load_policy(), schema=pulsar.schema.StringSchema())
        consumer.run(handle_and_answer)
        consumer.run(handle_attempt)
        consumer.run(handle_two)  # type: ignore[arg-type]
        consumer.run(handle_number)  # type: ignore[arg-type]
        consumer.run(handle, workers=4, timeout=timedelta(seconds=5), max_rate=0.5, explicit=True)
        consumer.run(
            handle, rules=FailureRules(dead_letter_on=(ValueError,), delays={OSError: SECOND})
        )
        consumer.run(handle, rules=FailureRules(retry_on=(asyncio.CancelledError,)))
        consumer.run_batches(handle_many, size=10, wait=SECOND)
        consumer.run_batches(handle_list)
        consumer.run_batches(handle_and_answer)  # type: ignore[arg-type]
        assert_type(len(consumer.receive_batch(10, SECOND)), int)
        assert_type(consumer.policy.generation, int)
        assert_type(consumer.attempt_of(consumer.receive()).cause, Cause | None)
        consumer.negative_acknowledge(consumer.receive(), cause=ValueError())
        consumer.pause()
        consumer.resume()
        consumer.stop()
        consumer.close()
    RetryConsumer(client, PolicyFile(), redaction=Redaction([r"\d{16}"], hook=str.lower))
    prometheus.follow(RetryConsumer(client, PolicyFile(), on_event=prometheus.count))
    prometheus.follow(load_policy())  # type: ignore[arg-type]
    with Tracing().attempt(consumer, consumer.receive()):
        RetryConsumer(client, PolicyFile(), tracing=Tracing())
    RetryConsumer(client, PolicyFile(), tracing=Tracing)  # type: ignore[arg-type]
    RetryConsumer(client, PolicyFile(), middleware=[Tracing(), Middleware()])
    RetryConsumer(client, PolicyFile(), middleware=Tracing())  # type: ignore[arg-type]
    RetryConsumer(client, PolicyFile(), middle=())  # type: ignore[call-arg]
    RetryConsumer(client, PolicyFile(), ack_timeout=SECOND, crash_log=CrashLog("/notes"))
    RetryConsumer(client, PolicyFile(), ack_timeout=30)
    RetryConsumer(client, PolicyFile(), ack_timeout="30s")  # type: ignore[arg-type]
    RetryConsumer(client, PolicyFile(), nack_delay=30)
    RetryConsumer(client, "policy.json")  # type: ignore[arg-type]
    RetryConsumer(client, load_policy(), "till-1")  # type: ignore  # noqa: PGH003 - mypy gives one of two codes


async def async_consumer() -> None:
    """Consume asynchronously."""
    async with AsyncRetryConsumer(client, PolicyFile(), ack_timeout=SECOND) as consumer:
        assert_type(consumer, AsyncRetryConsumer)
        (await consumer.receive()).data()
        (await consumer.receive(SECOND)).data()  # type: ignore[union-attr]
        for message in await consumer.receive_batch(10, SECOND):
            assert_type(consumer.attempt_of(message).number, int)
            await consumer.acknowledge(message)
            await consumer.reconsume_later(message, delay=SECOND, cause=ValueError())
            await consumer.reconsume_later(message, delay=5)
            await consumer.reconsume_later(message, delay="5s")  # type: ignore[arg-type]
            await consumer.negative_acknowledge(message)
            consumer.hand_back(message)
        await consumer.run(
            handle_async, workers=100, rules=FailureRules(dead_letter_on=(ValueError,))
        )
        await consumer.run(handle_attempt_async)
        await consumer.run(handle)  # type: ignore[arg-type]
        await consumer.run_batches(handle_list_async)
        await consumer.run_batches(handle_many_async, size=10, wait=SECOND, explicit=True)
        consumer.pause()
        consumer.resume()
        consumer.stop()
    prometheus.follow(consumer)
    await AsyncInMemoryConsumer(PolicyFile()).run(handle_async)


def simple_consumer() -> None:
    """Consume on request."""
    with SimpleConsumer(client, PolicyFile(), name="till-1") as consumer:
        assert_type(consumer, SimpleConsumer)
        for message in consumer.receive(32, MINUTE, timeout=MINUTE):
            consumer.change_invisible_duration(message, 2 * MINUTE)
            consumer.acknowledge(message)
            consumer.fail(message, delay=60, cause=ValueError())
            assert_type(consumer.attempt_of(message).number, int)
        consumer.receive(32)  # type: ignore[call-arg]
        consumer.receive(32, 60)
        consumer.receive(32, "60s")  # type: ignore[arg-type]
        consumer.reconsume_later(message)  # type: ignore[attr-defined]
    SimpleConsumer(client, "policy.json")  # type: ignore[arg-type]
    InMemorySimpleConsumer(PolicyFile()).send(b"x")


def broadcast_consumer() -> None:
    """Consume every message of a topic."""
    with BroadcastConsumer(client, "prices", redaction=Redaction([r"\d{16}"])) as consumer:
        consumer.receive().data()
        consumer.receive(timedelta(seconds=1)).data()  # type: ignore[union-attr]
        consumer.run(handle, workers=4, timeout=timedelta(seconds=5), max_rate=0.5, explicit=True)
        consumer.acknowledge(consumer.receive())  # type: ignore[attr-defined]
        consumer.pause()
        consumer.resume()
        consumer.stop()
    AsyncBroadcastConsumer(client, "prices", prefetch=10, crypto=None)
    BroadcastConsumer(client, "prices", middleware=[])  # type: ignore[call-arg]


def producer() -> None:
    """Send."""
    with RetryProducer(client, "orders", send_retries=0, timeout=SECOND, in_flight=4) as producer:
        assert_type(producer, RetryProducer)
        producer.send(b"x", partition_key="k", properties={"a": "b"}, deliver_after=SECOND)
        producer.send(None)
        producer.send(b"x", "k")  # type: ignore[call-arg, arg-type]
        producer.send(b"x", deliver_after=5)
        producer.send(b"x", deliver_after="5s")  # type: ignore[arg-type]
    RetryProducer(client, "orders", timeout=3)
    RetryProducer(client, "orders", timeout="3s")  # type: ignore[arg-type]
    RetryProducer(client, "orders", schema=pulsar.schema.StringSchema()).close()
    RetryProducer(client, "orders", compression=pulsar.CompressionType.LZ4).close()
    RetryProducer(client, "orders", retries=3)  # type: ignore[call-arg]


async def async_producer() -> None:
    """Send asynchronously."""
    async with AsyncRetryProducer(client, "orders", in_flight=100) as producer:
        assert_type(producer, AsyncRetryProducer)
        await producer.send(b"x", event_timestamp=1)
        producer.send(b"x").upper()  # type: ignore[attr-defined]
