"""The law of sequenced dead letters: no message of a key is done before those that precede it.

Under any sequence of failures, deaths of processes, refused sends, unloads and replays of some or
all dead letters; and when all is replayed often enough, all is done.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pulsar
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from redrive import Policy
from redrive.policy.envelope import for_replay
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.consumers import InMemoryConsumer
from tests.support.faulty_broker import FaultyBroker, Killed

POLICY = Policy(
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
    """A broker, a consumer, and what is done of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = FaultyBroker(POLICY)
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
        """Handle what comes; one that dies takes those behind it along."""
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

    @rule(topic=st.sampled_from([POLICY.dead_letter_topic, POLICY.sequences_topic]))
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
            self.broker.store(POLICY.retry_topic, replace(letter, headers=headers))

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
        return InMemoryConsumer(POLICY, broker=self.broker)


Sequenced.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestTheLawOfSequences = Sequenced.TestCase
