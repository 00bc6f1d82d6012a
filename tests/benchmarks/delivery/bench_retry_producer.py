"""The rate of `RetryProducer`, compared with the bare client's producer that does the same work.

Both send message by message to a topic with deduplication, under a name of their own and with
explicit sequence ids. They alternate on one topic, in one process.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pulsar

from redrive import RetryProducer
from sandbox.pulsar import SUPERUSER
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import deduplicate

PAIRS = 9
MESSAGES = 2_000
CONTENT = b"x" * 512
GOAL, LEAST = 0.9, 0.85
MOST_PROCESSOR_TIME = 2.0


class Cost(NamedTuple):
    """The seconds of a send, and those of the processor in all threads of the process."""

    wall: float
    processor: float


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
    # The ratio of each pair, because the load of the machine changes between pairs.
    ratios = sorted(its.wall / ours.wall for its, ours in pairs)
    processor = statistics.median(ours.processor / its.processor for its, ours in pairs)
    ratio = statistics.median(ratios)
    rate = 1 / statistics.median(its.wall for its, _ in pairs)
    micros = statistics.median(its.processor for its, _ in pairs) * 1e6
    name = "RetryProducer"
    figures += [
        Figure(name, "bare producer", rate, "messages/s"),
        Figure(name, f"ratio, goal {GOAL:g}", ratio, "of bare", at_least=LEAST),
        Figure(name, "lowest ratio", ratios[0], "of bare"),
        Figure(name, "highest ratio", ratios[-1], "of bare"),
        Figure(name, "processor time of bare", micros, "µs a message"),
        Figure(name, "processor time", processor, "of bare", at_most=MOST_PROCESSOR_TIME),
    ]


def cost_of_bare(client: pulsar.Client, topic: str) -> Cost:
    """Send by the client alone."""
    name = f"bare-{secrets.token_hex(8)}"
    producer = client.create_producer(topic, producer_name=name, batching_enabled=False)
    try:
        return _cost(lambda number: producer.send(CONTENT, sequence_id=number, **_fields(number)))
    finally:
        producer.close()


def cost_of_ours(client: pulsar.Client, topic: str) -> Cost:
    """Send as the guide shows."""
    with RetryProducer(client, topic) as producer:
        return _cost(lambda number: producer.send(CONTENT, **_fields(number)))


def _fields(number: int) -> dict[str, Any]:
    return {"properties": {"number": f"{number}"}, "partition_key": f"customer-{number % 100}"}


def _cost(send: Callable[[int], object]) -> Cost:
    send(1)  # the first call waits for connections
    wall, processor = time.perf_counter(), time.process_time()
    for number in range(2, MESSAGES + 2):
        send(number)
    return Cost(
        (time.perf_counter() - wall) / MESSAGES, (time.process_time() - processor) / MESSAGES
    )
