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

SECONDS = 60
QUIET_MILLIS = 1_000


def stats(broker: Broker, topic: TopicName, subscription: str) -> dict[str, Any]:
    """Return its figures, summed up over partitions."""
    at = f"/admin/v2/{topic_path(topic)}"
    whole = json.loads(broker.request("GET", f"{at}/partitions").body)["partitions"] == 0
    answer = broker.request("GET", f"{at}/{'stats' if whole else 'partitioned-stats'}")
    answer.check(f"tell the figures of {topic}")
    found: dict[str, Any] = json.loads(answer.body)["subscriptions"][subscription]
    return found


def drain(
    broker: Broker, client: pulsar.Client, topic: TopicName, subscription: str
) -> Generator[tuple[pulsar.Consumer, pulsar.Message]]:
    """Yield each message with the consumer that may acknowledge it; the others stay.

    Ends when nothing more comes, and the broker has given out all there is: after a restart, or on
    a slow machine, the first may take seconds.
    """
    consumer = client.subscribe(str(topic), subscription, consumer_type=pulsar.ConsumerType.Shared)
    deadline = time.monotonic() + SECONDS
    try:
        while True:
            try:
                message = consumer.receive(QUIET_MILLIS)
            except pulsar.Timeout:
                figures = stats(broker, topic, subscription)
                if figures["msgBacklog"] <= figures["unackedMessages"]:
                    return
                assert time.monotonic() < deadline, figures
            else:
                yield consumer, message
    finally:
        consumer.close()
