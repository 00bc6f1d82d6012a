"""Messages that share key and origin are letters of their own in a sequence."""

from __future__ import annotations

from dataclasses import replace

import pulsar

from redrive import Policy
from redrive.policy.envelope import for_replay
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.consumers import InMemoryConsumer

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=0, ordered=True, sequenced=True,
    subscription_type=SubscriptionType.KEY_SHARED,
)  # fmt: skip


def replay(consumer: InMemoryConsumer, *contents: bytes) -> None:
    """Move dead letters to the retry topic, as a Replay does that selects some."""
    letters = {letter.data(): letter for letter in consumer.dead_letters}
    for content in contents:
        headers = for_replay(letters[content].properties(), replay="shop/fix", source="test")
        copy = replace(letters[content], headers=headers)
        consumer.broker.store(POLICY.retry_topic, copy)
        consumer.broker.dead_letters.remove(letters[content])


def test_replayed_letter_waits_for_one_of_its_origin_before_it() -> None:
    consumer, handled = InMemoryConsumer(POLICY), list[bytes]()

    def handle(message: pulsar.Message) -> None:
        handled.append(message.data())

    def fail(_message: object) -> None:
        raise ConnectionError

    copied = {"ORIGIN_MESSAGE_ID": "12:34:0", "REDRIVE_FIRST_ID": "12:34:0"}
    for content in (b"1", b"2", b"3"):
        consumer.send(content, partition_key="a", properties=copied)
    consumer.run(fail)
    replay(consumer, b"2")
    consumer.run(handle)
    assert handled == []
    replay(consumer, b"1", b"2", b"3")
    consumer.run(handle)
    assert handled == [b"1", b"2", b"3"]
    assert (consumer.dead_letters, consumer.dead_keys) == ([], 0)
