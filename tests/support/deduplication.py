"""A topic with deduplication: the broker drops repeated messages of a producer."""

from __future__ import annotations

from redrive.admin.http import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.subscriptions import tell
from tests.support.waiting import wait_until


def deduplicate(broker: Broker, topic: TopicName) -> None:
    """Enable deduplication, and wait until all partitions apply it, which is after the answer."""
    path = f"/admin/v2/{topic_path(topic)}/deduplicationEnabled"
    broker.request("POST", path, body=True).check(f"deduplicate {topic}")
    count = tell(broker, topic, "partitions")["partitions"]
    partitions = [topic.partition(index) for index in range(count)] or [topic]
    wait_until(
        lambda: all(
            tell(broker, partition, "stats")["deduplicationStatus"] == "Enabled"
            for partition in partitions
        )
    )
