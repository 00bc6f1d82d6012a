"""State of a topic and its subscriptions at the broker, and the messages of a subscription."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from http import HTTPStatus
from typing import Any

import pulsar

from redrive.admin.http import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Answer, Broker

SECONDS = 180
QUIET_MILLIS = 100


def tell(broker: Broker, topic: TopicName, resource: str) -> Any:  # noqa: ANN401 - JSON
    """Return an admin resource of *topic*, such as `stats` or `partitions`."""
    answer = _ask(broker, topic, resource)
    answer.check(f"tell the {resource} of {topic}")
    return json.loads(answer.body)


def _ask(broker: Broker, topic: TopicName, resource: str) -> Answer:
    return broker.request("GET", f"/admin/v2/{topic_path(topic)}/{resource}")


def stats(broker: Broker, topic: TopicName, subscription: str) -> dict[str, Any]:
    """Return the statistics of a subscription, summed over partitions.

    The backlog is counted, as the operator has it: the number that the broker keeps of its own can
    stay wrong (https://github.com/apache/pulsar/pull/25047).
    """
    query = "?getPreciseBacklog=true"
    answer = _ask(broker, topic, f"stats{query}")
    if answer.status == HTTPStatus.NOT_FOUND:  # only topics without partitions have these
        answer = _ask(broker, topic, f"partitioned-stats{query}")
    answer.check(f"tell the statistics of {topic}")
    statistics: dict[str, Any] = json.loads(answer.body)["subscriptions"][subscription]
    return statistics


def drain(
    broker: Broker,
    client: pulsar.Client,
    topic: TopicName,
    subscription: str,
    *,
    acknowledge: bool = False,
) -> Generator[pulsar.Message]:
    """Yield each message, and if *acknowledge* is set acknowledge it afterwards.

    The end is reached when no message comes, and all delivered messages were received: on a slow
    machine the first or a large one may take seconds. Unacknowledged messages must not
    be in chunks, each of which the broker counts.
    """
    consumer = client.subscribe(str(topic), subscription, consumer_type=pulsar.ConsumerType.Shared)
    deadline = time.monotonic() + SECONDS
    stay = 0
    try:
        while True:
            try:
                message = consumer.receive(QUIET_MILLIS)
            except pulsar.Timeout:
                figures = stats(broker, topic, subscription)
                if figures["msgBacklog"] <= figures["unackedMessages"] == stay:
                    return
                assert time.monotonic() < deadline, (figures, stay)
                continue
            yield message
            if acknowledge:
                consumer.acknowledge(message)
            else:
                stay += 1
    finally:
        consumer.close()
