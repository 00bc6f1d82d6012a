"""Successful messages: the cost of a consumer, compared with the bare client.

Both alternate on one topic, with the same messages, in one process. The topic is filled before
it is consumed, so the producers do not affect the result.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import pulsar
import pytest

from redrive import RetryConsumer
from redrive.policy.naming import TopicName
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy

PAIRS = 5
FLOOR = 0.9
FLOOR_WITH_IDS = 0.6
"""Partitions of the topic. Reading the id of each message costs most with large batches."""


class Receiving(Protocol):
    """Options of both consumers."""

    def receive(self) -> pulsar.Message: ...

    def acknowledge(self, message: pulsar.Message) -> None: ...


@pytest.mark.parametrize(
    ("producer", "messages", "partitions"),
    [
        ("batched", 100_000, 0),
        ("unbatched", 40_000, 0),
        ("batched", 100_000, 1),
        ("unbatched", 40_000, 1),
    ],
    ids=str,
)
def test_the_success_path_costs_little_more_than_the_bare_client(
    provision_policy: Callable[..., Any],
    figures: list[Figure],
    producer: str,
    messages: int,
    partitions: int,
) -> None:
    provisioned: ProvisionedPolicy = provision_policy(partitions=partitions)
    client, topic = provisioned.client("superuser"), provisioned.policy.topic
    bare, ours = [], []
    for _ in range(PAIRS):
        fill(client, topic, messages, batched=producer == "batched")
        consumer = client.subscribe(
            str(topic), provisioned.policy.subscription, consumer_type=pulsar.ConsumerType.Shared
        )
        bare.append(rate(consumer, messages))
        consumer.close()
        fill(client, topic, messages, batched=producer == "batched")
        with RetryConsumer(client, provisioned.policy) as retry_consumer:
            ours.append(rate(retry_consumer, messages))
    floor = FLOOR_WITH_IDS if partitions and producer == "batched" else FLOOR
    name = f"success path, {producer} producer{', a partition' * partitions}"
    # The ratio of each pair, because the load of the machine changes between pairs.
    ratio = statistics.median(mine / its for mine, its in zip(ours, bare, strict=True))
    figures += [
        Figure(name, "bare client", statistics.median(bare), "messages/s"),
        Figure(name, "RetryConsumer", statistics.median(ours), "messages/s"),
        Figure(name, "ratio", ratio, "of bare", at_least=floor),
    ]


def fill(client: pulsar.Client, topic: TopicName, messages: int, *, batched: bool) -> None:
    """Produce the messages of one run."""
    producer = client.create_producer(
        str(topic), batching_enabled=batched, block_if_queue_full=True, max_pending_messages=5_000
    )
    for number in range(messages):
        producer.send_async(
            b"x" * 512, lambda *_: None, properties={"number": f"{number}", "kind": "order"}
        )
    producer.flush()
    producer.close()


def rate(consumer: Receiving, messages: int) -> float:
    """Consume the messages of `fill`, and return the number per second."""
    consumer.acknowledge(consumer.receive())  # the first call waits for the connection
    began = time.perf_counter()
    for _ in range(messages - 1):
        consumer.acknowledge(consumer.receive())
    return (messages - 1) / (time.perf_counter() - began)
