"""Open transactions in the topics of a Replay."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from redrive import RetryConsumer
from redrive.auth.files import job_credentials
from redrive.errors import RedriveError
from redrive.inspection.reader import InspectedTopic
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.reading.positions import encode_number
from redrive.replay.job import run as runs
from redrive.replay.spec import Choice
from sandbox.pulsar import Broker
from tests.support.engines import Local
from tests.support.local_runs import DiesAtLast, Notes, job_of, replay
from tests.support.raw_entries import raw_producer

ProvisionPolicy = Callable[..., Any]
pytestmark = [pytest.mark.usefixtures("replay_token"), pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def broker(open_broker: Broker) -> Broker:
    """A broker that serves transactions."""
    return open_broker


def send_within_transaction(broker: Broker, topic: TopicName) -> None:
    """Store a message of a transaction that stays open."""
    with raw_producer(broker, topic) as producer:
        least, most = encode_number(4, 7), encode_number(5, 1)
        metadata = encode_number(22, 7) + encode_number(23, 1)
        producer.send(b"uncommitted", metadata, command=least + most)


@pytest.mark.parametrize("role", ["dead_letter_topic", "retry_topic", "ledger_topic"])
def test_open_transaction_ends_a_replay_with_its_topic(
    provision_policy: ProvisionPolicy, role: str
) -> None:
    provisioned = provision_policy()
    topic = getattr(provisioned.policy, role)
    provisioned.bury(3)
    with pytest.raises(RuntimeError):  # the next run reads the target
        runs.run(job_of(provisioned, "first"), DiesAtLast(), Notes())
    send_within_transaction(provisioned.broker, topic)
    provisioned.bury(1)
    begun = time.monotonic()
    if role == "ledger_topic":  # a plan takes no ledger over
        with pytest.raises(RedriveError, match="transaction is open"):
            runs.preview(job_of(provisioned), Local(), Notes())

    with pytest.raises(RedriveError) as failure:
        replay(provisioned)

    assert time.monotonic() - begun < 60
    assert failure.value.reason == "TransactionOpen"
    assert topic.local in str(failure.value)


def test_open_transaction_ends_an_inspection(provision_policy: ProvisionPolicy) -> None:
    """It would otherwise show the messages before the transaction as all there are."""
    provisioned = provision_policy()
    broker, policy = provisioned.broker, provisioned.policy
    provisioned.bury(1)
    send_within_transaction(broker, policy.dead_letter_topic)
    provisioned.bury(2)
    topic = InspectedTopic(
        policy.dead_letter_topic,
        policy.dead_letter_subscription,
        broker.service_url,
        broker.admin_url,
        job_credentials(),
    )
    reading = topic.plan(Choice())

    with pytest.raises(RedriveError, match="transaction is open") as failure:
        list(reading.selected(list))

    assert failure.value.reason == "TransactionOpen"
    assert (reading.total, reading.messages) == (4, 1)


def test_open_transaction_in_sequences_holds_failed_messages(
    provision_policy: ProvisionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    """No consumer reads a record behind it, so a dead letter there would block no later message."""
    provisioned = provision_policy()
    broker, client = provisioned.broker, provisioned.client
    policy = dataclasses.replace(
        provisioned.policy,
        max_retries=0,
        ordered=True,
        sequenced=True,
        subscription_type=SubscriptionType.KEY_SHARED,
    )
    for topic in (policy.topic, policy.sequences_topic):
        provisioned.create(topic, policy.subscription, 0)
    send_within_transaction(broker, policy.sequences_topic)
    producer = client.create_producer(str(policy.topic))
    producer.send(b"a1", partition_key="a")

    with RetryConsumer(client, policy) as consumer:
        consumer.reconsume_later(consumer.receive(), cause=ValueError("bad"))

    assert (provisioned.backlog_of_dead_letters(), provisioned.unsettled()) == (0, 1)
    assert f"transaction may be open in {policy.sequences_topic}" in caplog.text
