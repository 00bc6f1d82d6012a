"""A topic on which the broker drops what a producer sends again."""

from __future__ import annotations

from redrive.admin.http import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.subscriptions import tell
from tests.support.waiting import wait_until


def deduplicate(broker: Broker, topic: TopicName) -> None:
    """Switch it on, and wait until all partitions go by it: the broker answers before they do."""
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
