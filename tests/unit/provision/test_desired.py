"""Desired topics, policies, rights and delays of a RetryPolicy."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from aiohttp import web

from redrive.admin import client
from redrive.admin.model import NamespaceState
from redrive.admin.policies import Holds, KeepsBacklog, LimitsBacklog, Ttl
from redrive.api import Body
from redrive.api.conditions import find, is_ready
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.resources import Key
from redrive.policy import codec
from redrive.policy.naming import TopicName
from redrive.provision.actions import CreateTopic
from redrive.provision.desired import (
    Desired,
    DesiredTopic,
    Observed,
    TopicRole,
    config_map_of,
    delay_policy,
    desired,
    policies_in_force,
)
from redrive.provision.diff import diff
from redrive.provision.request import Request
from tests.support.fake_admin import Do, Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.operator_in_process import KEY, ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
RETRY = "persistent://shop/prod/orders-fulfilment-RETRY"
DEAD_LETTER = "persistent://shop/prod/orders-fulfilment-DLQ"
LEDGER = "persistent://shop/prod/orders-fulfilment-DLQ-LEDGER"


def topic_of(wanted: Desired, role: TopicRole) -> DesiredTopic:
    topic = wanted.topic(role)
    assert topic is not None
    return topic


def granted(requested: Request, body: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    return {(str(g.topic), g.role): set(g.actions) for g in desired(requested, body, "here").grants}


def test_policy_gets_topics_subscriptions_and_policies(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy()
    wanted = desired(requested(body), body, "here")
    assert (str(wanted.retry.name), wanted.retry.subscription) == (RETRY, "fulfilment")
    assert [str(p) for p in wanted.retry.policies] == [
        "deduplication",
        "messageTTL 0 s",
        "delayedDelivery active True",
        "backlog quota",
        "inactiveTopicPolicies deleteWhileInactive False",
    ]
    dead_letter, ledger = (
        topic_of(wanted, TopicRole.DEAD_LETTER),
        topic_of(wanted, TopicRole.LEDGER),
    )
    assert (str(dead_letter.name), dead_letter.subscription) == (DEAD_LETTER, "redrive")
    assert [str(p) for p in dead_letter.policies] == [
        "deduplication",
        "messageTTL 0 s",
        "backlog quota",
        "inactiveTopicPolicies deleteWhileInactive False",
    ]
    assert (str(ledger.name), ledger.subscription) == (LEDGER, "__compaction")
    assert [str(p) for p in ledger.policies] == [
        "messageTTL 0 s",
        "backlog quota",
        "compaction above 10485760 bytes",
        "inactiveTopicPolicies deleteWhileInactive False",
    ]


def test_ttl_retention_and_quota_follow_the_spec(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(
        retry={"messageTTL": "11d"},
        deadLetter={
            "messageTTL": "30d",
            "retention": {"time": "7d"},
            "backlogQuota": {"size": "3Mi"},
        },
    )
    wanted = desired(requested(body), body, "here")
    assert Ttl(11 * 86_400) in wanted.retry.policies
    dead_letter = topic_of(wanted, TopicRole.DEAD_LETTER)
    assert {Ttl(30 * 86_400), LimitsBacklog(3 * 2**20)} <= set(dead_letter.policies)
    retention = (("retentionTimeInMinutes", 7 * 1_440), ("retentionSizeInMB", -1))
    assert Holds("retention", retention) in dead_letter.policies


def test_dead_letter_partitions_and_subscription_follow_spec(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"partitions": 3, "subscription": "triage"})
    wanted = desired(requested(body), body, "here")
    topic = topic_of(wanted, TopicRole.DEAD_LETTER)
    assert (topic.partitions, topic.subscription) == (3, "triage")
    written = codec.decode(wanted.config_map["data"]["policy.json"])
    assert written.dead_letter_subscription == "triage"


def test_consumer_role_gets_retry_and_dead_letter_rights(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(consumerRoles=["shop-a", "shop-b"])
    assert granted(requested(body, replay=None), body) == {
        (RETRY, "shop-a"): {"produce", "consume"},
        (DEAD_LETTER, "shop-a"): {"produce"},
        (RETRY, "shop-b"): {"produce", "consume"},
        (DEAD_LETTER, "shop-b"): {"produce"},
    }


def test_discarding_policy_needs_no_dead_letter_topic(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"mode": "Discard"})
    assert desired(requested(body), body, "here").topic(TopicRole.DEAD_LETTER) is None
    assert granted(requested(body), body) == {(RETRY, "fulfilment"): {"produce", "consume"}}
    written = desired(requested(body), body, "here").config_map["data"]["policy.json"]
    assert not codec.decode(written).dead_letters


def test_reader_role_gets_consume_on_dead_letters_only(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(consumerRoles=[], deadLetter={"readerRoles": ["shop-oncall"]})
    assert granted(requested(body, replay=None), body) == {
        (DEAD_LETTER, "shop-oncall"): {"consume"}
    }


def test_replay_role_gets_ledger_and_dead_letter_rights(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(consumerRoles=[])
    assert granted(requested(body), body) == {
        (RETRY, "replayer"): {"produce", "consume"},
        (DEAD_LETTER, "replayer"): {"consume"},
        (LEDGER, "replayer"): {"produce", "consume"},
    }
    without = desired(requested(body, replay=None), body, "here")
    assert without.topic(TopicRole.LEDGER) is None
    assert without.grants == ()


def test_role_that_consumes_and_replays_gets_one_grant(
    policy: MakeBody, requested: MakeRequest, connection: dict[str, Any]
) -> None:
    body = policy(consumerRoles=["fulfilment", "fulfilment"])
    both = connection["replay"] | {"role": "fulfilment"}
    assert granted(requested(body, replay=both), body) == {
        (RETRY, "fulfilment"): {"produce", "consume"},
        (DEAD_LETTER, "fulfilment"): {"produce", "consume"},
        (LEDGER, "fulfilment"): {"produce", "consume"},
    }


def test_schema_goes_to_topics_whose_roles_may_see_it(
    policy: MakeBody, requested: MakeRequest
) -> None:
    topic = "persistent://shop/prod/orders"
    shared = [
        {"name": "source", "topics": [topic]},
        {"name": "retry", "topics": [f"{topic}-*-RETRY"]},
        {"name": "dead", "topics": [f"{topic}-*-DLQ"], "roles": ["fulfilment"]},
    ]
    body = policy(consumerRoles=[])
    request = requested(body, allow=shared)
    assert desired(request, body, "here").schema_topics == {request.policy.retry_topic}
    request = requested(body)
    assert desired(request, body, "here").schema_topics == set(request.spec.permitted_topics)


def test_config_map_contains_policy_and_owner(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(maxRetries=3)
    config_map = desired(requested(body), body, "here").config_map
    assert config_map["metadata"]["name"] == "orders-redrive"
    assert config_map["metadata"]["namespace"] == "shop"
    assert config_map["metadata"]["labels"] == {
        "app.kubernetes.io/managed-by": "redrive", "redrive.io/policy": "orders"
    }  # fmt: skip
    assert config_map["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "redrive.io/v1beta1",
            "kind": "RetryPolicy",
            "name": "orders",
            "uid": "uid-orders",
            "controller": True,
        }
    ]
    written = codec.decode(config_map["data"]["policy.json"])
    assert written == requested(body).policy
    assert (written.name, written.generation, written.max_retries) == ("shop/orders", 7, 3)


def test_config_map_has_the_name_of_the_spec(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(naming={"configMap": "retries"})
    named = desired(requested(body), body, "here").config_map
    assert (named["metadata"]["name"], config_map_of(body)) == ("retries", Key("shop", "retries"))


def test_ledger_has_no_partitions(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(deadLetter={"partitions": 3})
    wanted = desired(requested(body), body, "here")
    created = {
        action.topic: action.partitions
        for action in diff(wanted, Observed(source_partitions=2))
        if isinstance(action, CreateTopic)
    }
    assert created == {
        TopicName.parse(RETRY): 2,
        TopicName.parse(DEAD_LETTER): 3,
        topic_of(wanted, TopicRole.LEDGER).name: 0,
    }


def test_sequence_records_get_topic_like_a_ledger(policy: MakeBody, requested: MakeRequest) -> None:
    body = policy(
        subscriptionType="KeyShared",
        ordering="PerKey",
        consumerRoles=["fulfilment"],
        deadLetter={"sequenced": True, "partitions": 3},
    )
    wanted = desired(requested(body), body, "here")
    ledger, sequences = topic_of(wanted, TopicRole.LEDGER), topic_of(wanted, TopicRole.SEQUENCES)
    assert str(sequences.name) == f"{DEAD_LETTER}-SEQUENCES"
    assert sequences.subscription == ledger.subscription
    assert sequences.policies == ledger.policies
    may = {(str(g.topic), g.role): set(g.actions) for g in wanted.grants}
    assert may[f"{DEAD_LETTER}-SEQUENCES", "fulfilment"] == {"produce", "consume"}
    assert (f"{DEAD_LETTER}-SEQUENCES", "replayer") not in may
    created = {
        action.topic: action.partitions
        for action in diff(wanted, Observed(source_partitions=2))
        if isinstance(action, CreateTopic)
    }
    assert created[sequences.name] == 0
    assert codec.decode(codec.encode(wanted.policy)).sequenced


BY_SIZE = {"limitSize": 5, "policy": "consumer_backlog_eviction"}
BY_AGE = {"limitTime": 60, "policy": "producer_exception"}
Quotas = dict[str, Any]


@pytest.mark.parametrize(
    ("of_topic", "of_namespace", "in_force"),
    [
        (None, {}, {}),
        (None, {"message_age": BY_AGE}, {"message_age": BY_AGE}),
        ({}, {"message_age": BY_AGE}, {"message_age": BY_AGE}),
        ({"message_age": BY_AGE}, {"message_age": {}}, {"message_age": BY_AGE}),
        (
            {"destination_storage": BY_SIZE},
            {"message_age": BY_AGE},
            {"destination_storage": BY_SIZE, "message_age": BY_AGE},
        ),
    ],
)
def test_missing_quotas_of_topic_come_from_its_namespace(
    of_topic: Quotas | None, of_namespace: Quotas, in_force: Quotas
) -> None:
    namespace = NamespaceState(frozenset(), frozenset(), {}, 0, of_namespace, None)
    policies = {KeepsBacklog.read: of_topic, Ttl.read: 60}
    assert policies_in_force(policies, namespace) == {KeepsBacklog.read: in_force, Ttl.read: 60}


@pytest.mark.parametrize(
    ("shortest", "release", "policy"),
    [
        (1, (4, 0, 8), "delayed delivery within 50 ms"),
        (5, (4, 0), "delayed delivery within 250 ms"),
        (20, (4, 0, 8), "delayed delivery within 1000 ms"),
        (864_000, (3, 3, 1), "delayed delivery within 1000 ms"),
        (1, (4, 1, 0), "delayedDelivery active True"),
        (1, (4, 2, 4), "delayedDelivery active True"),
        (1, (), "delayedDelivery active True"),
    ],
)
def test_delay_tick_is_fraction_of_shortest_delay(
    shortest: int, release: tuple[int, ...], policy: str
) -> None:
    assert str(delay_policy(timedelta(seconds=shortest), release)) == policy


IDLE = {"inactiveTopicDeleteMode": "delete_when_subscriptions_caught_up",
        "maxInactiveDurationSeconds": 86_400, "deleteWhileInactive": True}  # fmt: skip


@pytest.mark.parametrize(("release", "tick"), [("4.0.8", 50), ("4.2.4", 700)])
async def test_new_topics_keep_broker_values_that_do_not_matter(
    connection: dict[str, Any], policy: Callable[..., dict[str, Any]], release: str, tick: int
) -> None:
    harness = reconcile_harness(connection, policy(), FakeKubernetes())
    harness.broker.version = release
    harness.broker.in_force |= {
        "inactiveTopicPolicies": IDLE,
        "delayedDelivery": {
            "active": False, "tickTime": 700, "maxDeliveryDelayInMillis": 60_000,
        },
    }  # fmt: skip
    await harness.reconcile()
    topics = harness.broker.namespaces["shop/prod"].topics
    new = {
        name: topic.policies
        for name, topic in topics.items()
        if name.startswith("orders-fulfilment")
    }
    assert len(new) == 3
    for policies in new.values():
        assert policies["inactiveTopicPolicies"] == IDLE | {"deleteWhileInactive": False}
    assert new["orders-fulfilment-RETRY"]["delayedDelivery"] == {
        "active": True, "tickTime": tick, "maxDeliveryDelayInMillis": 60_000,
    }  # fmt: skip
    writes = len(harness.broker.writes)
    await harness.reconcile()
    assert len(harness.broker.writes) == writes


def test_quota_read_never_requests_applied_values() -> None:
    assert "applied" not in KeepsBacklog.read


def change_spec(here: ReconcileHarness, body: Body) -> None:
    """Have the spec of the policy changed."""
    stored = here.kubernetes.objects[resources.POLICIES]
    (key, before), *_ = stored.items()
    metadata = {**before["metadata"], "generation": 8, "resourceVersion": "5000"}
    stored[key] = {**before, "metadata": metadata, "spec": body["spec"]}
    here.ctx.policies.put(stored[key])


def rights_on(here: ReconcileHarness, topic: str) -> dict[str, set[str]]:
    grants = here.broker.namespaces["shop/prod"].grants.get(topic, {})
    return {role: set(actions) for role, actions in grants.items() if actions}


async def test_discarding_policy_revokes_rights_of_removed_roles(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    before = policy(consumerRoles=["shop-a", "shop-b"], deadLetter={"readerRoles": ["shop-c"]})
    here = reconcile_harness(connection, before, FakeKubernetes())
    await here.reconcile()
    grants = here.broker.namespaces["shop/prod"].grants
    grants[DEAD_LETTER]["shop-b"].append("functions")  # by another
    grants[DEAD_LETTER]["auditor"] = ["consume"]
    change_spec(here, policy(consumerRoles=["shop-a"], deadLetter={"mode": "Discard"}))
    await here.reconcile()
    assert rights_on(here, DEAD_LETTER) == {
        "shop-a": {"produce"},  # its consumers may still run with the policy before
        "shop-b": {"functions"},
        "auditor": {"consume"},
        "replayer": {"consume"},
    }
    assert rights_on(here, RETRY) == {"shop-a": {"produce", "consume"}}
    writes = len(here.broker.writes)
    await here.reconcile()
    assert len(here.broker.writes) == writes


async def test_revoked_right_on_unused_topic_is_not_granted_again(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    here = reconcile_harness(connection, policy(), FakeKubernetes())
    await here.reconcile()
    here.broker.namespaces["shop/prod"].grants[DEAD_LETTER] = {"auditor": ["consume"]}
    change_spec(here, policy(deadLetter={"mode": "Discard"}))
    await here.reconcile()
    assert rights_on(here, DEAD_LETTER) == {"auditor": {"consume"}}


BY_DEFAULT = {"active": True, "maxDeliveryDelayInMillis": 0}


@pytest.fixture
async def harness(
    connection: dict[str, Any], policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> ReconcileHarness:
    """A policy whose shortest delay is 1 s, at a broker of 4.0 that is asked for its release."""
    monkeypatch.setattr(client, "VERSION_SECONDS", 0)
    return reconcile_harness(connection, policy(), FakeKubernetes())


def retry_topic(harness: ReconcileHarness) -> Topic:
    return harness.broker.namespaces["shop/prod"].topics["orders-fulfilment-RETRY"]


async def reconcile_with(harness: ReconcileHarness, **spec: object) -> dict[str, Any]:
    """Have the policy reconciled, with another *spec* if one is given; return it."""
    body = harness.kubernetes.objects[resources.POLICIES][KEY]
    if spec:
        metadata = body["metadata"] | {"generation": body["metadata"]["generation"] + 1}
        body = body | {"spec": body["spec"] | spec, "metadata": metadata}
        harness.kubernetes.add(resources.POLICIES, body)
    harness.ctx.policies.put(body)
    assert await harness.reconcile() is Requeue.ON_CHANGE
    after: dict[str, Any] = harness.kubernetes.objects[resources.POLICIES][KEY]
    return after


async def test_tick_follows_shortest_delay(harness: ReconcileHarness) -> None:
    await reconcile_with(harness)
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 50}
    await reconcile_with(harness, delayLadder={"delays": ["5s", "10s"]})
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 250}
    await reconcile_with(harness, delayLadder={"delays": ["5s", "10s"]}, delayLevels=["2s"])
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 100}
    await reconcile_with(harness, delayLadder={"fixed": "2s"}, delayLevels=None)
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 100}
    await reconcile_with(harness, delayLadder={"fixed": "1h"}, delayLevels=["1m"])
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 1_000}


async def test_tick_is_removed_after_broker_upgrade(
    harness: ReconcileHarness,
) -> None:
    await reconcile_with(harness)
    assert retry_topic(harness).policies["delayedDelivery"]["tickTime"] == 50
    harness.broker.version = "4.2.4"
    await reconcile_with(harness)
    assert "delayedDelivery" not in retry_topic(harness).policies
    writes = len(harness.broker.writes)
    await reconcile_with(harness)
    assert len(harness.broker.writes) == writes
    harness.broker.version = "4.0.8"
    await reconcile_with(harness)
    assert retry_topic(harness).policies["delayedDelivery"]["tickTime"] == 50


@pytest.mark.parametrize("refusal", [403, 405, 412])
async def test_refused_delay_policy_warns_and_provisions_the_rest(
    harness: ReconcileHarness, refusal: int
) -> None:
    async def forbid(request: web.Request, do: Do) -> web.StreamResponse:
        if request.method == "POST" and request.path.endswith("/delayedDelivery"):
            return web.json_response({"reason": "not allowed"}, status=refusal)
        return await do()

    harness.broker.fault = forbid
    body = await reconcile_with(harness)
    assert is_ready(body)
    warning = find(body, "DelayedDeliveryRefused")
    assert warning is not None
    assert "so retries may come 1 s early, and the shortest delay is 1s" in warning.message
    assert "not allowed" in warning.message
    assert retry_topic(harness).subscriptions == ["fulfilment"]
    retry_topic(harness).policies["delayedDelivery"] = {"active": False, "tickTime": 1_000}
    body = await reconcile_with(harness)
    warning = find(body, "DelayedDeliveryRefused")
    assert warning is not None
    assert "so retries are delivered immediately, without their delay" in warning.message
    harness.broker.fault = None
    body = await reconcile_with(harness)
    assert find(body, "DelayedDeliveryRefused") is None
    assert retry_topic(harness).policies["delayedDelivery"]["active"] is True


@pytest.mark.parametrize("version", ["4.2.4", "not told"])
async def test_early_delay_without_settable_tick_is_warned_about(
    harness: ReconcileHarness, version: str
) -> None:
    harness.broker.version = version
    body = await reconcile_with(harness)
    warning = find(body, "RetriesEarly")
    assert warning is not None
    assert "so a retry of 1s at once" in warning.message
    assert "got a tick of 1 s on persistent://shop/prod/orders-fulfilment-RETRY" in warning.message
    assert "set delayedDeliveryTickTimeMillis=50 in the configuration" in warning.message
    assert is_ready(body)
    body = await reconcile_with(harness)
    assert find(body, "RetriesEarly") == warning
    body = await reconcile_with(harness, delayLadder={"delays": ["2s", "10s"]})
    assert find(body, "RetriesEarly") is None
    body = await reconcile_with(harness, delayLevels=["1s"])
    assert find(body, "RetriesEarly") is not None


async def test_broker_with_finer_tick_is_not_warned_about(
    harness: ReconcileHarness,
) -> None:
    harness.broker.version = "4.2.4"
    harness.broker.in_force["delayedDelivery"] = BY_DEFAULT | {"tickTime": 50}
    body = await reconcile_with(harness)
    assert is_ready(body)
    assert find(body, "RetriesEarly") is None
    harness.broker.in_force["delayedDelivery"] = BY_DEFAULT | {"tickTime": 1_000}
    body = await reconcile_with(harness)
    assert find(body, "RetriesEarly") is not None


async def test_delay_with_tick_set_is_not_warned_about(
    harness: ReconcileHarness,
) -> None:
    assert find(await reconcile_with(harness), "RetriesEarly") is None
    assert find(await reconcile_with(harness), "RetriesEarly") is None


async def test_observing_policy_with_unknown_tick_is_not_warned(
    harness: ReconcileHarness,
) -> None:
    harness.broker.version = "4.2.4"
    assert find(await reconcile_with(harness, managementPolicy="Observe"), "RetriesEarly") is None
