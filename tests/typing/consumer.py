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
    Attempt,
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
    load_policy,
    prometheus,
)
from redrive.delivery.middleware.chain import Middleware
from redrive.opentelemetry import Tracing
from redrive.policy.model import OutageLimits

client = pulsar.Client("pulsar://localhost:6650")

redrive.Nothing()  # type: ignore[attr-defined]

assert_type(load_policy(), Policy)
assert_type(load_policy("policy.json"), Policy)
assert_type(load_policy(Path("policy.json")), Policy)
load_policy(b"policy.json")  # type: ignore[arg-type]


def handle(message: pulsar.Message) -> None:
    """Handle it."""


def handle_and_answer(message: pulsar.Message) -> int:
    """Handle it, and return what `run` does not care about."""
    return len(message.data())


def handle_attempt(message: pulsar.Message, attempt: Attempt) -> int:
    """Handle it by what it has been through."""
    return len(message.data()) + attempt.number


def handle_two(first: pulsar.Message, second: pulsar.Message, attempt: Attempt) -> None:
    """Not what `run` calls."""


def handle_number(message: pulsar.Message, attempt: int) -> None:
    """Not what `run` calls."""


def handle_many(messages: Sequence[pulsar.Message]) -> list[Done | Exception | None]:
    """Handle them, and answer for each."""
    return [Done() for _ in messages]


SECOND = timedelta(seconds=1)

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
    consumer.run(handle, rules=FailureRules(dead_letter_on=(ValueError,), delays={OSError: SECOND}))
    consumer.run(handle, rules=FailureRules(retry_on=(asyncio.CancelledError,)))
    consumer.run_batches(handle_many, size=10, wait=SECOND)
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
Policy("persistent://shop/prod/orders", "fulfilment", ladder=Ladder([1, SECOND]))
Policy(3, "fulfilment")  # type: ignore[arg-type]
Policy("persistent://shop/prod/orders")  # type: ignore[call-arg]
OutageLimits(max_pause=60, max_probe_interval=SECOND)
OutageLimits(max_pause="1h")  # type: ignore[arg-type]
RetryConsumer(client, "policy.json")  # type: ignore[arg-type]
RetryConsumer(client, load_policy(), "till-1")  # type: ignore  # noqa: PGH003 - mypy gives one of two codes

try:
    load_policy()
except RedriveError as error:
    assert_type(error.reason, str)
