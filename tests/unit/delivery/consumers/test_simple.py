"""Simple consumers: interruption, and messages in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import cast

import pulsar
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from redrive import Policy, SimpleConsumer
from redrive.delivery.consumers.simple import (
    InFlight,
    NotInFlightError,
    check_invisible,
    check_unordered,
)
from redrive.delivery.middleware.chain import Middleware, Receive
from redrive.errors import InvalidSpecError
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage
from redrive.testing.consumers import InMemorySimpleConsumer

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
MINUTE = timedelta(minutes=1)


class Interrupting(Middleware):
    """Ends the third reception."""

    def __init__(self) -> None:
        self.receptions = 0

    def receive(self, receive: Receive) -> Receive:
        def receive_or_end(timeout: float | None) -> pulsar.Message | None:
            self.receptions += 1
            if self.receptions == 3:
                raise KeyboardInterrupt
            return receive(timeout)

        return receive_or_end


def test_interrupted_receive_keeps_its_messages_for_the_next() -> None:
    consumer = InMemorySimpleConsumer(POLICY, middleware=[Interrupting()])
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    with pytest.raises(KeyboardInterrupt):
        consumer.receive(3, MINUTE, MINUTE)
    received = consumer.receive(3, MINUTE, MINUTE)
    assert [message.data() for message in received] == [b"1", b"2", b"3"]
    assert [consumer.attempt_of(message).number for message in received] == [1, 1, 1]


def test_failed_acknowledgement_stores_no_second_dead_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = InMemorySimpleConsumer(replace(POLICY, max_retries=0))
    consumer.send(b"x")
    acknowledge, failures = consumer.broker.acknowledge, [pulsar.ConnectError("lost")]

    def fail_once(message: InMemoryMessage) -> None:
        if failures:
            raise failures.pop()
        acknowledge(message)

    monkeypatch.setattr(consumer.broker, "acknowledge", fail_once)
    assert len(consumer.receive(1, MINUTE)) == 1
    consumer.advance(MINUTE + timedelta(seconds=1))
    assert consumer.receive(1, MINUTE, 1) == []
    assert [letter.data() for letter in consumer.dead_letters] == [b"x"]
    consumer.broker.unload()
    assert consumer.receive(1, MINUTE, 1) == []
    assert consumer.broker.unsettled() == []


def fail_with_text(consumer: SimpleConsumer, message: pulsar.Message) -> None:
    consumer.fail(message, cause=cast("BaseException", "no exception"))


@pytest.mark.parametrize("settle", [SimpleConsumer.acknowledge, fail_with_text])
def test_message_is_in_flight_after_a_failed_settlement(
    monkeypatch: pytest.MonkeyPatch, settle: Callable[[SimpleConsumer, pulsar.Message], None]
) -> None:
    consumer = InMemorySimpleConsumer(POLICY)
    consumer.send(b"x")
    (message,) = consumer.receive(1, MINUTE)
    with monkeypatch.context() as broken:
        broken.setattr(consumer.broker, "acknowledge", None)
        with pytest.raises((TypeError, InvalidSpecError)):
            settle(consumer, message)
    consumer.advance(MINUTE)
    (again,) = consumer.receive(1, MINUTE, MINUTE)
    assert consumer.attempt_of(again).number == 2


@pytest.mark.parametrize("seconds", [10, 43_200])
def test_invisible_duration_at_its_limits_is_accepted(seconds: int) -> None:
    assert check_invisible(timedelta(seconds=seconds)) == timedelta(seconds=seconds)


@pytest.mark.parametrize("seconds", [9.999, 43_200.001, 0, -10])
def test_invisible_duration_out_of_range_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidSpecError, match="10 s to 12 h"):
        check_invisible(timedelta(seconds=seconds))


@given(st.integers(10, 43_200), st.data())
def test_invisible_duration_includes_the_time_spent(invisible: int, data: st.DataObject) -> None:
    spent = data.draw(st.integers(0, invisible - 1))
    flight = InFlight[str]()
    flight.begin("m", "m", 0, timedelta(seconds=invisible))
    # A handler that fails at *spent* does nothing more; the message comes after the rest.
    end = flight.next_end()
    assert end is not None
    assert end - spent == invisible - spent
    assert flight.expired(end - 0.001) == []
    assert flight.expired(end) == ["m"]


class Flight(RuleBasedStateMachine):
    """Messages in flight, compared with a plain record of each end."""

    def __init__(self) -> None:
        super().__init__()
        self.flight = InFlight[str]()
        self.now = 0.0
        self.ends: dict[str, float] = {}

    keys = st.sampled_from("abc")
    durations = st.integers(10, 60)

    @rule(seconds=st.integers(1, 40))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule(key=keys, seconds=durations)
    def begin(self, key: str, seconds: int) -> None:
        self.flight.begin(key, key, self.now, timedelta(seconds=seconds))
        self.ends[key] = self.now + seconds

    @rule(key=keys, seconds=durations)
    def change(self, key: str, seconds: int) -> None:
        if self.ends.get(key, 0.0) > self.now:
            self.flight.change(key, self.now, timedelta(seconds=seconds))
            self.ends[key] = self.now + seconds
        else:
            with pytest.raises(NotInFlightError, match="ask for more time before it ends"):
                self.flight.change(key, self.now, timedelta(seconds=seconds))

    @rule(key=keys)
    def settle(self, key: str) -> None:
        if self.ends.get(key, 0.0) > self.now:
            self.flight.settle(key, self.now)
            del self.ends[key]
        else:
            with pytest.raises(NotInFlightError):
                self.flight.settle(key, self.now)

    @rule()
    def look_for_what_has_ended(self) -> None:
        over = {key: end for key, end in self.ends.items() if end <= self.now}
        expired = self.flight.expired(self.now)
        assert [over[key] for key in expired] == sorted(over.values())
        for key in expired:
            del self.ends[key]
        assert self.flight.expired(self.now) == []

    @invariant()
    def the_next_end_is_the_earliest(self) -> None:
        assert self.flight.next_end() == min(self.ends.values(), default=None)


Flight.TestCase.settings = settings(stateful_step_count=40)
TestMessagesInFlight = Flight.TestCase


ENDS = """
import os, signal, time
from redrive import Policy, SimpleConsumer
from redrive.delivery import assembly
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.connection import InMemoryConnection
from redrive.testing.consumers import InMemorySimpleConsumer

assembly.ClientConnection = InMemoryConnection
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
policy = Policy(TopicName("shop", "prod", "orders"), "billing")
broker = InMemoryBroker(policy)
InMemorySimpleConsumer(policy, broker=broker).send(b"x")
consumer = SimpleConsumer(broker, policy, on_event=lambda event: print(event.event, flush=True))
consumer.receive(1, 60)
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_end_of_the_process_counts_receptions() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    counted = ["redrive.attempt_failed", "redrive.retried"]
    assert ended.stdout.split() == [*counted, str(-signal.SIGTERM), *counted]
    assert "Traceback" not in ended.stderr


ENDS_OF_A_LOOP = """
import asyncio, os, signal
from redrive import AsyncSimpleConsumer, Policy
from redrive.delivery import assembly
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.connection import InMemoryConnection
from redrive.testing.consumers import InMemorySimpleConsumer

assembly.ClientConnection = InMemoryConnection
policy = Policy(TopicName("shop", "prod", "orders"), "billing")
broker = InMemoryBroker(policy)
InMemorySimpleConsumer(policy, broker=broker).send(b"x")

async def main():
    show = lambda event: print(event.event, flush=True)
    async with AsyncSimpleConsumer(broker, policy, on_event=show) as consumer:
        await consumer.receive(1, 60)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_sigterm_counts_receptions_of_an_asyncio_consumer() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_OF_A_LOOP],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    assert ended.stdout.split() == ["redrive.attempt_failed", "redrive.retried"]
    assert "Traceback" not in ended.stderr


def test_ordered_policy_is_refused_for_simple_consumers() -> None:
    policy = Policy(TopicName("shop", "prod", "orders"), "billing", SubscriptionType.KEY_SHARED)
    assert check_unordered(policy) is policy
    ordered = replace(policy, ordered=True)
    refusal = r"cannot keep the order.*got 'the ordered policy billing'"
    with pytest.raises(InvalidSpecError, match=refusal):
        InMemorySimpleConsumer(ordered)
    with pytest.raises(InvalidSpecError, match=refusal):
        SimpleConsumer(cast("pulsar.Client", None), ordered)
