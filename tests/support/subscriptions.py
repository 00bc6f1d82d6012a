"""What the broker knows of a topic and its subscriptions, and all messages that wait on one."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from typing import Any

import pulsar

from redrive.admin.http import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker

SECONDS = 180
QUIET_MILLIS = 100


def tell(broker: Broker, topic: TopicName, what: str) -> Any:  # noqa: ANN401 - JSON
    """Return what the broker tells of *topic*: its `stats`, `partitions` and so on."""
    answer = broker.request("GET", f"/admin/v2/{topic_path(topic)}/{what}")
    answer.check(f"tell the {what} of {topic}")
    return json.loads(answer.body)


def stats(broker: Broker, topic: TopicName, subscription: str) -> dict[str, Any]:
    """Return its figures, summed up over partitions."""
    whole = tell(broker, topic, "partitions")["partitions"] == 0
    of_all = tell(broker, topic, "stats" if whole else "partitioned-stats")
    found: dict[str, Any] = of_all["subscriptions"][subscription]
    return found


def drain(
    broker: Broker,
    client: pulsar.Client,
    topic: TopicName,
    subscription: str,
    *,
    acknowledge: bool = False,
) -> Generator[pulsar.Message]:
    """Yield each message, and *acknowledge* it once the caller is done with it; else it stays.

    Ends when nothing more comes, and what the broker has given out is what came here: on a slow
    machine the first may take seconds, and so may a large one that is on its way. What stays can't
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
