"""Stages of middleware: calls, order, and permitted changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive import CrashLog, NotSentError, Policy, RetryConsumer
from redrive.delivery.assembly import Options, RetryOptions, assemble
from redrive.delivery.middleware.chain import (
    Acknowledge,
    BoundConsumer,
    Forward,
    Handle,
    Hop,
    Middleware,
    Outcome,
    Receive,
    Settle,
    Settlement,
    Take,
)
from redrive.delivery.middleware.outage_breaker import OutageBreaker
from redrive.policy.ladder import Ladder
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, DeadReason, Retry
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)
from tests.support.fake_client import FakeClient

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing", ladder=Ladder.from_fixed("5s"))
TEN = timedelta(seconds=10)
Stage = Callable[..., Any]


class Recorder(Middleware):
    """Records its calls under a name."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.consumer: BoundConsumer | None = None
        self._notes = notes

    def _noted(self, stage: str, inner: Stage) -> Stage:
        def noted(*arguments: Any) -> Any:  # noqa: ANN401 - as the stage has it
            self._notes.append(f"{self.name} {stage}")
            return inner(*arguments)

        return noted

    def bind(self, consumer: BoundConsumer) -> Middleware:
        self.consumer = consumer
        return self

    def take(self, take: Take) -> Take:
        return self._noted("take", take)

    def receive(self, receive: Receive) -> Receive:
        return self._noted("receive", receive)

    def handle(self, handle: Handle) -> Handle:
        return self._noted("handle", handle)

    def settle(self, settle: Settle) -> Settle:
        return self._noted("settle", settle)

    def forward(self, forward: Forward) -> Forward:
        return self._noted("forward", forward)

    def close(self) -> None:
        self._notes.append(f"{self.name} close")


def pairs(*stages: str) -> list[str]:
    """Name each of *stages* as two middlewares note it."""
    return [f"{name} {stage}" for stage in stages for name in ("outer", "inner")]


SUCCESS = pairs("take", "receive", "handle", "settle")
FAILURE = [*SUCCESS, *pairs("forward")]
END = [*pairs("take", "receive"), *pairs("close")]


def fail_once() -> Callable[[object], None]:
    errors = [LookupError()]

    def handle(_message: object) -> None:
        if errors:
            raise errors.pop()

    return handle


def test_stages_call_middleware_from_first_to_last() -> None:
    notes: list[str] = []
    outer, inner = Recorder("outer", notes), Recorder("inner", notes)
    with InMemoryConsumer(POLICY, middleware=[outer, inner]) as consumer:
        consumer.send(b"x")
        consumer.run(fail_once())
    assert notes == [*FAILURE, *SUCCESS, *END]
    assert outer.consumer is inner.consumer is consumer


@pytest.mark.parametrize("first", [True, False])
def test_wrapped_settle_sees_success_beside_an_outage_breaker(*, first: bool) -> None:
    notes: list[str] = []
    chain: list[Middleware] = [Recorder("inner", notes), OutageBreaker()]
    with InMemoryConsumer(POLICY, middleware=chain if first else chain[::-1]) as consumer:
        consumer.send(b"x")
        message = consumer.receive()
        consumer.acknowledge(message)
        assert consumer.broker.unsettled() == []
    assert "inner settle" in notes


def test_wrapped_acknowledge_sees_success_only() -> None:
    acknowledged = []

    class Count(Middleware):
        def acknowledge(self, acknowledge: Acknowledge) -> Acknowledge:
            def count(message: pulsar.Message) -> None:
                acknowledge(message)
                acknowledged.append(message.data())

            return count

    with InMemoryConsumer(POLICY, middleware=[Count()]) as consumer:
        consumer.send(b"x")
        consumer.send(b"y")
        consumer.run(fail_once())
    assert acknowledged == [b"y", b"x"]


async def test_middleware_also_serves_asyncio_consumers() -> None:
    notes: list[str] = []
    both: Sequence[Middleware] = [Recorder("outer", notes), Recorder("inner", notes)]
    fail = fail_once()

    async def handle(message: pulsar.Message) -> None:
        fail(message)

    async with AsyncInMemoryConsumer(POLICY, middleware=both) as consumer:
        consumer.send(b"x")
        await consumer.run(handle)
    assert notes == [*FAILURE, *SUCCESS, *END]


class Bury(Middleware):
    """Dead-letters retries immediately, with one more property."""

    def settle(self, settle: Settle) -> Settle:
        def bury(settlement: Settlement) -> pulsar.MessageId | None:
            if isinstance(settlement.verdict, Retry):
                settlement = settlement._replace(verdict=Dead(DeadReason.REQUESTED, 1))
            return settle(settlement)

        return bury

    def forward(self, forward: Forward) -> Forward:
        def sign(hop: Hop) -> pulsar.MessageId:
            return forward(hop._replace(properties={**hop.properties, "by": "us"}))

        return sign


def test_middleware_can_change_verdict_and_copied_properties() -> None:
    events: list[str] = []
    consumer = InMemoryConsumer(
        POLICY, middleware=[Bury()], on_event=lambda event: events.append(event.event)
    )
    consumer.send(b"x")
    consumer.run(fail_once())
    (dead,) = consumer.dead_letters
    assert dead.properties()["by"] == "us"
    assert dead.properties()["REDRIVE_DEAD_REASON"] == "Requested"
    assert events == ["redrive.attempt_failed", "redrive.dead_lettered"]


def test_middleware_also_serves_simple_consumers() -> None:
    notes: list[str] = []
    with InMemorySimpleConsumer(POLICY, middleware=[Recorder("one", notes), Bury()]) as consumer:
        consumer.send(b"x")
        consumer.send(b"y")
        first, _ = consumer.receive(2, TEN)
        consumer.acknowledge(first)
        consumer.advance(TEN)
        assert [letter.data() for letter in consumer.dead_letters] == [b"y"]
    stages = ["receive", "receive", "settle", "settle", "forward", "close"]
    assert notes == [f"one {stage}" for stage in stages]


def test_middleware_sees_a_missing_receipt() -> None:
    seen: list[type[Exception]] = []

    class Watch(Middleware):
        def settle(self, settle: Settle) -> Settle:
            def watch(settlement: Settlement) -> pulsar.MessageId | None:
                try:
                    return settle(settlement)
                except NotSentError as error:
                    seen.append(type(error))
                    raise

            return watch

    consumer = InMemoryConsumer(POLICY, middleware=[Watch()])
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    assert seen == [NotSentError]
    assert len(consumer.broker.unsettled()) == 1


def test_middleware_error_ends_the_run_and_settles_nothing() -> None:
    class Broken(Middleware):
        def settle(self, settle: Settle) -> Settle:  # noqa: ARG002 - never called
            def fail(_settlement: Settlement) -> pulsar.MessageId | None:
                raise ZeroDivisionError

            return fail

    consumer = InMemoryConsumer(POLICY, middleware=[Broken()])
    consumer.send(b"x")
    with pytest.raises(ZeroDivisionError):
        consumer.run(lambda _: None)
    assert len(consumer.broker.unsettled()) == 1


@pytest.mark.parametrize("stage", ["receive", "settle", "forward"])
def test_middleware_that_fails_to_bind_leaves_no_subscription(tmp_path: Path, stage: str) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    notes: list[str] = []
    client, broken, other = FakeClient(), Middleware(), Recorder("other", notes)
    setattr(broken, stage, fail)
    with pytest.raises(ZeroDivisionError):
        RetryConsumer(
            client.as_pulsar(), POLICY,
            ack_timeout=TEN, crash_log=CrashLog(tmp_path), middleware=[other, broken],
        )  # fmt: skip
    assert client.open == []
    assert notes == ["other close"]
    assert not list(tmp_path.glob("*.notes"))


def test_middleware_can_change_the_outcome() -> None:
    class Forgive(Middleware):
        def handle(self, handle: Handle) -> Handle:
            def forgive(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
                try:
                    return handle(messages)
                except LookupError:
                    return [None] * len(messages)

            return forgive

    consumer = InMemoryConsumer(POLICY, middleware=[Forgive()])
    consumer.send(b"x")
    consumer.run(fail_once())
    assert consumer.broker.unsettled() == consumer.dead_letters == []


def test_typed_options_equal_the_accepted_ones() -> None:
    """The types are for callers; the defaults belong to the function."""
    taken = [
        name
        for name, parameter in inspect.signature(assemble).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert sorted(RetryOptions.__annotations__) == sorted(taken)
    assert set(Options.__annotations__) < set(RetryOptions.__annotations__)
