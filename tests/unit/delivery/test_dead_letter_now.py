"""Messages that an operator has dead-lettered at their next failure, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pulsar
import pytest

from redrive import Policy, PolicyFile
from redrive.delivery.middleware.scheduling import REQUESTS_READ_EVERY_SECONDS
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.envelope import DEAD_REASON, RECONSUMETIMES
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.testing.consumers import InMemoryConsumer, InMemorySimpleConsumer

POLICY = Policy(
    "persistent://shop/prod/orders",
    "fulfilment",
    max_retries=16,
    ladder=Ladder.from_fixed("70s"),  # the requests are read every minute
)
ORDERED = replace(POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True)


class Policies:
    """The policy file of a consumer."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.path, self.policy = folder / "policy.json", policy
        self.path.write_text(codec.encode(policy), encoding="utf-8")

    def end_now(self, origin: str) -> None:
        new = self.path.with_suffix(".new")
        policy = replace(self.policy, dead_letter_now=frozenset({origin}))
        new.write_text(codec.encode(policy), encoding="utf-8")
        new.replace(self.path)


@pytest.mark.parametrize("policy", [POLICY, ORDERED], ids=["shared", "per key"])
def test_named_message_is_dead_at_its_next_failure(tmp_path: Path, policy: Policy) -> None:
    policies = Policies(tmp_path, policy)
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison", partition_key="k"))
    for _ in range(20):
        consumer.send(b"good", partition_key="k")
    began, handled = consumer.broker.clock.now(), []

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"poison":
            if consumer.broker.clock.now() - began >= timedelta(minutes=2):
                policies.end_now(origin)
            raise ValueError
        handled.append(consumer.broker.clock.now() - began)

    consumer.run(handle)
    (letter,) = consumer.dead_letters
    assert letter.properties()[DEAD_REASON] == "Requested"
    assert letter.properties()[RECONSUMETIMES] == "3"
    assert len(handled) == 20
    assert all(when < timedelta(minutes=3) for when in handled)
    assert (min(handled) >= timedelta(minutes=2)) is policy.ordered
    assert consumer.broker.unsettled() == []


def test_request_ends_the_wait_of_a_blocked_key(tmp_path: Path) -> None:
    policies = Policies(tmp_path, replace(ORDERED, ladder=Ladder.from_fixed("2h")))
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison", partition_key="k"))
    consumer.send(b"behind", partition_key="k")
    consumer.send(b"other", partition_key="other")
    began, handled = consumer.broker.clock.now(), {}

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"poison":
            raise ValueError
        if message.data() == b"other":  # the poison has failed
            policies.end_now(origin)
        handled[message.data()] = consumer.broker.clock.now() - began

    consumer.run(handle)
    (letter,) = consumer.dead_letters
    assert letter.properties()[DEAD_REASON] == "Requested"
    assert letter.properties()[RECONSUMETIMES] == "2"
    assert handled[b"behind"] <= timedelta(seconds=REQUESTS_READ_EVERY_SECONDS)
    assert consumer.broker.unsettled() == []


def test_negatively_acknowledged_message_is_dead_if_named(tmp_path: Path) -> None:
    policies = Policies(tmp_path, POLICY)
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison"))
    consumer.negative_acknowledge(consumer.receive())
    assert consumer.dead_letters == []
    consumer.advance(timedelta(minutes=2))
    policies.end_now(origin)
    consumer.negative_acknowledge(consumer.receive())
    (letter,) = consumer.dead_letters
    assert letter.properties()[DEAD_REASON] == "Requested"


def test_message_of_simple_consumer_is_dead_if_named(tmp_path: Path) -> None:
    policies = Policies(tmp_path, POLICY)
    consumer = InMemorySimpleConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison"))
    policies.end_now(origin)
    consumer.advance(timedelta(minutes=1))
    (message,) = consumer.receive(1, invisible=10)
    consumer.fail(message, cause=ValueError())
    assert [letter.properties()[DEAD_REASON] for letter in consumer.dead_letters] == ["Requested"]


def test_named_message_is_retried_without_dead_letters(tmp_path: Path) -> None:
    policies = Policies(tmp_path, replace(POLICY, dead_letters=False))
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    policies.end_now(id_text(consumer.send(b"poison")))
    consumer.advance(timedelta(minutes=1))
    calls = []

    def handle(message: pulsar.Message) -> None:
        calls.append(message)
        raise ValueError

    consumer.run(handle)
    assert len(calls) == 17
