"""A topic with deduplication: the broker drops repeated messages of a producer."""

from __future__ import annotations

import functools

from redrive.admin.http import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Broker
from tests.support.subscriptions import tell
from tests.support.waiting import wait_until


def deduplicate(broker: Broker, topic: TopicName) -> None:
    """Enable deduplication, and wait until all partitions apply it, which is after the answer."""
    enable_deduplication(broker, topic)
    await_deduplication(broker, topic, tell(broker, topic, "partitions")["partitions"])


def enable_deduplication(broker: Broker, topic: TopicName) -> None:
    """Enable deduplication, without waiting until it is applied."""
    path = f"/admin/v2/{topic_path(topic)}/deduplicationEnabled"
    broker.request("POST", path, body=True).check(f"deduplicate {topic}")


def await_deduplication(broker: Broker, topic: TopicName, partitions: int) -> None:
    """Wait until all partitions apply deduplication that is enabled."""
    for partition in [topic.partition(index) for index in range(partitions)] or [topic]:
        wait_until(functools.partial(_is_deduplicated, broker, partition))


def _is_deduplicated(broker: Broker, partition: TopicName) -> bool:
    return bool(tell(broker, partition, "stats")["deduplicationStatus"] == "Enabled")


def sent_as(broker: Broker, topic: TopicName, id_: str) -> tuple[str, int]:
    """Return the producer name and the sequence id of a message, which the client does not show.

    A topic with deduplication that has both twice shows a fault of the broker
    (apache/pulsar#25954).
    """
    ledger, entry, partition, *index = map(int, id_.split(":"))
    stored_in = topic if partition < 0 else topic.partition(partition)
    answer = broker.request(
        "GET", f"/admin/v2/{topic_path(stored_in)}/ledger/{ledger}/entry/{entry}"
    )
    answer.check(f"read {id_} of {topic}")
    first = int(answer.headers["x-pulsar-sequence-id"])  # of the messages of a batch
    return answer.headers["x-pulsar-producer-name"], first + sum(index)
