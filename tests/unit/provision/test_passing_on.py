"""What a policy may have: topics of others, of another cluster, at another broker, of redrive."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.api.conditions import find, reason
from redrive.kube import resources
from redrive.kube.resources import Key
from redrive.provision import reconciler
from redrive.provision.claims import Conflicts
from redrive.provision.finalize import HANDED_OVER
from redrive.provision.orphans import LostPolicies
from redrive.provision.outcome import FINALIZER
from tests.support.fake_admin import Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.provision.test_faults import Shop, deleted, shop

MakeBody = Callable[..., dict[str, Any]]
OWNER = "redrive.io/owner"
LEDGER = "orders-fulfilment-DLQ-LEDGER"
TOPICS = ("orders-fulfilment-RETRY", "orders-fulfilment-DLQ", LEDGER)


@dataclass
class Operator:
    """The operator of one cluster, which has one policy."""

    made: Shop
    cluster: str = "this-cluster"

    async def reconcile(self, **changes: object) -> str:
        """Reconcile the policy, as its spec is with *changes*; return the reason of Ready."""
        body = cast("dict[str, Any]", self.made.stored)
        body["spec"] |= changes
        body["metadata"]["generation"] += bool(changes)
        ctx = self.made.ctx(None)
        ctx.settings.cluster_id = self.cluster
        health: Any = SimpleNamespace(warnings=lambda _: ())
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        lost = LostPolicies(ctx.policies, ctx.clock)
        await reconciler.reconcile(Key.of(body), ctx, conflicts, health, lost)
        return reason(self.made.stored)

    def annotate(self, name: str, value: str) -> None:
        """Give the policy an annotation."""
        body = cast("dict[str, Any]", self.made.stored)
        body["metadata"].setdefault("annotations", {})[f"redrive.io/{name}"] = value

    @property
    def finalizers(self) -> list[str]:
        """Those of the policy."""
        return list(self.made.stored["metadata"].get("finalizers", []))

    @property
    def owners(self) -> set[str]:
        """Whose the topics of the policy are."""
        return {self.made.topics[name].properties[OWNER] for name in TOPICS}


async def test_a_policy_that_is_refused_at_first_has_no_finalizer(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy(deletionPolicy="Delete")) as made:
        operator = Operator(made)
        made.topics[TOPICS[1]] = Topic(0, {"team": "a"})
        assert await operator.reconcile() == "TopicExists"
        assert operator.finalizers == []
        assert made.broker.writes == []
        assert await operator.reconcile(adopt=True) == "Provisioned"
        assert operator.finalizers == [FINALIZER]


async def test_a_policy_that_was_provisioned_gets_its_finalizer_although_it_is_refused_now(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy()) as made:
        operator = Operator(made)
        assert await operator.reconcile() == "Provisioned"
        made.topics[TOPICS[1]].properties[OWNER] = "this-cluster/shop/other"
        assert await operator.reconcile(deletionPolicy="Delete") == "OwnerConflict"
        assert operator.finalizers == [FINALIZER]


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_policy_for_a_topic_of_redrive_itself_is_refused_unless_it_says_so(
    connection: dict[str, Any], policy: MakeBody, partitions: int
) -> None:
    async with shop(connection, policy()) as made:
        made.topics["orders"] = Topic(partitions, {OWNER: "this-cluster/shop/first"})
        operator = Operator(made)
        assert await operator.reconcile() == "ChainedPolicy"
        assert made.broker.writes == []
        assert await operator.reconcile(chained=True) == "Provisioned"
        # What works is not stopped by a later word.
        assert await operator.reconcile(chained=False) == "Provisioned"


async def test_topics_are_handed_over_to_another_cluster_by_their_owner_alone(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy()) as made:
        blue = Operator(made, "blue")
        assert await blue.reconcile() == "Provisioned"
        theirs = replace(made, kubernetes=FakeKubernetes())
        theirs.kubernetes.add(resources.POLICIES, policy())
        green = Operator(theirs, "green")
        for word in ("take-over-from", "hand-over-to"):
            green.annotate(word, "orders" if word == "take-over-from" else "green")
            assert await green.reconcile() == "OwnerConflict"
        assert blue.owners == {"blue/shop/orders"}

        blue.annotate("hand-over-to", "green")
        before = {name: copy.deepcopy(made.topics[name].properties) for name in TOPICS}
        assert await blue.reconcile() == HANDED_OVER
        assert blue.owners == {"green/shop/orders"}
        for name in TOPICS:
            kept = {"redrive.io/created", "redrive.io/granted", "redrive.io/source"}
            after = made.topics[name].properties
            assert {key: after[key] for key in kept} == {key: before[name][key] for key in kept}
        writes = len(made.broker.writes)
        assert await blue.reconcile() == HANDED_OVER
        assert len(made.broker.writes) == writes

        assert await green.reconcile() == "Provisioned"
        assert made.topics[TOPICS[0]].properties["redrive.io/owner-uid"] == "uid-orders"


async def test_a_ledger_that_replays_need_later_is_not_taken_from_another_policy(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    replay = connection.pop("replay")
    async with shop(connection, policy()) as made:
        operator = Operator(made)
        assert await operator.reconcile() == "Provisioned"
        assert "ledgerTopic" not in made.stored["status"]
        # Of a policy in another cluster, whose claims are not known here.
        theirs = made.topics[LEDGER] = Topic(0, {OWNER: "elsewhere/shop/other"})
        grants = made.broker.namespaces["shop/prod"].grants
        grants[f"persistent://shop/prod/{LEDGER}"] = {"replayer": ["produce", "consume"]}
        for name in TOPICS[:2]:
            grants[f"persistent://shop/prod/{name}"]["replayer"] = ["produce", "consume"]
        connection["replay"] = replay
        assert await operator.reconcile() == "OwnerConflict"
        assert theirs == Topic(0, {OWNER: "elsewhere/shop/other"})
        del made.topics[LEDGER]
        assert await operator.reconcile() == "Provisioned"
        assert made.stored["status"]["ledgerTopic"] == f"persistent://shop/prod/{LEDGER}"


async def test_a_policy_that_is_led_to_another_broker_is_refused_and_says_what_is_left(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy(deletionPolicy="Delete")) as made:
        operator = Operator(made)
        assert await operator.reconcile() == "Provisioned"
        # Another connection that leads to the same broker.
        assert await operator.reconcile(connectionRef={"name": "alias"}) == "Provisioned"
        for name in TOPICS:
            del made.topics[name]
        assert await operator.reconcile(connectionRef={"name": "other"}) == "BrokerChanged"
        said = find(made.stored, "Ready")
        assert said is not None
        assert f"{TOPICS[0]} and persistent://shop/prod/{TOPICS[1]} are where" in said.message
        assert "BrokerConnection shop/alias leads" in said.message
        assert made.topics.keys() == {"orders", "others"}

        made.kubernetes.add(resources.POLICIES, deleted(made.stored))
        await made.finalize()
        ((_, _, told),) = [e for e in made.kubernetes.announced() if e[1] == "Retained"]
        assert told.endswith("where BrokerConnection shop/alias leads")


async def test_revoke_grants_takes_back_what_redrive_granted_and_nothing_else(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy(deletionPolicy="RevokeGrants")) as made:
        operator = Operator(made)
        grants = made.broker.namespaces["shop/prod"].grants
        assert await operator.reconcile() == "Provisioned"
        grants[f"persistent://shop/prod/{TOPICS[0]}"]["auditor"] = ["consume"]
        before = copy.deepcopy(made.topics)
        made.kubernetes.add(resources.POLICIES, deleted(made.stored))
        await made.finalize()
        assert grants == {
            "persistent://shop/prod/others": {"fulfilment": ["consume"]},
            f"persistent://shop/prod/{TOPICS[0]}": {"auditor": ["consume"]},
        }
        for name in TOPICS:
            assert json.loads(before[name].properties["redrive.io/granted"])
            before[name].properties["redrive.io/granted"] = ""
        assert made.topics == before
        assert made.kubernetes.objects[resources.POLICIES] == {}
