"""Ownership of topics: a deletion reverts the changes of redrive and nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.integration.provision.conftest import MakeShop, Shop, keeps_ticks, rest_path


@pytest.fixture(scope="module")
def busy(make_shop: MakeShop) -> Shop:
    """A shop for all tests here, each with a source topic of its own."""
    shop = make_shop()
    shop.connection(allow=[shop.rule("fulfilment", "shop-*")])
    return shop


def properties(shop: Shop, topic: str) -> dict[str, str]:
    """The properties of redrive on a topic that are not empty."""
    properties = shop.request("GET", f"{rest_path(topic)}/properties") or {}
    return {key: value for key, value in properties.items() if "redrive.io/" in key and value}


def rights(shop: Shop, topic: str) -> dict[str, set[str]]:
    """Role → actions on a topic."""
    policies = shop.request("GET", f"namespaces/{shop.tenant}/prod")
    by_role = policies["auth_policies"]["destination_auth"].get(topic, {})
    return {role: set(actions) for role, actions in by_role.items()}


def grant(shop: Shop, topic: str, role: str, *actions: str) -> None:
    """Grant rights to a role, as the super-user."""
    shop.request("POST", f"{rest_path(topic)}/permissions/{role}", actions)


@pytest.mark.parametrize("partitions", [0, 2])
def test_created_topics_record_their_origin_and_owner(busy: Shop, partitions: int) -> None:
    name = f"made-{partitions}"
    busy.create_topic(busy.topic(name), partitions)
    busy.policy(name, topic=busy.topic(name))
    status = busy.ready(name)["status"]
    system = busy.cluster.objects.get("namespace", "kube-system")["metadata"]["uid"]
    # Where redrive sets a tick, it records that the topic had none before.
    tick = {"delayedDeliveryTick": None} if keeps_ticks(busy.broker) else {}
    for topic, may, replaced in (
        (status["retryTopic"], ["consume", "produce"], tick),
        (status["deadLetterTopic"], ["produce"], {}),
    ):
        marks = properties(busy, topic)
        assert json.loads(marks.pop("redrive.io/replaced", "{}")) == replaced
        assert json.loads(marks.pop("redrive.io/granted")) == {"fulfilment": may}
        assert marks == {
            "redrive.io/owner": f"{system}/{busy.namespace}/{name}",
            "redrive.io/owner-uid": busy.get("retrypolicy", name)["metadata"]["uid"],
            "redrive.io/source": f"{busy.topic(name)}/fulfilment",
            "redrive.io/created": "true",
        }


def test_adopted_topics_record_only_the_changes_of_redrive(busy: Shop) -> None:
    retry = busy.topic("adopted-fulfilment-RETRY")
    dead_letter = busy.topic("adopted-fulfilment-DLQ")
    for topic in (busy.topic("adopted"), retry, dead_letter):
        busy.create_topic(topic)
    busy.request("PUT", f"{rest_path(retry)}/subscription/fulfilment", {})
    busy.request("PUT", f"{rest_path(retry)}/properties", {"team": "orders"})
    grant(busy, retry, "fulfilment", "consume")
    busy.policy("adopted", topic=busy.topic("adopted"), adoption="IfPresent")
    busy.ready("adopted")
    marks = properties(busy, retry)
    assert json.loads(marks.pop("redrive.io/granted")) == {"fulfilment": ["produce"]}
    assert set(json.loads(marks.pop("redrive.io/replaced")).values()) == {None}
    assert marks.keys() == {"redrive.io/owner", "redrive.io/owner-uid", "redrive.io/source"}
    assert properties(busy, dead_letter)["redrive.io/subscription"] == "redrive"
    assert "redrive.io/created" not in properties(busy, dead_letter)
    assert busy.request("GET", f"{rest_path(retry)}/properties")["team"] == "orders"


def test_removed_role_keeps_only_rights_that_others_granted(busy: Shop) -> None:
    busy.create_topic(busy.topic("roles"))
    retry, dead_letter = (busy.topic(f"roles-fulfilment-{end}") for end in ("RETRY", "DLQ"))
    busy.create_topic(retry)
    for role, *actions in (
        ("shop-before", "consume", "functions"),
        ("shop-same", "consume", "produce"),
        ("nobody", "consume"),
    ):
        grant(busy, retry, role, *actions)
    before = rights(busy, retry)
    ours = ["fulfilment", "shop-before", "shop-same"]
    readers = {"readerRoles": ["shop-before"]}
    spec = {"topic": busy.topic("roles"), "adoption": "IfPresent", "deadLetter": readers}
    busy.policy("roles", **spec, consumerRoles=ours)
    busy.ready("roles")
    assert rights(busy, retry) == before | {
        "fulfilment": {"consume", "produce"},
        "shop-before": {"consume", "functions", "produce"},
    }
    assert rights(busy, dead_letter)["shop-before"] == {"consume", "produce"}
    # One more action than redrive granted.
    grant(busy, retry, "fulfilment", "consume", "produce", "functions")
    busy.policy("roles", **spec, consumerRoles=[])
    busy.ready("roles")
    assert rights(busy, retry) == before | {"fulfilment": {"functions"}}
    assert rights(busy, dead_letter) == {"shop-before": {"consume"}}
    assert "redrive.io/granted" not in properties(busy, retry)


def test_topic_of_another_cluster_is_refused_until_released(
    busy: Shop,
) -> None:
    busy.create_topic(busy.topic("foreign"))
    retry = busy.topic("foreign-fulfilment-RETRY")
    busy.create_topic(retry)
    mark = {"redrive.io/owner": f"elsewhere/{busy.namespace}/foreign"}
    busy.request("PUT", f"{rest_path(retry)}/properties", mark)
    before = state(busy, "foreign")
    busy.policy("foreign", topic=busy.topic("foreign"), adoption="IfPresent")
    refused = busy.reaches("foreign", "OwnerConflict")
    conditions = {c["type"]: c["message"] for c in refused["status"]["conditions"]}
    assert conditions.keys() == {"Ready", "Stalled"}
    assert f"got 'redrive.io/owner=elsewhere/{busy.namespace}/foreign'" in conditions["Stalled"]
    assert state(busy, "foreign") == before
    busy.request("DELETE", f"{rest_path(retry)}/properties?key=redrive.io/owner")
    busy.ready("foreign")


def test_deleted_config_map_of_another_owner_is_replaced_at_once(busy: Shop) -> None:
    busy.create_topic(busy.topic("room"))
    # As with a policy created again before the former ConfigMap is garbage-collected.
    labels = {"app.kubernetes.io/managed-by": "redrive"}
    metadata = {"name": "room-redrive", "labels": labels}
    former = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    busy.cluster.objects.create(former, busy.namespace)
    busy.policy("room", topic=busy.topic("room"))
    busy.reaches("room", "ConfigMapNotOurs")
    busy.start_deletion("room-redrive", "configmap")
    busy.ready("room")  # only the deletion causes an attempt that soon


def test_policy_created_again_owns_its_topics(busy: Shop) -> None:
    busy.create_topic(busy.topic("again"))
    for _ in range(2):
        busy.policy("again", topic=busy.topic("again"))
        retry = busy.ready("again")["status"]["retryTopic"]
        assert properties(busy, retry)["redrive.io/created"] == "true"
        busy.delete("again")


POLICIES = (
    "messageTTL",
    "deduplicationEnabled",
    "delayedDelivery",
    "inactiveTopicPolicies",
    "retention",
    "backlogQuotaMap",
)


def whole(shop: Shop, topic: str) -> dict[str, Any]:
    """The policies, subscriptions, rights and properties of a topic."""
    path = rest_path(topic)
    return {
        **{policy: shop.request("GET", f"{path}/{policy}") for policy in POLICIES},
        "subscriptions": shop.request("GET", f"{path}/subscriptions"),
        "rights": rights(shop, topic),
        "properties": {
            key: value
            for key, value in (shop.request("GET", f"{path}/properties") or {}).items()
            if value
        },
    }


def test_adoption_needs_permission_and_is_reverted_by_deletion(
    busy: Shop,
) -> None:
    payroll, audit = busy.topic("payroll"), busy.topic("audit")
    for topic in (busy.topic("hours"), payroll, audit):
        busy.create_topic(topic)
    path = rest_path(payroll)
    age = {"limitTime": 3600, "limitSize": -1, "policy": "consumer_backlog_eviction"}
    busy.request("PUT", f"{path}/subscription/bank", {})
    busy.request("POST", f"{path}/messageTTL?messageTTL=3600")
    busy.request("POST", f"{path}/backlogQuota?backlogQuotaType=message_age", age)
    busy.request("PUT", f"{path}/properties", {"team": "pay"})
    grant(busy, payroll, "fulfilment", "consume")
    busy.request("POST", f"{rest_path(audit)}/deduplicationEnabled", body=False)
    before = {topic: whole(busy, topic) for topic in (payroll, audit)}
    assert before[payroll]["messageTTL"] == 3600
    cautious = busy.rule("fulfilment") | {"adoption": "Never"}
    busy.connection("cautious", allow=[cautious])
    spec: dict[str, Any] = {
        "connectionRef": {"name": "cautious"},
        "topic": busy.topic("hours"),
        "naming": {"retryTopic": payroll, "deadLetterTopic": audit},
        "deadLetter": {"retention": {"time": "1h"}, "backlogQuota": {"size": "5Mi"}},
        "deletionPolicy": "Delete",
    }
    busy.policy("hours", **spec)
    busy.reaches("hours", "TopicExists")
    busy.policy("hours", **spec, adoption="IfPresent")
    busy.reaches("hours", "AdoptionNotAllowed")
    assert {topic: whole(busy, topic) for topic in (payroll, audit)} == before
    busy.connection("cautious", allow=[cautious | {"adoption": "Allowed", "deletion": "Never"}])
    busy.reaches("hours", "DeletionNotAllowed")
    busy.connection("cautious", allow=[cautious | {"adoption": "Allowed", "deletion": "Allowed"}])
    busy.ready("hours")
    during = whole(busy, payroll)
    assert (during["messageTTL"], during["deduplicationEnabled"]) == (0, True)
    quota = during["backlogQuotaMap"]["message_age"]
    assert (quota["limitTime"], quota["policy"]) == (-1, "producer_exception")
    assert whole(busy, audit)["retention"]["retentionTimeInMinutes"] == 60
    busy.delete("hours")
    assert {topic: whole(busy, topic) for topic in (payroll, audit)} == before


def test_handover_moves_all_topics_of_a_policy(busy: Shop) -> None:
    token = {"secretRef": {"name": "replayer", "key": "token"}}
    authentication = {"type": "Token", "token": token}
    busy.connection("replaying", replay={"role": "replayer", "authentication": authentication})
    busy.create_topic(busy.topic("blue"))
    busy.policy(
        "blue",
        topic=busy.topic("blue"),
        connectionRef={"name": "replaying"},
        subscriptionType="KeyShared",
        ordering="PerKey",
        deadLetter={"sequenced": True},
    )
    status = busy.ready("blue")["status"]
    fields = ("retryTopic", "deadLetterTopic", "ledgerTopic", "sequencesTopic")
    topics = [status[field] for field in fields]
    marks = [properties(busy, topic) for topic in topics]
    owner = marks[0]["redrive.io/owner"]
    successor = owner.replace(owner.partition("/")[0], "green")
    busy.annotate("blue", hand_over_to="green")
    busy.reaches("blue", "HandedOver")
    assert {properties(busy, topic)["redrive.io/owner"] for topic in topics} == {successor}
    busy.annotate("blue", hand_over_to=None)
    busy.reaches("blue", "OwnerConflict")

    for topic in topics:  # returned one after the other
        busy.reaches("blue", "OwnerConflict")
        mark = {"redrive.io/owner": owner, "redrive.io/owner-uid": ""}
        busy.request("PUT", f"{rest_path(topic)}/properties", mark)
    busy.ready("blue")
    assert [properties(busy, topic) for topic in topics] == marks


@pytest.mark.parametrize("retained", [True, False])
def test_dead_letters_of_another_namespace_cannot_be_taken(
    busy: Shop, make_shop: MakeShop, *, retained: bool
) -> None:
    """The dead letters of a deleted policy, and of a policy that now discards them."""
    name = f"victim-{retained}".lower()
    busy.create_topic(busy.topic(name))
    busy.policy(name, topic=busy.topic(name))
    dead_letter = busy.ready(name)["status"]["deadLetterTopic"]
    busy.request("PUT", f"{rest_path(dead_letter)}/subscription/rest", {})
    if retained:
        busy.delete(name)
    else:
        busy.policy(name, topic=busy.topic(name), deadLetter={"mode": "Discard"})
        busy.ready(name)
    other = make_shop()
    lent = {**busy.rule("fulfilment"), "namespaces": {"names": [other.namespace]}}
    busy.connection("lent", allow=[lent])
    busy.create_topic(busy.topic(f"{name}-mine"))
    before = state(busy, f"{name}-fulfilment")
    other.policy(
        "thief",
        connectionRef={"name": "lent", "namespace": busy.namespace},
        topic=busy.topic(f"{name}-mine"),
        naming={"deadLetterTopic": dead_letter},
        deletionPolicy="Delete",
    )
    conditions = str(other.reaches("thief", "OwnerConflict")["status"]["conditions"])
    assert "take-over-from" not in conditions
    other.annotate("thief", take_over_from=name)
    other.request_reconcile("thief")
    time.sleep(2)
    other.reaches("thief", "OwnerConflict")
    other.delete("thief")
    assert state(busy, f"{name}-fulfilment") == before


def state(shop: Shop, name: str) -> dict[str, Any]:
    """Everything that the broker stores of the topics of one source."""
    return {
        topic: (topic_state, properties(shop, topic), rights(shop, topic))
        for topic, topic_state in shop.topics().items()
        if f"/{name}" in topic
    }
