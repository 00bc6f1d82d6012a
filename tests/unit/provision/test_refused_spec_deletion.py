"""Deletion of a policy that is older than a rule, and that this release refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from redrive.admin.model import RightsChange
from redrive.errors import InvalidSpecError
from redrive.kube import resources
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import TopicName
from redrive.provision.finalize import LATE_WRITES
from redrive.provision.outcome import FINALIZER, has_cleanup_finalizer
from redrive.provision.ownership import GRANTED, OWNER_UID
from tests.support.fake_admin import Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import KEY, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
PREFIX = "persistent://shop/prod"
SYSTEM = "__transaction_buffer_snapshot"


def refused_policy(policy: MakeBody, **metadata: object) -> dict[str, Any]:
    """Return a policy that was Ready with a system topic before this release."""
    body = policy(
        naming={"retryTopic": f"{PREFIX}/{SYSTEM}"},
        consumerRoles=["fulfilment"],
        deletionPolicy="Delete",
    )
    body["status"] = {
        "retryTopic": f"{PREFIX}/{SYSTEM}",
        "deadLetterTopic": f"{PREFIX}/orders-fulfilment-DLQ",
    }
    body["metadata"] |= {"finalizers": [FINALIZER], **metadata}
    return body


def owned(body: dict[str, Any], actions: list[str]) -> Topic:
    """Return a topic of *body* on which redrive granted *actions*."""
    properties = {
        TOPIC_OWNER: f"this-cluster/{KEY}",
        OWNER_UID: body["metadata"]["uid"],
        GRANTED: json.dumps({"fulfilment": actions}),
    }
    return Topic(0, properties)


@pytest.mark.parametrize("local", [SYSTEM, "__change_events-partition-0", "%5F_change_events"])
def test_rights_on_system_topic_are_taken_and_never_given(local: str) -> None:
    topic = TopicName("shop", "prod", local)
    RightsChange(topic, "fulfilment", take=frozenset({"produce"}))
    with pytest.raises(InvalidSpecError, match="one of Pulsar's own"):
        RightsChange(topic, "fulfilment", give=frozenset({"produce"}))


async def test_policy_with_system_topic_is_invalid_and_grants_nothing(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = refused_policy(policy)
    async with reconcile_harness(connection, body, FakeKubernetes()) as harness:
        namespace = harness.broker.namespaces["shop/prod"]
        namespace.topics[SYSTEM] = Topic(0, {})
        await harness.reconcile()
        (stored,) = harness.kubernetes.objects[resources.POLICIES].values()
        ready = next(c for c in stored["status"]["conditions"] if c["type"] == "Ready")
        assert ready["reason"] == "InvalidSpec"
        assert "one of Pulsar's own" in ready["message"]
        assert namespace.grants == {}
        assert harness.broker.writes == []


@pytest.mark.parametrize("deletion", ["Delete", "DeleteIfEmpty", "RevokeGrants"])
async def test_deletion_of_policy_with_system_topic_revokes_its_grants(
    connection: dict[str, Any], policy: MakeBody, deletion: str
) -> None:
    body = refused_policy(policy, deletionTimestamp="2026-01-01T00:00:00Z")
    body["spec"]["deletionPolicy"] = deletion
    dead_letters = "orders-fulfilment-DLQ"
    async with reconcile_harness(connection, body, FakeKubernetes()) as harness:
        namespace = harness.broker.namespaces["shop/prod"]
        namespace.topics[SYSTEM] = owned(body, ["consume", "produce"])
        namespace.topics[dead_letters] = owned(body, ["produce"])
        namespace.grants = {
            f"{PREFIX}/{SYSTEM}": {"fulfilment": ["consume", "produce"], "broker": ["produce"]},
            f"{PREFIX}/{dead_letters}": {"fulfilment": ["consume", "produce"]},
        }
        harness.now += LATE_WRITES
        await harness.reconcile()
        assert namespace.grants == {
            f"{PREFIX}/{SYSTEM}": {"broker": ["produce"]},
            f"{PREFIX}/{dead_letters}": {"fulfilment": ["consume"]},
        }
        assert harness.topics == {"orders", SYSTEM, dead_letters}
        assert not any(
            map(has_cleanup_finalizer, harness.kubernetes.objects[resources.POLICIES].values())
        )


@pytest.mark.parametrize("deletion", ["Retain", "Delete"])
async def test_rights_on_system_topic_are_taken_back_at_once(
    connection: dict[str, Any], policy: MakeBody, deletion: str
) -> None:
    """Whoever has them can stop all producers of the namespace."""
    body = refused_policy(policy)
    body["spec"]["deletionPolicy"] = deletion
    dead_letters = f"{PREFIX}/orders-fulfilment-DLQ"
    async with reconcile_harness(connection, body, FakeKubernetes()) as harness:
        namespace = harness.broker.namespaces["shop/prod"]
        namespace.topics[SYSTEM] = owned(body, ["consume", "produce"])
        namespace.topics["orders-fulfilment-DLQ"] = owned(body, ["produce"])
        namespace.grants = {
            f"{PREFIX}/{SYSTEM}": {"fulfilment": ["consume", "produce"], "broker": ["produce"]},
            dead_letters: {"fulfilment": ["produce"]},
        }
        await harness.reconcile()
        assert namespace.grants == {
            f"{PREFIX}/{SYSTEM}": {"broker": ["produce"]},
            dead_letters: {"fulfilment": ["produce"]},
        }
        writes = len(harness.broker.writes)
        await harness.reconcile()
        assert len(harness.broker.writes) == writes
