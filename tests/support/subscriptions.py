"""What the broker knows of a subscription, and all messages that wait on it."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from typing import Any

import pulsar

from redrive.admin.paths import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker

SECONDS = 180
QUIET_MILLIS = 100


def stats(broker: Broker, topic: TopicName, subscription: str) -> dict[str, Any]:
    """Return its figures, summed up over partitions."""
    at = f"/admin/v2/{topic_path(topic)}"
    whole = json.loads(broker.request("GET", f"{at}/partitions").body)["partitions"] == 0
    answer = broker.request("GET", f"{at}/{'stats' if whole else 'partitioned-stats'}")
    answer.check(f"tell the figures of {topic}")
    found: dict[str, Any] = json.loads(answer.body)["subscriptions"][subscription]
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
