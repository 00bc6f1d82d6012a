"""State and settings of topics at the broker, and the messages of a subscription."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Generator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import pulsar

from redrive.admin.http import topic_path
from redrive.policy.naming import TopicName
from sandbox.pulsar import Answer, Broker
from tests.support.waiting import wait_until

SECONDS = 180
QUIET_MILLIS = 100


def path(topic: TopicName) -> str:
    """Return the path of *topic* in the admin API."""
    return f"/admin/v2/persistent/{topic.namespace_name}/{quote(topic.local, safe='')}"


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


COMPACTION_SECONDS = 120


def compact_topic(broker: Broker, topic: TopicName) -> int:
    """Compact *topic*, and return the number of remaining messages.

    The first attempt may fail, because its cursor is missing.
    """
    url = f"{path(topic)}/compaction"
    before = _compacted(broker, topic)["ledgerId"]
    deadline = time.monotonic() + COMPACTION_SECONDS
    broker.request("PUT", url).check("compact")
    while True:
        state = tell(broker, topic, "compaction")
        status = state["status"]
        if status == "SUCCESS":
            break
        assert time.monotonic() < deadline, state
        if status != "RUNNING":
            broker.request("PUT", url)
        time.sleep(0.1)
    # The broker learns of the new ledger after the end of the compaction.
    wait_until(lambda: _compacted(broker, topic)["ledgerId"] != before)
    return int(_compacted(broker, topic)["entries"])


def _compacted(broker: Broker, topic: TopicName) -> dict[str, Any]:
    return dict(tell(broker, topic, "internalStats")["compactedLedger"])


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


def enforce_schemas(broker: Broker, topic: TopicName) -> None:
    """Have the namespace of *topic* refuse producers without a schema on topics with one."""
    path = f"/admin/v2/namespaces/{topic.namespace_name}/schemaValidationEnforced"
    broker.request("POST", path, body=True).check("enforce schemas")
