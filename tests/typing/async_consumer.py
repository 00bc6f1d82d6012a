"""Never run: mypy, strict, checks that the public API can be used, and can't be misused."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import assert_type

import pulsar

from redrive import AsyncRetryConsumer, Attempt, Done, FailureRules, PolicyFile, prometheus
from redrive.testing.consumers import AsyncInMemoryConsumer

client = pulsar.Client("pulsar://localhost:6650")
SECOND = timedelta(seconds=1)


async def handle(message: pulsar.Message) -> None:
    """Handle it."""


async def handle_attempt(message: pulsar.Message, attempt: Attempt) -> int:
    """Handle it by what it has been through."""
    return len(message.data()) + attempt.number


def handle_at_once(message: pulsar.Message) -> None:
    """Not what `run` is meant for."""


async def handle_many(messages: Sequence[pulsar.Message]) -> list[Done | Exception | None]:
    """Handle them, and answer for each."""
    return [Done() for _ in messages]


async def consume() -> None:
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
        await consumer.run(handle, workers=100, rules=FailureRules(dead_letter_on=(ValueError,)))
        await consumer.run(handle_attempt)
        await consumer.run(handle_at_once)  # type: ignore[arg-type]
        await consumer.run_batches(handle_many, size=10, wait=SECOND, explicit=True)
        consumer.pause()
        consumer.resume()
        consumer.stop()
    prometheus.follow(consumer)
    await AsyncInMemoryConsumer(PolicyFile()).run(handle)
