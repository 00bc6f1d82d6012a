"""The laws of simple consumers: any sequence of receptions, changes, time and what may go wrong.

That is crashes, refused sends, topics that move, connections that are lost and clocks that jump.

No message is ever lost; none is in two hands at a time, nor comes before its invisible duration
ends, but for crashes; none is received more often than its policy allows, but for crashes and for
what was acknowledged in the moment before a connection was lost.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from redrive import Event, Policy
from redrive.delivery.consumers.simple import NotInFlightError
from redrive.messages import id_text
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import InMemorySimpleConsumer
from tests.support.faulty_broker import FaultyBroker

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing", max_retries=2)
SECOND = timedelta(seconds=1)


class Pulling(RuleBasedStateMachine):
    """A broker, two consumers, and who holds what until when."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = FaultyBroker(POLICY)
        self.consumers = [self.start(who) for who in (0, 1)]
        self.sent: list[str] = []
        self.settled: set[str] = set()
        self.returned: set[str] = set()  # settled, when the connection was lost
        self.held: dict[str, tuple[int, Any, float]] = {}  # holder, message, end
        self.received: Counter[tuple[str, int]] = Counter()
        self.crashes: Counter[str] = Counter()
        self.names: dict[str, str] = {}  # by id, of each message received
        self.unsent: dict[str, int] = {}  # the consumer that keeps it, to be received again

    who = st.sampled_from([0, 1])
    durations = st.integers(10, 100)

    @rule()
    def send(self) -> None:
        self.sent.append(f"{len(self.sent)}")
        self.consumers[0].send(self.sent[-1].encode())

    @rule(who=who, count=st.integers(1, 3), seconds=durations, wait=st.sampled_from([0, 7, 60]))
    def receive(self, who: int, count: int, seconds: int, wait: int) -> None:
        for message in self.consumers[who].receive(count, seconds * SECOND, wait * SECOND):
            name = message.data().decode()
            if name in self.held:
                assert self.held[name][2] <= self.now()
            self.held[name] = (who, message, self.now() + seconds)
            self.names[id_text(message.message_id())] = name
            self.unsent.pop(name, None)
            number = self.consumers[who].attempt_of(message).number
            self.received[name, number] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        name, (who, message, end) = data.draw(st.sampled_from(sorted(self.held.items())))
        del self.held[name]
        if self.now() < end:
            self.consumers[who].acknowledge(message)
            self.settled.add(name)
        else:
            with pytest.raises(NotInFlightError):
                self.consumers[who].acknowledge(message)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=durations)
    def change(self, data: st.DataObject, seconds: int) -> None:
        name, (who, message, end) = data.draw(st.sampled_from(sorted(self.held.items())))
        if self.now() < end:
            self.consumers[who].change_invisible_duration(message, seconds * SECOND)
            self.held[name] = (who, message, self.now() + seconds)
        else:
            with pytest.raises(NotInFlightError):
                self.consumers[who].change_invisible_duration(message, seconds * SECOND)

    @rule(seconds=st.sampled_from([1, 9, 50]))
    def pass_time(self, seconds: int) -> None:
        self.consumers[0].advance(seconds * SECOND)

    @rule(who=who)
    def crash(self, who: int) -> None:
        for name, (holder, _, _) in list(self.held.items()):
            if holder == who:
                del self.held[name]
                self.crashes[name] += 1
        for name, holder in list(self.unsent.items()):
            if holder == who:
                del self.unsent[name]
                self.crashes[name] += 1
        self.consumers[who].close()
        self.broker.flush()
        self.consumers[who] = self.start(who)

    @rule()
    def revoke_or_grant(self) -> None:
        self.broker.refused ^= {POLICY.retry_topic}

    @rule(who=who)
    def lose_the_connection(self, who: int) -> None:
        """Of a consumer that is alone: what another one takes meanwhile can't be known to it."""
        self.crash(1 - who)
        for message in self.broker.reconnect():
            name = message.data().decode()
            self.returned.add(name)
            self.crashes[name] += 1  # it may be received once more
        while self.broker.is_due():
            self.receive(who, 1, 10, 0)

    @rule(seconds=st.sampled_from([-86_400, -1, 0, 3, 86_400]))
    def set_the_clocks(self, seconds: int) -> None:
        self.broker.clock_error = timedelta(seconds=seconds)

    def start(self, who: int) -> InMemorySimpleConsumer:
        def hear(event: Event) -> None:
            if event.event == "redrive.unsent":
                self.unsent[self.names[event.message_id]] = who

        return InMemorySimpleConsumer(POLICY, broker=self.broker, on_event=hear)

    def now(self) -> float:
        return self.broker.clock.monotonic()

    @invariant()
    def no_message_is_lost(self) -> None:
        kept = {m.data().decode() for m in [*self.broker.unsettled(), *self.broker.dead_letters]}
        assert kept | self.settled == set(self.sent)
        assert not kept & self.settled - self.returned

    @invariant()
    def no_message_is_received_more_often_than_the_policy_allows(self) -> None:
        for (name, number), count in self.received.items():
            assert number <= POLICY.max_retries + 1
            assert count <= 1 + self.crashes[name]


Pulling.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestTheLawsOfPulling = Pulling.TestCase


def test_what_could_not_be_sent_on_is_sent_when_it_can_be_as_the_next_attempt() -> None:
    consumer = InMemorySimpleConsumer(POLICY)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.receive(1, 10 * SECOND)
    assert consumer.receive(1, 10 * SECOND, 60 * SECOND) == []
    consumer.broker.refused.clear()
    (again,) = consumer.receive(1, 10 * SECOND, 60 * SECOND)
    assert consumer.attempt_of(again).number == 2
    assert again.topic_name() == str(POLICY.retry_topic)


def test_a_message_whose_end_ends_badly_comes_again_and_keeps_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Moody(InMemoryBroker):
        def acknowledge(self, message: InMemoryMessage) -> None:
            """Fail for the first."""
            if message.data() == b"1" and message.topic == POLICY.topic:
                raise ConnectionError("away")
            super().acknowledge(message)

    consumer = InMemorySimpleConsumer(POLICY, broker=Moody(POLICY))
    for content in (b"1", b"2"):
        consumer.send(content)
    assert len(consumer.receive(2, 10 * SECOND)) == 2
    again = consumer.receive(3, 10 * SECOND, 12 * SECOND)
    again += consumer.receive(3, 10 * SECOND, 10 * SECOND)
    assert sorted(message.data() for message in again) == [b"1", b"1", b"2"]
    assert "is handed out again" in caplog.text
