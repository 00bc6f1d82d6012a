"""Series of the topics of a policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import REGISTRY

from redrive.admin.model import SubscriptionStats
from redrive.kube.resources import Key
from redrive.policy.ladder import Ladder
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision.findings import Findings
from redrive.provision.health_checks import THRESHOLDS, Reading
from redrive.provision.metrics import TopicMetrics

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
KEY = Key("a-namespace", "gauged")
TOPIC = "persistent://shop/prod/orders"
POLICY = Policy(
    TopicName.parse(TOPIC),
    "fulfilment",
    ladder=Ladder.from_delays(["1m", "72h"]),
)
NONE = SubscriptionStats(0, 0, 1, durable=True, ack_holes=0, oldest=None)
SOURCE = replace(NONE, backlog=7, delivered=10)
RETRY = replace(NONE, backlog=5, delivered=20, delayed=3, oldest=NOW - timedelta(minutes=2))
DEAD_LETTER = replace(NONE, backlog=2, bytes=900, oldest=NOW - timedelta(minutes=1))
READING = Reading(
    policy=POLICY,
    begun=NOW - timedelta(seconds=30),
    seconds=0.0,
    requested=False,
    quota=1_000,
    source={"fulfilment": SOURCE},
    retry={"fulfilment": RETRY},
    dead_letter={"redrive": DEAD_LETTER},
    published={"": 6},
)


@pytest.fixture
def metrics() -> Iterator[TopicMetrics]:
    metrics = TopicMetrics(lambda: NOW)
    yield metrics
    metrics.close()


def value(metric: str, topic: str = TOPIC, **labels: str) -> float | None:
    """Return a sample of the policy, with the labels that consumers have too."""
    policy = {"policy": "gauged", "policy_namespace": "a-namespace"}
    where = {"source_topic": topic, "subscription": "fulfilment"}
    return REGISTRY.get_sample_value(metric, {**policy, **where, **labels})


def show(metrics: TopicMetrics, *readings: Reading) -> None:
    """Show readings that follow one another."""
    findings = None
    for reading in readings:
        findings = Findings.of(reading, findings, (), THRESHOLDS)
        metrics.show(KEY, reading, findings)


def test_series_show_the_last_reading(metrics: TopicMetrics) -> None:
    show(metrics, READING)
    assert value("redrive_backlog_messages", role="retry") == 5
    assert value("redrive_backlog_messages", role="dead-letter") == 2
    assert value("redrive_due_messages", role="source") == 7
    assert value("redrive_due_messages", role="retry") == 2
    assert value("redrive_oldest_retry_age_seconds") == 120
    assert value("redrive_longest_delay_seconds") == timedelta(days=3).total_seconds()
    assert value("redrive_oldest_dead_letter_age_seconds") == 60
    assert value("redrive_dead_letter_bytes") == 900
    assert value("redrive_dead_letter_quota_bytes") == 1_000
    assert value("redrive_statistics_timestamp_seconds") == NOW.timestamp() - 30
    metrics.remove(KEY)
    assert value("redrive_backlog_messages", role="retry") is None
    assert value("redrive_statistics_timestamp_seconds") is None


def test_counters_add_what_came_between_two_readings(metrics: TopicMetrics) -> None:
    later = replace(
        READING,
        seconds=60.0,
        source={"fulfilment": replace(SOURCE, delivered=15)},
        retry={"fulfilment": replace(RETRY, delivered=21)},
        published={"": 9},
    )
    show(metrics, READING)
    assert value("redrive_deliveries_total", role="source") == 0
    assert value("redrive_dead_letters_total") == 0
    show(metrics, READING, later)
    assert value("redrive_deliveries_total", role="source") == 5
    assert value("redrive_deliveries_total", role="retry") == 1
    assert value("redrive_dead_letters_total") == 3


def test_absent_figures_have_no_series(metrics: TopicMetrics) -> None:
    show(metrics, replace(READING, quota=None, source={}, retry={}))
    assert value("redrive_dead_letter_quota_bytes") is None
    assert value("redrive_due_messages", role="source") is None
    assert value("redrive_oldest_retry_age_seconds") == 0
    show(metrics, replace(READING, policy=replace(POLICY, dead_letters=False), dead_letter={}))
    assert value("redrive_backlog_messages", role="retry") == 5
    for metric in ("dead_letters_total", "dead_letter_bytes", "oldest_dead_letter_age_seconds"):
        assert value(f"redrive_{metric}") is None, metric


def test_recreated_policy_replaces_series_of_its_predecessor(metrics: TopicMetrics) -> None:
    show(metrics, READING)
    other = replace(POLICY, topic=POLICY.topic.sibling("other"))
    show(metrics, replace(READING, policy=other))
    assert value("redrive_backlog_messages", role="retry") is None
    assert value("redrive_backlog_messages", str(other.topic), role="retry") == 5
