"""Sequenced dead letters: the cost of reading records before each message is handled.

Consumers with and without `sequenced` alternate on one topic, with the same messages, all
of which are handled successfully.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pulsar
import pytest

from redrive import Policy, RetryConsumer, SubscriptionType
from sandbox.pulsar import SUPERUSER
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy

PAIRS = 3
MESSAGES = 4_000
KEYS = 1_000
FLOOR = 0.1


@pytest.mark.parametrize("workers", [1, 8])
def test_sequenced_policy_costs_one_request_per_message(
    provision_policy: Callable[..., Any], figures: list[Figure], workers: int
) -> None:
    provisioned: ProvisionedPolicy = provision_policy(
        kind=SubscriptionType.KEY_SHARED, ordered=True, sequenced=True
    )
    without = replace(provisioned.policy, sequenced=False)
    ordered, sequenced = [], []
    for _ in range(PAIRS):
        ordered.append(rate(provisioned, without, workers))
        sequenced.append(rate(provisioned, provisioned.policy, workers))
    # The ratio of each pair, because the load of the machine changes between pairs.
    ratio = statistics.median(mine / its for mine, its in zip(sequenced, ordered, strict=True))
    name = f"success path, sequenced, workers: {workers}"
    figures += [
        Figure(name, "ordered", statistics.median(ordered), "messages/s"),
        Figure(name, "ordered and sequenced", statistics.median(sequenced), "messages/s"),
        Figure(name, "ratio", ratio, "of ordered", at_least=FLOOR),
    ]


def rate(provisioned: ProvisionedPolicy, policy: Policy, workers: int) -> float:
    """Produce messages, and return the number handled per second."""
    client = provisioned.client(SUPERUSER)
    producer = client.create_producer(
        str(policy.topic), batching_enabled=False, block_if_queue_full=True
    )
    for number in range(MESSAGES):
        producer.send_async(b"x" * 512, lambda *_: None, partition_key=f"{number % KEYS}")
    producer.flush()
    producer.close()
    moments: list[float] = []

    def handle(_message: pulsar.Message) -> None:
        moments.append(time.perf_counter())
        if len(moments) == MESSAGES:
            consumer.stop()

    with RetryConsumer(client, policy) as consumer:
        consumer.run(handle, workers=workers)
    return (MESSAGES - 1) / (moments[-1] - moments[0])  # the first call waits for connections
