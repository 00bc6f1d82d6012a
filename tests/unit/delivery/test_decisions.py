from __future__ import annotations

from typing import cast

import pulsar
import pytest

from redrive import Policy
from redrive.delivery.decisions import MAX_COUNTED, Attempts
from redrive.delivery.middleware.chain import Failure
from redrive.delivery.parts import SystemClock
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage
from redrive.testing.consumers import InMemoryConsumer

TOPIC = TopicName("shop", "prod", "orders")


class Uncounted(InMemoryMessage):
    """A message as a broker delivers it that counts no redeliveries."""

    def redelivery_count(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER])
def test_what_no_broker_counts_is_counted_message_by_message_until_it_is_settled(
    kind: SubscriptionType,
) -> None:
    consumer = InMemoryConsumer(Policy(TOPIC, "billing", kind, max_retries=2))
    broker = consumer.broker
    for content in (b"bad", b"worse"):
        sent = Uncounted(TOPIC, pulsar.MessageId(-1, 0, 0), content, broker.clock.now())
        broker.store(TOPIC, sent)

    for received in range(1, 4):
        for _ in range(2):
            message = consumer.receive()
            assert consumer.attempt_of(message).number == 1  # as where the broker counts
            if message.data() == b"bad" and received == 3:
                consumer.acknowledge(message)
            else:
                consumer.negative_acknowledge(message)

    (dead,) = consumer.dead_letters
    assert (dead.data(), dead.properties()["RECONSUMETIMES"]) == (b"worse", "3")
    assert broker.unsettled() == []
    assert not consumer._processor.decisions.attempts._given_back  # noqa: SLF001 - what is settled takes no memory


def test_counts_of_what_other_consumers_have_got_since_are_bounded() -> None:
    policy = Policy(TOPIC, "billing", SubscriptionType.EXCLUSIVE)
    attempts = Attempts(lambda: policy, SystemClock())
    kept = message_with(0)
    for number in range(MAX_COUNTED + 10):
        attempts.give_back(message_with(number))
        if number % 1_000 == 0:
            attempts.give_back(kept)
    assert len(attempts._given_back) == MAX_COUNTED  # noqa: SLF001 - what takes memory
    assert attempts.given_back(kept) == 12
    assert attempts.given_back(message_with(1)) == 0


def message_with(entry: int) -> pulsar.Message:
    """A message that is known by its id."""
    message = InMemoryMessage(TOPIC, pulsar.MessageId(-1, 1, entry), b"", SystemClock().now())
    return cast("pulsar.Message", message)


def test_what_failed_here_and_was_never_settled_takes_bounded_memory() -> None:
    policy = Policy(TOPIC, "billing")
    attempts = Attempts(lambda: policy, SystemClock())
    for number in range(MAX_COUNTED + 10):
        message = message_with(number)
        failure = Failure(attempts.of(message), policy, None, None, raised=True)
        attempts.remember(message, failure)
    assert len(attempts._here) == MAX_COUNTED  # noqa: SLF001 - what takes memory
    assert attempts.of(message).number == 2
    assert attempts.of(message_with(1)).number == 1
