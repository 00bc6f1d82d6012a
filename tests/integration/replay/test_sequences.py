"""A Replay puts the dead letters of a key back in their order, whatever part of them it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive import RetryConsumer
from redrive.delivery.middleware import sequencing
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import LEDGER_SUBSCRIPTION
from redrive.replay.job import run as jobs
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice
from tests.support.local_runs import replay
from tests.support.messages import handle_until_quiet

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
QUIET = timedelta(seconds=1)


def send(provisioned: Any, *contents: bytes) -> None:  # noqa: ANN401 - see conftest
    """Produce messages of one key."""
    topic = str(provisioned.policy.topic)
    producer = provisioned.client.create_producer(topic, batching_enabled=False)
    for content in contents:
        producer.send(content, partition_key="a", properties={"name": content.decode()})
    producer.close()


def handled(
    provisioned: Any,  # noqa: ANN401 - see conftest
    *bad: bytes,
) -> list[bytes]:
    """Handle all that comes; *bad* ones fail."""
    with RetryConsumer(provisioned.client, provisioned.policy) as consumer:
        return handle_until_quiet(consumer, bad, quiet=QUIET, unsettled=provisioned.unsettled)


@pytest.mark.usefixtures("replay_token")
def test_sequences_by_ordering_key_share_a_partition_of_retries(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(partitions=2)
    policy = provisioned.policy
    fields: list[dict[str, Any]] = [
        {"partition_key": f"item-{number}", "ordering_key": f"order-{number // 10}"}
        for number in range(60)
    ]
    for keys in fields:
        provisioned.bury(1, **keys)
    assert replay(provisioned).moved == len(fields)

    partitions: dict[str, set[int]] = {}
    for message in provisioned.read_all(policy.retry_topic):
        order = message.ordering_key()
        partitions.setdefault(order, set()).add(message.message_id().partition())
    assert all(len(indexes) == 1 for indexes in partitions.values())
    assert set().union(*partitions.values()) == {0, 1}


def test_partial_replay_keeps_the_order_of_a_sequence(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequencing, "STILL_SECONDS", 2.0)
    provisioned = provision_policy(partitions=2)
    policy = dataclasses.replace(
        provisioned.policy,
        max_retries=0,
        subscription_type=SubscriptionType.KEY_SHARED,
        ordered=True,
        sequenced=True,
    )
    provisioned = dataclasses.replace(provisioned, policy=policy)
    provisioned.create(policy.topic, policy.subscription, 0)
    provisioned.create(policy.sequences_topic, LEDGER_SUBSCRIPTION, 0)

    def replay_part(where: str | None = None, **choice: Any) -> tuple[int, int, int]:  # noqa: ANN401
        job, progress = make_job(provisioned, where)
        job = dataclasses.replace(job, choice=Choice(**choice))
        jobs.run(job, Spark(spark, job), progress)
        account = progress.read()
        return account.counts.scanned, account.counts.moved, account.counts.refused

    send(provisioned, b"a1", b"a2", b"a3", b"a4")
    assert handled(provisioned, b"a2") == [b"a1"]
    assert replay_part("properties['name'] <> 'a2'") == (3, 2, 0)
    assert handled(provisioned) == []  # they wait for a2, and go back
    # They count as replayed, though they were not handled.
    assert replay_part(max_replays=1) == (3, 1, 2)
    assert handled(provisioned) == [b"a2"]
    send(provisioned, b"a5")
    assert handled(provisioned) == []
    assert replay_part() == (3, 3, 0)
    assert handled(provisioned) == [b"a3", b"a4", b"a5"]
    send(provisioned, b"a6")
    assert handled(provisioned) == [b"a6"]
    assert provisioned.unacknowledged() == []
