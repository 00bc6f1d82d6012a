"""A topic on which the broker drops what a producer sends again."""

from __future__ import annotations

import json
from typing import Any

from redrive.admin.paths import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.waiting import wait_until


def deduplicate(broker: Broker, topic: TopicName) -> None:
    """Switch it on, and wait until all partitions go by it: the broker answers before they do."""
    path = f"/admin/v2/{topic_path(topic)}/deduplicationEnabled"
    broker.request("POST", path, body=True).check(f"deduplicate {topic}")
    count = _asked(broker, topic, "partitions")["partitions"]
    partitions = [topic.partition(index) for index in range(count)] or [topic]
    wait_until(lambda: all(_deduplicates(broker, partition) for partition in partitions))


def _deduplicates(broker: Broker, partition: TopicName) -> bool:
    return bool(_asked(broker, partition, "stats")["deduplicationStatus"] == "Enabled")


def _asked(broker: Broker, topic: TopicName, what: str) -> dict[str, Any]:
    answer = broker.request("GET", f"/admin/v2/{topic_path(topic)}/{what}")
    answer.check(f"tell the {what} of {topic}")
    return dict(json.loads(answer.body))
