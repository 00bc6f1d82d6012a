from __future__ import annotations

import gc
import os
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pulsar
import pytest
from prometheus_client import REGISTRY

from redrive import AsyncRetryConsumer, Event, Policy, PolicyFile, prometheus
from redrive.delivery.reporting import Name
from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.model import OutageLimits, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.consumers import InMemoryConsumer

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "consumer-metrics.md"
POLICY = Policy(
    TopicName("shop", "prod", "orders"),
    "fulfilment",
    ladder=Ladder.from_fixed("1s"),
    name="shop/orders-fulfilment",
)
SEQUENCED = replace(
    POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True, sequenced=True
)
WHERE = {
    "policy": "orders-fulfilment",
    "policy_namespace": "shop",
    "source_topic": str(POLICY.topic),
    "subscription": POLICY.subscription,
}
WHERE_OF_EVENT: dict[str, Any] = {
    "policy": POLICY.name,
    "source": str(POLICY.topic),
    "subscription": POLICY.subscription,
}


class Counts:
    """Increases of the process-wide metrics since this was made."""

    def __init__(self) -> None:
        self._before = self._read()

    def added(self) -> dict[str, float]:
        now = self._read()
        return {
            name: value - self._before.get(name, 0)
            for name, value in now.items()
            if value != self._before.get(name, 0)
        }

    def _read(self) -> dict[str, float]:
        return {
            f"{sample.name.removeprefix('redrive_consumer_')} {sample.labels.get('reason', '')}"
            .rstrip(): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith("redrive_consumer_") and sample.name.endswith("_total")
            and sample.labels.items() >= WHERE.items()
        }  # fmt: skip


def fail(_message: object) -> None:
    raise LookupError


def gauge(name: str, consumer: str, **labels: str) -> float | None:
    """Return the value of a metric of the consumer of this name, or None without one."""
    labels = {**WHERE, **labels, "consumer": consumer}
    return REGISTRY.get_sample_value(f"redrive_consumer_{name}", labels)


def test_failures_are_counted_by_result() -> None:
    counts = Counts()
    policy = replace(POLICY, max_retries=2)
    consumer = InMemoryConsumer(policy, on_event=prometheus.count)
    consumer.send(b"x")

    consumer.run(fail)

    assert counts.added() == {
        "failed_attempts_total LookupError": 3,
        "retried_messages_total": 2,
        "dead_lettered_messages_total RetriesExhausted": 1,
    }


def test_discarded_unsent_and_late_messages_are_counted() -> None:
    counts = Counts()
    policy = replace(POLICY, max_retries=0, dead_letters=False)
    discarding = InMemoryConsumer(policy, on_event=prometheus.count)
    discarding.send(b"x")
    discarding.run(fail)
    consumer = InMemoryConsumer(POLICY, on_event=prometheus.count)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    message = consumer.receive()
    consumer.reconsume_later(message)
    consumer.broker.refused.clear()
    first = iter([timedelta(minutes=2)])
    consumer.run(lambda _: consumer.advance(next(first, timedelta())))

    assert counts.added() == {
        "failed_attempts_total LookupError": 1,
        "failed_attempts_total HandlerTimeoutError": 1,
        "discarded_messages_total RetriesExhausted": 1,
        "unsent_messages_total NotSent": 1,
        "retried_messages_total": 2,  # one of them when it could be sent
        "late_successes_total": 1,
    }


def test_successes_and_durations_are_counted() -> None:
    counts = Counts()
    metrics = prometheus.HandlerMetrics()
    consumer = InMemoryConsumer(POLICY, on_event=prometheus.count, middleware=[metrics])
    consumer.send(b"good")
    consumer.send(b"bad")
    failing = [LookupError()]

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"bad" and failing:
            raise failing.pop()

    before = (
        REGISTRY.get_sample_value("redrive_consumer_handler_duration_seconds_count", WHERE) or 0
    )
    consumer.run(handle)
    assert (
        REGISTRY.get_sample_value("redrive_consumer_handler_duration_seconds_count", WHERE)
        == before + 3
    )
    assert counts.added() == {
        "succeeded_attempts_total": 2,
        "failed_attempts_total LookupError": 1,
        "retried_messages_total": 1,
    }


def test_in_flight_gauge_follows_receive_and_acknowledge() -> None:
    consumer = InMemoryConsumer(POLICY, name="in-hand")
    prometheus.follow(consumer)
    consumer.send(b"x")
    message = consumer.receive()
    assert gauge("in_flight_messages", "in-hand") == 1
    consumer.acknowledge(message)
    assert gauge("in_flight_messages", "in-hand") == 0


def test_dead_keys_gauge_counts_keys_of_sequenced_policy() -> None:
    counts = Counts()
    policy = replace(SEQUENCED, max_retries=0)
    consumer = InMemoryConsumer(policy, name="sequenced", on_event=prometheus.count)
    prometheus.follow(consumer)
    for key in "aab":
        consumer.send(b"x", partition_key=key)
    assert gauge("dead_keys", "sequenced") == 0
    consumer.run(fail)
    assert gauge("dead_keys", "sequenced") == 2
    assert counts.added() == {
        "failed_attempts_total LookupError": 2,
        "dead_lettered_messages_total RetriesExhausted": 2,
        "dead_lettered_messages_total AfterDeadLetter": 1,
    }


def test_generation_gauge_follows_the_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text(codec.encode(replace(POLICY, generation=3)), encoding="utf-8")
    consumer = InMemoryConsumer(PolicyFile(file), name="followed")
    assert gauge("policy_generation", consumer.name) is None
    prometheus.follow(consumer)
    assert gauge("policy_generation", consumer.name) == 3

    newer = tmp_path / "newer.json"
    newer.write_text(codec.encode(replace(POLICY, generation=4)), encoding="utf-8")
    os.replace(newer, file)  # noqa: PTH105 - one step
    consumer.advance(timedelta(seconds=2))

    assert gauge("policy_generation", consumer.name) == 4


def test_outage_is_shown_while_it_lasts_and_counted() -> None:
    counts = Counts()
    policy = replace(POLICY, outage_breaker=OutageLimits(min_messages=2))
    consumer = InMemoryConsumer(policy, name="paused", on_event=prometheus.count)
    prometheus.follow(consumer)
    seen = []

    def handle(_message: object) -> None:
        seen.append(gauge("outages", "paused"))
        if len(seen) < 5:
            raise ConnectionError

    for _ in range(3):
        consumer.send(b"x")
    consumer.run(handle)

    assert seen[:5] == [0, 0, 1, 1, 1]
    assert gauge("outages", "paused") == 0
    assert counts.added() == {
        "failed_attempts_total ConnectionError": 1,
        "retried_messages_total": 1,
        "held_attempts_total ConnectionError": 3,
        "outages_begun_total ConnectionError": 1,
        "outages_ended_total ConnectionError": 1,
    }


def test_deleted_consumer_has_no_metrics() -> None:
    consumer = InMemoryConsumer(POLICY, name="gone")
    prometheus.follow(consumer)
    assert gauge("policy_generation", consumer.name) == 0
    del consumer
    gc.collect()
    assert gauge("policy_generation", "gone") is None


async def test_async_consumer_can_be_followed_before_it_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer = AsyncRetryConsumer(cast("pulsar.Client", None), POLICY)
    opened = InMemoryConsumer(POLICY, name="entered")
    monkeypatch.setattr(consumer, "_open", lambda: opened)
    prometheus.follow(consumer)
    assert gauge("policy_generation", opened.name) is None
    async with consumer:
        assert gauge("policy_generation", opened.name) == 0


@pytest.mark.parametrize("name", ["", "orders", "/orders", "shop/", "a/b/c"])
def test_policy_without_resource_name_has_empty_labels(name: str) -> None:
    consumer = InMemoryConsumer(replace(POLICY, name=name), name="by-hand")
    prometheus.follow(consumer)
    assert gauge("policy_generation", "by-hand", policy="", policy_namespace="") == 0


def test_connected_gauge_is_0_after_close() -> None:
    with InMemoryConsumer(POLICY, name="connected") as consumer:
        prometheus.follow(consumer)
        assert gauge("connected", "connected") == 1
    assert gauge("connected", "connected") == 0


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    rows = re.findall(
        r"^\| `(redrive[_.]\w+)` \| (.*?) \|$", REFERENCE.read_text("utf-8"), re.MULTILINE
    )
    return dict(rows)


def test_reference_lists_every_metric_with_its_labels(
    documented: dict[str, str],
) -> None:
    for name in Name:  # each is counted
        prometheus.count(Event(name, "1:0:-1", "1:0:-1", 1, 0, **WHERE_OF_EVENT, reason="some"))
    metrics = [prometheus.HandlerMetrics()]
    consumer = InMemoryConsumer(SEQUENCED, name="documented", middleware=metrics)
    prometheus.follow(consumer)
    consumer.send(b"x")
    consumer.run(lambda _: None)
    registered = {
        family.name if family.type == "histogram" else sample.name: [
            family.type,
            ", ".join(f"`{label}`" for label in sample.labels if label != "le"),
        ]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("redrive_consumer_") and not sample.name.endswith("_created")
    }
    listed = {name: row.split(" | ")[:2] for name, row in documented.items() if "." not in name}
    assert listed == registered
    assert len(registered) == len(Name) + 7


def test_reference_lists_every_event(documented: dict[str, str]) -> None:
    assert {name for name in documented if "." in name} == set(Name)
