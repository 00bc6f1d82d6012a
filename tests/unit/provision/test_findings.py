from __future__ import annotations

from datetime import UTC, datetime

from redrive.admin.model import SubscriptionStats
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision.health_checks import THRESHOLDS, Findings, Reading

POLICY = Policy(TopicName("shop", "prod", "orders"), "s")
MOMENT = datetime(2026, 11, 21, 9, tzinfo=UTC)


def reading(seconds: float, *, requested: bool = False) -> Reading:
    """A reading of topics of which the source alone has a consumer."""
    source, retry = (
        SubscriptionStats(2, 0, consumers, durable=True, ack_holes=0, oldest=None)
        for consumers in (1, 0)
    )
    return Reading(POLICY, MOMENT, seconds, requested, None, {"s": source}, {"s": retry}, {})


def test_a_requested_reading_is_no_second_finding_of_a_retry_topic_without_consumers() -> None:
    first = Findings.of(reading(0), None, (), THRESHOLDS)
    assert first.warnings == ()
    requested = Findings.of(reading(1, requested=True), first, first.warnings, THRESHOLDS)
    assert requested.warnings == ()
    second = Findings.of(reading(61), requested, requested.warnings, THRESHOLDS)
    assert [warning.reason for warning in second.warnings] == ["RetryTopicNotConsumed"]
    third = Findings.of(reading(62, requested=True), second, second.warnings, THRESHOLDS)
    assert third.warnings == second.warnings


def test_a_backlog_says_when_its_reading_began() -> None:
    assert reading(0).backlog.observed_at == MOMENT
    assert (reading(0).backlog.retry, reading(0).backlog.dead_letter) == (2, 0)
