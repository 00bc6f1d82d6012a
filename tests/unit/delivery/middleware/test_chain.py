"""Stages of middleware: calls, order, permitted changes; messages not settled in time."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pulsar
import pytest

from redrive import CrashLog, Event, NotSentError, Policy, RetryConsumer
from redrive.delivery.assembly import Options, RetryOptions, assemble
from redrive.delivery.middleware.ack_timeouts import AckTimeouts
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
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.errors import InvalidSpecError
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Dead, DeadReason, Retry
from redrive.testing.broker import InMemoryMessage, VirtualClock
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


NOW = datetime(2026, 11, 23, tzinfo=UTC)


def test_repeated_delivery_does_not_delay_other_timeouts() -> None:
    clock = VirtualClock(NOW)
    ack_timeouts = AckTimeouts(timedelta(seconds=10), clock)
    topic = TopicName("shop", "prod", "orders")
    put_off, other = (
        cast("pulsar.Message", InMemoryMessage(topic, pulsar.MessageId(-1, 1, n), b"", NOW))
        for n in range(2)
    )
    ack_timeouts.begin(put_off)
    ack_timeouts.begin(other)
    clock.advance(timedelta(seconds=1))
    ack_timeouts.begin(put_off)
    assert ack_timeouts.next_end() == 10
    clock.advance(timedelta(seconds=9))
    assert ack_timeouts.expired() == [other]
    assert ack_timeouts.next_end() == 11


SHARED = Policy(TopicName("shop", "prod", "orders"), "fulfilment", ladder=Ladder.from_fixed("5s"))
ORDERED = replace(SHARED, ordered=True, subscription_type=SubscriptionType.KEY_SHARED)
LONG = timedelta(hours=10)


def receive(consumer: InMemoryConsumer) -> Any:  # noqa: ANN401 - the client publishes no types
    message = consumer.receive(LONG)
    assert message is not None
    return message


def test_timed_out_message_is_settled_when_it_returns() -> None:
    events: list[Event] = []
    consumer = InMemoryConsumer(ORDERED, ack_timeout=TEN, on_event=events.append)
    for content in (b"1", b"2"):
        consumer.send(content, partition_key="k")
    receive(consumer)
    again = receive(consumer)
    assert (again.data(), consumer.attempt_of(again).number) == (b"1", 2)
    consumer.acknowledge(again)
    following = receive(consumer)
    assert following.data() == b"2"
    consumer.acknowledge(following)
    assert consumer.broker.unsettled() == []
    assert "redrive.late_success" not in [event.event for event in events]


def test_timed_out_unsent_message_can_be_settled_later() -> None:
    consumer = InMemoryConsumer(SHARED, ack_timeout=TEN, handle_again_when_unsent=True)
    consumer.broker.refused.add(SHARED.retry_topic)
    consumer.send(b"x")
    first = receive(consumer)
    consumer.advance(TEN)
    consumer.acknowledge(first)  # too late, and not yet handed out again
    again = receive(consumer)
    assert consumer.attempt_of(again).number == 2
    consumer.acknowledge(again)
    assert consumer.broker.unsettled() == []
    assert consumer.receive(LONG) is None


def test_settlements_after_the_timeout_are_ignored() -> None:
    consumer = InMemoryConsumer(SHARED, ack_timeout=TEN)
    consumer.send(b"x")
    late = receive(consumer)
    consumer.advance(TEN)
    consumer.acknowledge(late)
    consumer.reconsume_later(late)
    consumer.negative_acknowledge(late)
    consumer.hand_back(late)
    (copy,) = consumer.broker.unsettled()
    assert copy.topic == SHARED.retry_topic
    assert consumer.dead_letters == []


def test_message_delayed_by_a_rate_does_not_time_out() -> None:
    consumer = InMemoryConsumer(SHARED, ack_timeout=TEN)
    handled: list[bytes] = []
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    consumer.run(lambda message: handled.append(message.data()), max_rate=0.05)
    assert handled == [b"1", b"2", b"3"]
    assert consumer.broker.unsettled() == []


def test_failed_note_loses_no_message_and_no_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = CrashLogFile.end
    failed: list[str] = []

    def end_but_once(log_file: CrashLogFile, key: str) -> None:
        if not failed:
            failed.append(key)
            raise OSError(errno.ENOSPC, "the disk is full")
        end(log_file, key)

    monkeypatch.setattr(CrashLogFile, "end", end_but_once)
    consumer = InMemoryConsumer(SHARED, crash_log=CrashLog(tmp_path), ack_timeout=TEN)
    for content in (b"1", b"2"):
        consumer.send(content)
    receive(consumer)
    receive(consumer)
    consumer.advance(TEN)
    assert "the disk is full" in caplog.text
    again = [receive(consumer) for _ in range(2)]
    assert sorted((message.data(), message.topic == SHARED.retry_topic) for message in again) == [
        (b"1", False),
        (b"2", True),
    ]
    for message in again:
        consumer.acknowledge(message)
    assert consumer.broker.unsettled() == []
    consumer.close()
    assert not list(tmp_path.glob("*.notes"))


def test_settlement_with_invalid_cause_keeps_the_message() -> None:
    consumer = InMemoryConsumer(replace(SHARED, max_retries=0), ack_timeout=TEN)
    consumer.send(b"x")
    message = receive(consumer)
    wrong: Any = "no exception"
    with pytest.raises(InvalidSpecError, match="cause must be"):
        consumer.reconsume_later(message, cause=wrong)
    with pytest.raises(InvalidSpecError, match="cause must be"):
        consumer.negative_acknowledge(message, cause=wrong)
    assert consumer.dead_letters == []
    consumer.advance(TEN)
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "AckTimeoutError"


@pytest.mark.parametrize("simple", [False, True], ids=["timed out", "expired"])
def test_close_waits_for_one_late_message_not_for_all(*, simple: bool) -> None:
    events: list[Event] = []

    def close(event: Event) -> None:
        events.append(event)
        if event.event == "redrive.retried":
            consumer.close()

    consumer: InMemoryConsumer | InMemorySimpleConsumer
    if simple:
        consumer = InMemorySimpleConsumer(SHARED, on_event=close)
    else:
        consumer = InMemoryConsumer(SHARED, ack_timeout=TEN, on_event=close)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    if isinstance(consumer, InMemorySimpleConsumer):
        assert len(consumer.receive(3, TEN)) == 3
    else:
        for _ in range(3):
            receive(consumer)
    consumer.advance(TEN)
    names = [event.event for event in events if event.event != "redrive.left_unsettled"]
    assert names == ["redrive.attempt_failed", "redrive.retried"]


def test_exit_without_close_waits_for_one_late_message() -> None:
    """The interpreter closes the timers alone, see `concurrency.Timer`."""
    events: list[str] = []

    def end(event: Event) -> None:
        events.append(event.event)
        for timer in list(consumer.broker.clock.timers):
            timer.close()

    consumer = InMemoryConsumer(SHARED, ack_timeout=TEN, on_event=end)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
        receive(consumer)
    consumer.advance(TEN)
    assert events == ["redrive.attempt_failed", "redrive.retried"]
