"""Laws of retry, of sequenced dead letters and of simple consumers, as state machines."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pulsar
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from redrive import Event, Policy, PolicyFile
from redrive.delivery.arrivals import REMEMBERED_SECONDS
from redrive.delivery.consumers.simple import NotInFlightError
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.envelope import for_replay
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import InMemoryConsumer, InMemorySimpleConsumer
from tests.support.memory_brokers import FaultyBroker, Killed

RETRY_POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=2, ladder=Ladder.from_fixed("5s")
)
ACK_TIMEOUT = timedelta(seconds=30)
TOPICS = {RETRY_POLICY.topic, RETRY_POLICY.retry_topic, RETRY_POLICY.dead_letter_topic}
FORGED = st.dictionaries(
    st.sampled_from(
        ["RECONSUMETIMES", "REAL_TOPIC", "RETRY_TOPIC", "ORIGIN_MESSAGE_ID", "DELAY_TIME"]
    ),
    st.sampled_from(["-1", "0", "3", "999", "x", "", "persistent://a/b/c", "1:2\n3"]),
)
REQUESTS = st.sampled_from(
    [{}, {"delay": timedelta(hours=1)}, {"level": 1}, {"level": 0}, {"level": -1}]
)


class Delivery(RuleBasedStateMachine):
    """A broker, one consumer at a time, and the state of each message sent."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = RETRY_POLICY
        self.broker = FaultyBroker(RETRY_POLICY)
        self.folder = TemporaryDirectory()
        self.file = Path(self.folder.name, "policy.json")
        self.mount(RETRY_POLICY)
        self.consumer = self.start()
        self.sent: list[str] = []  # contents, which cannot be forged
        self.settled: set[str] = set()  # handled, or discarded
        self.in_hand: list[pulsar.Message] = []
        self.names: dict[str, str] = {}  # by id, of each message received
        self.since: dict[str, float] = {}  # when it was received
        self.late: list[pulsar.Message] = []  # timed out, with a slow handler
        self.unsent: list[str] = []  # waiting in the consumer to be sent
        self.deliveries: Counter[tuple[str, int]] = Counter()
        self.crashes: Counter[str] = Counter()
        # By id, of messages that were moved on and come again: when, and which consumer knows it.
        self.moved: dict[str, tuple[float, InMemoryConsumer]] = {}
        self.most_retries = RETRY_POLICY.max_retries

    @rule(properties=FORGED)
    def send(self, properties: dict[str, str]) -> None:
        name = f"{len(self.sent)}"
        self.consumer.send(name.encode(), properties=properties)
        self.sent.append(name)

    @rule(wait=st.sampled_from([0, 5, 40, 7_200]))
    def receive(self, wait: int) -> None:
        self.events.clear()
        message = self.consumer.receive(timedelta(seconds=wait))
        self.hear_of_time_outs()
        if message is not None:
            self.in_hand.append(message)
            message_id = id_text(message.message_id())
            assert not self.knows_as_moved(message_id)
            self.names[message_id] = message.data().decode()
            self.since[message_id] = self.broker.clock.monotonic()
            self.late = [slow for slow in self.late if slow is not message]
            number = self.consumer.attempt_of(message).number
            self.deliveries[message.data().decode(), number] += 1

    @precondition(lambda self: self.in_hand)
    @rule(revoked=st.booleans())
    def handle_for_too_long(self, revoked: bool) -> None:  # noqa: FBT001 - drawn
        if revoked:  # an unsent message returns automatically
            self.broker.refused.add(RETRY_POLICY.retry_topic)
        self.pass_time(40)
        self.receive(0)

    @precondition(lambda self: self.in_hand)
    @rule()
    def succeed(self) -> None:
        message = self.in_hand.pop(0)
        self.consumer.acknowledge(message)
        assert message.message_id() not in [kept.id for kept in self.broker.unsettled()]
        self.settled.add(message.data().decode())

    @precondition(lambda self: self.in_hand)
    @rule(request=REQUESTS)
    def fail(self, request: dict[str, Any]) -> None:
        message = self.in_hand.pop()
        name = message.data().decode()
        refused = self.refused_for(message, request)
        ends = self.ends(message, request)  # before the consumer forgets the unsent message
        self.consumer.reconsume_later(message, cause=ValueError(name), **request)
        if refused:
            self.unsent.append(name)
        elif ends and not self.policy.dead_letters:
            self.settled.add(name)

    @precondition(lambda self: self.in_hand)
    @rule()
    def fail_negatively(self) -> None:
        message = self.in_hand.pop()
        name = message.data().decode()
        exhausted = message.redelivery_count() >= self.policy.max_retries
        refused = exhausted and self.refused_for(message, {"level": -1})
        self.consumer.negative_acknowledge(message)
        if refused:
            self.unsent.append(name)
        elif not exhausted:
            self.crashes[name] += 1  # the same attempt again, as after a crash
        elif not self.policy.dead_letters:
            self.settled.add(name)

    @precondition(lambda self: self.late)
    @rule(data=st.data(), way=st.sampled_from(["acknowledge", "reconsume_later", "hand_back"]))
    def ask_too_late(self, data: st.DataObject, way: str) -> None:
        before = [*self.broker.unsettled(), *self.broker.dead_letters]
        getattr(self.consumer, way)(data.draw(st.sampled_from(self.late)))
        assert [*self.broker.unsettled(), *self.broker.dead_letters] == before

    @precondition(lambda self: self.in_hand)
    @rule(request=REQUESTS)
    def die_between_send_and_acknowledgement(self, request: dict[str, Any]) -> None:
        message = self.in_hand[0]
        self.broker.kills = True
        with suppress(Killed):
            self.consumer.reconsume_later(message, **request)
        self.broker.kills = False
        self.crash()

    @rule()
    def crash(self) -> None:
        self.crashes.update(message.data().decode() for message in self.in_hand)
        self.crashes.update(self.unsent)
        self.in_hand.clear()
        self.late.clear()
        self.unsent.clear()
        self.consumer.close()
        self.broker.flush()
        self.consumer = self.start()

    @rule()
    def move_the_topics(self) -> None:
        self.broker.unload()

    @rule()
    def lose_the_connection(self) -> None:
        for message in self.broker.reconnect():
            name = message.data().decode()
            self.crashes[name] += 1  # it may be handled once more
            if name not in self.settled:
                now = self.broker.clock.monotonic()
                self.moved[id_text(message.message_id())] = now, self.consumer
        self.receive(0)

    @rule(seconds=st.sampled_from([-86_400, -1, 0, 3, 86_400]))
    def set_the_clock_of_the_consumer(self, seconds: int) -> None:
        self.broker.clock_error = timedelta(seconds=seconds)

    @rule(retries=st.integers(0, 4), kept=st.booleans())
    def get_another_policy(self, retries: int, kept: bool) -> None:  # noqa: FBT001 - drawn
        self.most_retries = max(self.most_retries, retries)
        self.mount(replace(self.policy, max_retries=retries, dead_letters=kept))
        self.pass_time(1)
        assert self.consumer.policy == self.policy

    @rule(topic=st.sampled_from(sorted(TOPICS - {RETRY_POLICY.topic})))
    def revoke_or_grant(self, topic: TopicName) -> None:
        self.broker.refused ^= {topic}

    def knows_as_moved(self, message_id: str) -> bool:
        """Return True if this consumer moved the message and still remembers it."""
        when, consumer = self.moved.get(message_id, (-REMEMBERED_SECONDS, None))
        recent = self.broker.clock.monotonic() - when < REMEMBERED_SECONDS
        return recent and consumer is self.consumer

    def mount(self, policy: Policy) -> None:
        self.policy = policy
        written = self.file.with_suffix(".new")
        written.write_text(codec.encode(policy))
        written.replace(self.file)

    def start(self) -> InMemoryConsumer:
        self.events: list[Event] = []
        return InMemoryConsumer(
            PolicyFile(self.file),
            broker=self.broker,
            ack_timeout=ACK_TIMEOUT,
            on_event=self.events.append,
        )

    def pass_time(self, seconds: int) -> None:
        self.events.clear()
        self.consumer.advance(timedelta(seconds=seconds))
        self.hear_of_time_outs()

    def hear_of_time_outs(self) -> None:
        """Follow messages that were in flight for too long."""
        for event in self.events:
            name = self.names[event.message_id]
            if event.event == "redrive.attempt_failed":
                assert event.reason == "AckTimeoutError"
                (message,) = (
                    m for m in self.in_hand if id_text(m.message_id()) == event.message_id
                )
                self.in_hand.remove(message)
                self.late.append(message)
            elif event.event == "redrive.unsent":
                if name not in self.unsent:
                    self.unsent.append(name)
            elif event.event in {"redrive.retried", "redrive.dead_lettered"}:
                if name in self.unsent:
                    self.unsent.remove(name)
            elif event.event == "redrive.discarded":
                self.settled.add(name)

    def teardown(self) -> None:
        self.folder.cleanup()

    def ends(self, message: pulsar.Message, request: dict[str, Any]) -> bool:
        number = self.consumer.attempt_of(message).number
        return request.get("level") == -1 or number > self.policy.max_retries

    def refused_for(self, message: pulsar.Message, request: dict[str, Any]) -> bool:
        if not self.ends(message, request):
            return self.policy.retry_topic in self.broker.refused
        return self.policy.dead_letters and self.policy.dead_letter_topic in self.broker.refused

    @invariant()
    def no_message_is_lost(self) -> None:
        kept = {m.data().decode() for m in [*self.broker.unsettled(), *self.broker.dead_letters]}
        assert kept | self.settled >= set(self.sent)

    @invariant()
    def no_message_is_delivered_more_often_than_the_policy_allows(self) -> None:
        for (name, number), count in self.deliveries.items():
            assert number <= self.most_retries + 1
            assert count <= 1 + self.crashes[name]

    @invariant()
    def no_message_is_in_flight_for_longer_than_its_time(self) -> None:
        now = self.broker.clock.monotonic()
        for message in self.in_hand:
            assert now - self.since[id_text(message.message_id())] < ACK_TIMEOUT.total_seconds()

    @invariant()
    def no_message_leaves_the_topics_of_the_policy(self) -> None:
        assert self.broker.used <= TOPICS


Delivery.TestCase.settings = settings(stateful_step_count=40)
TestTheLawsOfRetry = Delivery.TestCase


SEQUENCED_POLICY = Policy(
    TopicName("shop", "prod", "orders"),
    "billing",
    max_retries=1,
    ladder=Ladder.from_fixed("5s"),
    ordered=True,
    sequenced=True,
    subscription_type=SubscriptionType.KEY_SHARED,
)
MINUTE = timedelta(minutes=1)


class Sequenced(RuleBasedStateMachine):
    """A broker, a consumer, and the handled messages of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = FaultyBroker(SEQUENCED_POLICY)
        self.consumer = self.start()
        self.sent: dict[str, int] = {"a": 0, "b": 0}
        self.done: dict[str, int] = {"a": 0, "b": 0}
        self.in_hand: list[pulsar.Message] = []

    @rule(key=st.sampled_from("ab"), count=st.integers(1, 4))
    def send(self, key: str, count: int) -> None:
        for _ in range(count):
            self.consumer.send(b"%d" % self.sent[key], partition_key=key)
            self.sent[key] += 1

    @rule(dead=st.booleans())
    def handle(self, dead: bool) -> None:  # noqa: FBT001 - drawn
        """Handle the next message; a dead one takes its successors along."""
        self.receive(60)
        if self.in_hand and dead:
            self.fail(-1)
        elif self.in_hand:
            self.succeed()
        self.receive(0)

    @rule(seconds=st.sampled_from([0, 5, 60]))
    def receive(self, seconds: int) -> None:
        message = self.consumer.receive(seconds)
        if message is not None:
            assert int(message.data()) <= self.done[message.partition_key()]
            self.in_hand.append(message)

    @precondition(lambda self: self.in_hand)
    @rule()
    def succeed(self) -> None:
        message = self.in_hand.pop(0)
        key, number = message.partition_key(), int(message.data())
        assert number <= self.done[key]
        self.done[key] = max(self.done[key], number + 1)
        self.consumer.acknowledge(message)

    @precondition(lambda self: self.in_hand)
    @rule(level=st.sampled_from([0, -1]))
    def fail(self, level: int) -> None:
        self.consumer.reconsume_later(self.in_hand.pop(0), level=level, cause=ValueError())

    @rule()
    def move_the_topics(self) -> None:
        self.broker.unload()

    @rule(
        topic=st.sampled_from(
            [SEQUENCED_POLICY.dead_letter_topic, SEQUENCED_POLICY.sequences_topic]
        )
    )
    def refuse_or_take(self, topic: TopicName) -> None:
        self.broker.refused ^= {topic}

    @rule(dies=st.booleans())
    def restart(self, dies: bool) -> None:  # noqa: FBT001 - drawn
        if dies and self.in_hand:
            self.broker.kills = True
            with suppress(Killed):
                self.consumer.reconsume_later(self.in_hand[0], level=-1)
            self.broker.kills = False
        self.in_hand.clear()
        self.consumer.close()
        self.broker.flush()
        self.consumer = self.start()

    @rule(every=st.sampled_from([1, 2, 3]), after=st.integers(0, 2))
    def replay(self, every: int, after: int) -> None:
        letters = self.broker.dead_letters[after::every]
        for letter in letters:
            self.broker.dead_letters.remove(letter)
            headers = for_replay(letter.properties(), replay="shop/test", source="test")
            self.broker.store(SEQUENCED_POLICY.retry_topic, replace(letter, headers=headers))

    def teardown(self) -> None:
        self.broker.refused.clear()
        self.restart(dies=False)
        for _ in range(sum(self.sent.values()) + 1):
            while (message := self.consumer.receive(2 * MINUTE)) is not None:
                self.in_hand.append(message)
                self.succeed()
            self.replay(1, 0)
        assert self.done == self.sent
        assert not self.broker.unsettled()

    @invariant()
    def no_key_is_ahead_of_what_was_sent(self) -> None:
        assert all(self.done[key] <= self.sent[key] for key in "ab")

    def start(self) -> InMemoryConsumer:
        return InMemoryConsumer(SEQUENCED_POLICY, broker=self.broker)


Sequenced.TestCase.settings = settings(stateful_step_count=40)
TestTheLawOfSequences = Sequenced.TestCase


PULLING_POLICY = Policy(TopicName("shop", "prod", "orders"), "billing", max_retries=2)
SECOND = timedelta(seconds=1)


class Pulling(RuleBasedStateMachine):
    """A broker, two consumers, and the holder and end of each message."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = FaultyBroker(PULLING_POLICY)
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
        self.broker.refused ^= {PULLING_POLICY.retry_topic}

    @rule(who=who)
    def lose_the_connection(self, who: int) -> None:
        """The consumer is alone: it cannot know messages that another one takes."""
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

        return InMemorySimpleConsumer(PULLING_POLICY, broker=self.broker, on_event=hear)

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
            assert number <= PULLING_POLICY.max_retries + 1
            assert count <= 1 + self.crashes[name]


Pulling.TestCase.settings = settings(stateful_step_count=40)
TestTheLawsOfPulling = Pulling.TestCase


def test_unsent_retry_is_sent_later_as_the_next_attempt() -> None:
    consumer = InMemorySimpleConsumer(PULLING_POLICY)
    consumer.broker.refused.add(PULLING_POLICY.retry_topic)
    consumer.send(b"x")
    consumer.receive(1, 10 * SECOND)
    assert consumer.receive(1, 10 * SECOND, 60 * SECOND) == []
    consumer.broker.refused.clear()
    (again,) = consumer.receive(1, 10 * SECOND, 60 * SECOND)
    assert consumer.attempt_of(again).number == 2
    assert again.topic_name() == str(PULLING_POLICY.retry_topic)


def test_failed_expiry_returns_the_message_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Moody(InMemoryBroker):
        def acknowledge(self, message: InMemoryMessage) -> None:
            """Fail for the first."""
            if message.data() == b"1" and message.topic == PULLING_POLICY.topic:
                raise ConnectionError("away")
            super().acknowledge(message)

    consumer = InMemorySimpleConsumer(PULLING_POLICY, broker=Moody(PULLING_POLICY))
    for content in (b"1", b"2"):
        consumer.send(content)
    assert len(consumer.receive(2, 10 * SECOND)) == 2
    again = consumer.receive(3, 10 * SECOND, 12 * SECOND)
    again += consumer.receive(3, 10 * SECOND, 10 * SECOND)
    assert sorted(message.data() for message in again) == [b"1", b"1", b"2"]
    assert "is handed out again" in caplog.text
