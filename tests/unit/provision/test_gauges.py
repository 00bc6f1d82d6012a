from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prometheus_client import REGISTRY

from redrive.api.retrypolicy import Backlog
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision.health import Gauges
from redrive.provision.health_checks import Deliveries

NOW = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
KEY = Key("a-namespace", "gauged")
TOPIC = "persistent://shop/prod/orders"
POLICY = Policy(TopicName.parse(TOPIC), "fulfilment")
WAITING = Backlog(
    retry=3, dead_letter=2, oldest_dead_letter=NOW - timedelta(minutes=1), observed_at=NOW
)
DELIVERED = Deliveries.begin(0.0, 10, 20).seen(60.0, 15, 21)


def value(metric: str, topic: str = TOPIC, **labels: str) -> float | None:
    """A metric of the policy, with the labels that consumers have too."""
    policy = {"policy": "gauged", "policy_namespace": "a-namespace"}
    where = {"source_topic": topic, "subscription": "fulfilment"}
    return REGISTRY.get_sample_value(metric, {**policy, **where, **labels})


def test_the_metrics_of_a_policy_name_its_object_and_its_topic_and_subscription() -> None:
    gauges = Gauges(lambda: NOW)
    gauges.show(KEY, POLICY, WAITING, DELIVERED)
    assert value("redrive_backlog_messages", role="retry") == 3
    assert value("redrive_backlog_messages", role="dead-letter") == 2
    assert value("redrive_oldest_dead_letter_age_seconds") == 60
    assert value("redrive_deliveries_total", role="source") == 5
    assert value("redrive_deliveries_total", role="retry") == 1
    gauges.remove(KEY)
    assert value("redrive_backlog_messages", role="retry") is None
    assert value("redrive_oldest_dead_letter_age_seconds") is None


def test_a_policy_made_again_for_another_topic_takes_the_place_of_the_first() -> None:
    gauges = Gauges(lambda: NOW)
    gauges.show(KEY, POLICY, WAITING, DELIVERED)
    gauges.show(KEY, Policy(POLICY.topic.sibling("other"), "fulfilment"), WAITING, DELIVERED)
    assert value("redrive_backlog_messages", role="retry") is None
    assert value("redrive_backlog_messages", str(POLICY.topic.sibling("other")), role="retry")
    gauges.remove(KEY)
