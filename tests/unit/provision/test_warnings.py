"""Warnings in the status of a policy, and the metrics of its topics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import REGISTRY

from redrive.admin.errors import AdminConflictError
from redrive.admin.internal_stats import BrokerSettings
from redrive.admin.model import NamespaceState, Schema, SubscriptionStats, TopicSubscriptions
from redrive.api.conditions import StatusWarning
from redrive.kube.resources import Key
from redrive.policy.ladder import Ladder
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision.actions import CopySchema, Refused
from redrive.provision.checks import Evidence
from redrive.provision.desired import Observed, TopicRole, TopicState, desired
from redrive.provision.findings import Findings
from redrive.provision.health_checks import THRESHOLDS, Reading
from redrive.provision.metrics import TopicMetrics
from redrive.provision.request import Request
from redrive.provision.warnings import warnings
from tests.unit.provision.conftest import TOKEN

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
NO_SUBSCRIPTIONS = TopicSubscriptions((frozenset(),))
OWN = "persistent://shop/prod/own"
SHORT = {"scheme": "SubscriptionUpper"}
KEEPS_TICKS = (4, 0, 8)


def found(  # noqa: PLR0913 - each is a part of the case
    body: dict[str, Any],
    requested: Request,
    rivals: Sequence[Request] = (),
    *,
    retry: int = 0,
    delayed: object = None,
    refused: Sequence[Refused] = (),
) -> tuple[StatusWarning, ...]:
    """Return the warnings for a source topic of two and a retry topic of *retry* partitions."""
    state = TopicState(retry, NO_SUBSCRIPTIONS, {"delayedDelivery?applied=true": delayed}, {})
    observed = Observed(2, topics={TopicRole.RETRY: state})
    wanted = desired(requested, body, "here", KEEPS_TICKS)
    return warnings(Evidence(body, wanted, observed, requested, rivals, refused))


def test_uncontested_policy_has_no_warnings(policy: MakeBody, requested: MakeRequest) -> None:
    assert found(policy(), requested(policy())) == ()


def test_descending_ladder_is_warned_about(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(delayLadder={"delays": ["2s", "1s"]})
    [caution] = found(body, requested(body))
    assert caution.reason == "LadderDescends"
    assert "sort the delays" in caution.message


@pytest.mark.parametrize(
    ("retry", "dead_letter", "named"),
    [
        (("here",), ("here",), []),
        (("here", "there"), ("here",), ["RETRY to here+there"]),
        (("here", "there"), ("here", "there"), ["RETRY to here+there", "DLQ to here+there"]),
    ],
)
def test_replicated_topics_are_warned_about(
    policy: MakeBody,
    requested: MakeRequest,
    retry: tuple[str, ...],
    dead_letter: tuple[str, ...],
    named: list[str],
) -> None:
    body = policy()
    waits, rests = (
        TopicState(2, NO_SUBSCRIPTIONS, {}, {}, frozenset(clusters))
        for clusters in (retry, dead_letter)
    )
    topics = {TopicRole.RETRY: waits, TopicRole.DEAD_LETTER: rests}
    observed = Observed(
        2, topics=topics, namespace=NamespaceState(replicated_to=frozenset({"here", "there"}))
    )
    wanted = desired(requested(body), body, "here", KEEPS_TICKS)
    seen = warnings(Evidence(body, wanted, observed, requested(body)))
    assert [caution.reason for caution in seen] == ["GeoReplicated"] * bool(named)
    for caution in seen:
        assert all(name in caution.message for name in named)
        assert caution.message.count(" to here+there") == len(named)


def test_refused_schema_is_warned_about(policy: MakeBody, requested: MakeRequest) -> None:
    names = requested(policy()).policy
    topic = names.retry_topic
    error = AdminConflictError("no", got="409 Incompatible", remedy="none")
    refused = [Refused(CopySchema(topic, names.topic, Schema("JSON", "{}", {})), error)]
    [caution] = found(policy(), requested(policy()), refused=refused)
    assert caution.reason == "SchemaRefused"
    assert f"could not be copied to {topic}" in caution.message
    assert "409 Incompatible" in caution.message


def test_schema_that_is_not_copied_is_warned_about(
    policy: MakeBody, requested: MakeRequest
) -> None:
    topic = "persistent://shop/prod/orders"
    rules = [
        {"name": "source", "topics": [topic]},
        {"name": "own", "topics": [f"{topic}-*"], "roles": ["fulfilment"]},
    ]
    body = policy()
    request = requested(body, allow=rules)
    wanted = desired(request, body, "here", KEEPS_TICKS)
    assert warnings(Evidence(body, wanted, Observed(2), request)) == ()
    observed = Observed(2, Schema("AVRO", "", {}))
    [caution] = warnings(Evidence(body, wanted, observed, request))
    assert caution.reason == "SchemaNotAllowed"
    for name in (wanted.policy.retry_topic, wanted.policy.dead_letter_topic):
        assert str(name) in caution.message


@pytest.mark.parametrize(
    ("kind", "enforced", "remedy"),
    [
        ("AVRO", True, None),
        ("INT32", False, None),
        ("INT32", True, "or do not enforce schemas"),
        ("KEY_VALUE", False, "consume it with Java"),
    ],
)
def test_schema_unsupported_by_python_is_warned_about(
    policy: MakeBody, requested: MakeRequest, *, kind: str, enforced: bool, remedy: str | None
) -> None:
    body = policy()
    observed = Observed(
        2, Schema(kind, "", {}), namespace=NamespaceState(enforces_schemas=enforced)
    )
    request = requested(body)
    wanted = desired(request, body, "here", KEEPS_TICKS)
    seen = warnings(Evidence(body, wanted, observed, request))
    assert [caution.reason for caution in seen] == ["SchemaUnsupported"] * (remedy is not None)
    for caution in seen:
        assert f"got {kind} on {request.policy.topic}; " in caution.message
        assert remedy is not None
        assert remedy in caution.message


ALL = frozenset({"Exclusive", "Failover", "Key_Shared", "Shared"})
OF_BROKER = "the configuration of the broker"
READER = {"role": "reader", "authentication": TOKEN}


@pytest.mark.parametrize(
    ("kind", "of_namespace", "of_broker", "refused"),
    [
        ("KeyShared", [], [], None),
        ("KeyShared", ["Exclusive", "Key_Shared", "Shared"], [], None),
        ("KeyShared", ["Exclusive", "Shared"], [], "KeyShared on orders"),
        ("KeyShared", ["Exclusive", "Key_Shared"], [], "Shared on orders-fulfilment-RETRY"),
        ("Shared", ["Exclusive"], ALL, "Shared on orders and Shared on orders-fulfilment-RETRY"),
        ("Shared", ALL, ["Exclusive"], None),
        ("KeyShared", [], ["Exclusive", "Shared"], "KeyShared on orders"),
    ],
)
def test_refused_subscription_type_is_warned_about(  # noqa: PLR0913, PLR0917 - parts of the case
    policy: MakeBody,
    requested: MakeRequest,
    kind: str,
    of_namespace: Collection[str],
    of_broker: Collection[str],
    refused: str | None,
) -> None:
    body = policy(subscriptionType=kind)
    request, observed = (
        requested(body),
        Observed(
            2,
            namespace=NamespaceState(subscription_types=frozenset(of_namespace)),
            settings=BrokerSettings(subscription_types=frozenset(of_broker)),
        ),
    )
    wanted = desired(request, body, "here", KEEPS_TICKS)
    seen = warnings(Evidence(body, wanted, observed, request))
    assert [caution.reason for caution in seen] == (
        [] if refused is None else ["SubscriptionTypeNotAllowed"]
    )
    for caution in seen:
        place = "the Pulsar namespace shop/prod" if of_namespace else OF_BROKER
        assert caution.message.startswith(f"{place} refuses consumers of type {refused}, unless")
        assert f"got {', '.join(of_namespace or of_broker)}; allow them" in caution.message


@pytest.mark.parametrize(
    ("spec", "changes", "topics"),
    [
        ({}, {"replay": None}, []),
        ({}, {}, ["-RETRY", "-DLQ", "-DLQ-LEDGER"]),
        ({}, {"replay": None, "inspection": READER}, ["-RETRY", "-DLQ"]),
        (
            {
                "subscriptionType": "KeyShared",
                "ordering": "PerKey",
                "deadLetter": {"sequenced": True},
            },
            {"replay": None},
            ["-DLQ-SEQUENCES"],
        ),
    ],
    ids=["none", "replay", "inspection", "sequenced"],
)
def test_refused_type_of_readers_is_warned_about(
    policy: MakeBody,
    requested: MakeRequest,
    spec: dict[str, Any],
    changes: dict[str, Any],
    topics: list[str],
) -> None:
    body = policy(**spec)
    request = requested(body, **changes)
    shared = NamespaceState(subscription_types=frozenset({"Shared", "Key_Shared"}))
    wanted = desired(request, body, "here", KEEPS_TICKS)
    seen = warnings(Evidence(body, wanted, Observed(2, namespace=shared), request))
    assert [caution.reason for caution in seen] == ["SubscriptionTypeNotAllowed"] * bool(topics)
    for caution in seen:
        refused = " and ".join(f"Exclusive on orders-fulfilment{topic}" for topic in topics)
        assert f"refuses consumers of type {refused}, unless" in caution.message
        assert "--types Exclusive,Key_Shared,Shared shop/prod" in caution.message


@pytest.mark.parametrize(
    ("of_namespace", "of_broker", "got"),
    [
        (False, False, None),
        (True, False, "encryptionRequired=true"),
        (False, True, "encryptionRequireOnProducer=true of the broker"),
        (True, True, "encryptionRequired=true and encryptionRequireOnProducer=true of the broker"),
    ],
)
def test_required_encryption_is_warned_about(
    policy: MakeBody, requested: MakeRequest, *, of_namespace: bool, of_broker: bool, got: str
) -> None:
    body = policy()
    request, observed = (
        requested(body),
        Observed(
            2,
            namespace=NamespaceState(requires_encryption=of_namespace),
            settings=BrokerSettings(requires_encryption=of_broker),
        ),
    )
    wanted = desired(request, body, "here", KEEPS_TICKS)
    seen = warnings(Evidence(body, wanted, observed, request))
    assert [caution.reason for caution in seen] == ["EncryptionRequired"] * (got is not None)
    for caution in seen:
        assert f"got {got}; to replay, disable it" in caution.message
        assert ("set-encryption-required --disable" in caution.message) is of_namespace
        assert ("in the configuration of the brokers" in caution.message) is of_broker


@pytest.mark.parametrize(
    ("asks", "have", "want"), [({}, 2, None), ({}, 3, 2), ({"partitions": 4}, 4, None),
                               ({"partitions": 4}, 5, 4)],
)  # fmt: skip
def test_shrinking_retry_topic_is_warned_about(
    policy: MakeBody, requested: MakeRequest, asks: dict[str, int], have: int, want: int | None
) -> None:
    body = policy(retry=asks)
    cautious = found(body, requested(body), retry=have)
    assert [caution.reason for caution in cautious] == ["PartitionsNeverShrink"] * (
        want is not None
    )
    for caution in cautious:
        assert f"should have {want} partitions" in caution.message
        assert f"got {have}; all partitions are consumed, so leave it, or set" in caution.message


@pytest.mark.parametrize(
    ("asks", "have", "warns"),
    [
        ({"partitions": 2}, 3, True),
        ({"partitions": 3}, 3, False),
        ({}, 3, False),
        ({"partitions": 2, "mode": "Discard"}, 3, False),
    ],
)
@pytest.mark.parametrize("retry", [2, 3])
def test_shrinking_dead_letter_topic_is_warned_about(  # noqa: PLR0913
    policy: MakeBody,
    requested: MakeRequest,
    asks: dict[str, Any],
    have: int,
    retry: int,
    *,
    warns: bool,
) -> None:
    body = policy(deadLetter=asks)
    waits, rests = (TopicState(count, NO_SUBSCRIPTIONS, {}, {}) for count in (retry, have))
    observed = Observed(2, topics={TopicRole.RETRY: waits, TopicRole.DEAD_LETTER: rests})
    wanted = desired(requested(body), body, "here", KEEPS_TICKS)
    seen = warnings(Evidence(body, wanted, observed, requested(body)))
    assert [caution.reason for caution in seen] == ["PartitionsNeverShrink"] * (warns or retry == 3)
    message = "".join(caution.message for caution in seen)
    assert ("or set deadLetter.partitions to 3" in message) is warns
    assert ("or set retry.partitions to 3" in message) is (retry == 3)


@pytest.mark.parametrize(("limit", "cautious"), [(0, False), (9_000, True), (10_000, False)])
def test_short_delivery_delay_limit_is_warned_about(
    policy: MakeBody, requested: MakeRequest, *, limit: int, cautious: bool
) -> None:
    body = policy(delayLadder={"delays": ["1s", "10s"]})
    delayed = {"active": True, "maxDeliveryDelayInMillis": limit}
    seen = found(body, requested(body), delayed=delayed)
    assert [caution.reason for caution in seen] == ["MaxDeliveryDelay"] * cautious
    for caution in seen:
        assert "the ladder, 10s; got a maxDeliveryDelay of 9 s" in caution.message


def test_blocked_younger_policies_are_named(policy: MakeBody, requested: MakeRequest) -> None:
    older = requested(policy("old", naming=SHORT))
    same = requested(policy("same", age=2, naming=SHORT))
    other = requested(policy("other", age=1, topic="persistent://shop/prod/returns", naming=SHORT))
    elsewhere = requested(policy("away", age=3, naming=SHORT), adminURL="http://there:8080")
    conflict, collision = found(policy(), older, [same, other, elsewhere])
    assert (conflict.reason, collision.reason) == ("ResourceConflict", "NameCollision")
    assert "got RetryPolicy shop/same;" in conflict.message
    assert "got RetryPolicy shop/other;" in collision.message
    assert found(policy(), other, [older]) == ()


def test_many_blocked_policies_are_counted(policy: MakeBody, requested: MakeRequest) -> None:
    many = [requested(policy(f"p{age}", age=age)) for age in range(1, 9)]
    [caution] = found(policy(), requested(policy("old")), many[::-1])
    assert "got RetryPolicy shop/p1, " in caution.message
    assert "RetryPolicy shop/p5, 3 more;" in caution.message


def test_blocked_policies_of_other_namespaces_are_only_counted(
    policy: MakeBody, requested: MakeRequest
) -> None:
    bodies = [policy("near", age=1), policy("far", age=2), policy("farther", age=3)]
    for body in bodies[1:]:
        body["metadata"]["namespace"] = "rivals"
    older = replace(requested(policy("old")), is_proven=True)
    [caution] = found(policy(), older, list(map(requested, bodies)))
    assert "got RetryPolicy shop/near, 2 of other namespaces;" in caution.message


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
