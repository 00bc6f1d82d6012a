"""The rate of `RetryProducer`, compared with the bare client's producer that does the same work.

Both send message by message to a topic with deduplication, under a name of their own and with
explicit sequence ids. They alternate on one topic, in one process.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pulsar

from redrive import RetryProducer
from sandbox.pulsar import SUPERUSER
from tests.benchmarks.delivery.costs import Cost, compared, cost_of
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import deduplicate

PAIRS = 9
MESSAGES = 2_000
CONTENT = b"x" * 512
GOAL, LEAST = 0.9, 0.85
MOST_PROCESSOR_TIME = 2.0


def test_retry_producer_costs_little_more_than_the_client(
    provision_policy: Callable[..., Any], figures: list[Figure]
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
    topic = provisioned.policy.topic
    deduplicate(provisioned.broker, topic)
    client = provisioned.client(SUPERUSER)
    pairs = [
        (cost_of_bare(client, str(topic)), cost_of_ours(client, str(topic))) for _ in range(PAIRS)
    ]
    figures += compared("RetryProducer", pairs, goal=GOAL, least=LEAST, most=MOST_PROCESSOR_TIME)


def cost_of_bare(client: pulsar.Client, topic: str) -> Cost:
    """Send by the client alone."""
    name = f"bare-{secrets.token_hex(8)}"
    producer = client.create_producer(topic, producer_name=name, batching_enabled=False)
    try:
        return cost_of(
            lambda number: producer.send(CONTENT, sequence_id=number, **_fields(number)), MESSAGES
        )
    finally:
        producer.close()


def cost_of_ours(client: pulsar.Client, topic: str) -> Cost:
    """Send as the guide shows."""
    with RetryProducer(client, topic) as producer:
        return cost_of(lambda number: producer.send(CONTENT, **_fields(number)), MESSAGES)


def _fields(number: int) -> dict[str, Any]:
    return {"properties": {"number": f"{number}"}, "partition_key": f"customer-{number % 100}"}
