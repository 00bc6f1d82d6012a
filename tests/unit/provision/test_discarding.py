"""A policy that discards leaves its dead-letter topic, and rights on it to those it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redrive.api import Body
from redrive.kube import resources
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
RETRY = "persistent://shop/prod/orders-fulfilment-RETRY"
DEAD_LETTER = "persistent://shop/prod/orders-fulfilment-DLQ"


def changed(here: ReconcileHarness, body: Body) -> None:
    """Have the spec of the policy changed."""
    stored = here.kubernetes.objects[resources.POLICIES]
    (key, before), *_ = stored.items()
    metadata = {**before["metadata"], "generation": 8, "resourceVersion": "5000"}
    stored[key] = {**before, "metadata": metadata, "spec": body["spec"]}
    here.ctx.policies.put(stored[key])


def rights(here: ReconcileHarness, topic: str) -> dict[str, set[str]]:
    found = here.broker.namespaces["shop/prod"].grants.get(topic, {})
    return {role: set(actions) for role, actions in found.items() if actions}


async def test_roles_that_are_taken_out_of_a_policy_that_discards_lose_their_rights(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    before = policy(consumerRoles=["shop-a", "shop-b"], deadLetter={"readerRoles": ["shop-c"]})
    async with reconcile_harness(connection, before, FakeKubernetes()) as here:
        await here.reconcile()
        grants = here.broker.namespaces["shop/prod"].grants
        grants[DEAD_LETTER]["shop-b"].append("functions")  # by another
        grants[DEAD_LETTER]["auditor"] = ["consume"]
        changed(here, policy(consumerRoles=["shop-a"], deadLetter={"mode": "Discard"}))
        await here.reconcile()
        assert rights(here, DEAD_LETTER) == {
            "shop-a": {"produce"},  # its consumers may still run with the policy before
            "shop-b": {"functions"},
            "auditor": {"consume"},
            "replayer": {"consume"},
        }
        assert rights(here, RETRY) == {"shop-a": {"produce", "consume"}}
        writes = len(here.broker.writes)
        await here.reconcile()
        assert len(here.broker.writes) == writes


async def test_what_was_revoked_on_an_unused_topic_is_not_granted_again(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with reconcile_harness(connection, policy(), FakeKubernetes()) as here:
        await here.reconcile()
        here.broker.namespaces["shop/prod"].grants[DEAD_LETTER] = {"auditor": ["consume"]}
        changed(here, policy(deadLetter={"mode": "Discard"}))
        await here.reconcile()
        assert rights(here, DEAD_LETTER) == {"auditor": {"consume"}}
