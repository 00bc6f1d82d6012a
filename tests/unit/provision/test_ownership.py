"""Ownership of topics: records, take-over, hand-over, kept names, and orphaned policies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from redrive.api import Body
from redrive.api.conditions import find, reason
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import NotFoundError
from redrive.kube.resources import TAKE_OVER_FROM, Key
from redrive.policy.naming import TopicName
from redrive.provision import connection
from redrive.provision.claims import Conflicts
from redrive.provision.finalize import LATE_WRITES
from redrive.provision.health import Health
from redrive.provision.outcome import FINALIZER
from redrive.provision.ownership import (
    Granted,
    Owner,
    OwnershipRecord,
    named_in,
    rights,
)
from redrive.provision.reconciler import REQUEST, OrphanedPolicies, PolicyReconciler
from redrive.reasons import Reason
from tests.support.fake_admin import Do, Topic, answering
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.operator_in_process import KEY, NOW, SOURCE, ReconcileHarness, reconcile_harness
from tests.unit.provision.test_faults import Shop, deleted, shop

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
roles = st.sampled_from(["a", "b", 'c "/{}'])
actions = st.frozensets(st.sampled_from(["produce", "consume", "functions"]), min_size=1)
granted = st.dictionaries(roles, actions)
records = st.builds(
    OwnershipRecord,
    owner=st.text(max_size=5),
    uid=st.text(max_size=5),
    source=st.text(max_size=5),
    created=st.booleans(),
    granted=granted,
    subscription=st.text(max_size=5),
    replaced=st.dictionaries(
        st.sampled_from(["messageTTL", "backlogQuotaMap"]), st.none() | st.integers() | st.just({})
    ),
)


@given(records)
def test_record_is_read_as_it_was_written(record: OwnershipRecord) -> None:
    assert OwnershipRecord.of(record.to_properties()) == record


@given(records, records)
def test_record_changes_lead_to_the_other_record(
    before: OwnershipRecord, after: OwnershipRecord
) -> None:
    properties = before.to_properties() | {"x": "y"}
    changes = after.changes(properties)
    assert OwnershipRecord.of(properties | changes) == after
    assert "x" not in changes
    assert after.changes(properties | changes) == {}


@pytest.mark.parametrize("text", ["no json", "[]", "3", '{"a": 3}', '{"a": null}', "null"])
def test_invalid_grants_record_is_ignored(text: str) -> None:
    assert OwnershipRecord.of({"redrive.io/granted": text}) == OwnershipRecord()


def test_owner_is_parsed_as_it_was_written() -> None:
    owner = Owner("a/b", Key("shop", "orders"))
    assert Owner.parse(str(owner)) == owner
    for text in ("", "shop/orders", "/shop/orders", "here//orders", "by hand"):
        assert Owner.parse(text) is None


OURS = Owner("here", Key("shop", "orders"), "uid-1", "orders/fulfilment")


def owned_by(owner: Owner) -> OwnershipRecord:
    return OwnershipRecord.of(OwnershipRecord().owned_by(owner).to_properties())


@pytest.mark.parametrize(
    ("owner", "ours"),
    [
        (OURS, True),
        (replace(OURS, uid="uid-0"), True),  # made again, for the same messages
        (replace(OURS, uid="", source=""), True),
        (replace(OURS, uid="uid-0", source="payroll/fulfilment"), False),
        (replace(OURS, uid="uid-0", source=""), False),
        (replace(OURS, cluster="there"), False),
        (replace(OURS, key=Key("shop", "other")), False),
        (replace(OURS, key=Key("other", "orders")), False),
    ],
)
def test_topic_belongs_to_its_policy_or_its_recreation(owner: Owner, *, ours: bool) -> None:
    assert owned_by(owner).is_of(OURS) is ours
    assert owned_by(owner).may_pass_to(OURS, ()) is ours


@given(
    st.sampled_from(["here", "there"]),
    st.sampled_from(["shop", "other"]),
    st.sampled_from(["orders", "named", "unnamed"]),
    st.sampled_from(["uid-1", "uid-0"]),
    st.sampled_from(["orders/fulfilment", "payroll/fulfilment"]),
)
def test_topic_passes_only_to_named_owner_in_namespace(
    cluster: str, namespace: str, name: str, uid: str, source: str
) -> None:
    record = owned_by(Owner(cluster, Key(namespace, name), uid, source))
    passes = record.may_pass_to(OURS, {"named", "orders"})
    assert passes is ((cluster, namespace) == ("here", "shop") and name != "unnamed")


def test_take_over_annotation_lists_former_owners() -> None:
    body: dict[str, dict[str, object]] = {"metadata": {}}
    assert named_in(body) == frozenset()
    body["metadata"]["annotations"] = {TAKE_OVER_FROM: " old, older,,"}
    assert named_in(body) == {"old", "older"}


@given(granted, granted, granted)
def test_rights_keep_grants_of_others(needed: Granted, have: Granted, recorded: Granted) -> None:
    change = rights(TOPIC, needed, have, recorded)
    changed = {right.role: right.on(have.get(right.role, frozenset())) for right in change.changes}
    after = {**have, **changed}
    for role in {*needed, *have, *recorded}:
        may, had = after.get(role, frozenset()), have.get(role, frozenset())
        need, ours = needed.get(role, frozenset()), recorded.get(role, frozenset())
        assert may == (had - ours) | need | (had & ours & need)
        assert change.after.get(role, frozenset()) == (ours & need) | (need - had)
        assert change.before.get(role, frozenset()) >= change.after.get(role, frozenset())


@given(granted, granted, granted)
def test_only_changed_rights_are_set(needed: Granted, have: Granted, recorded: Granted) -> None:
    for change in rights(TOPIC, needed, have, recorded).changes:
        may = have.get(change.role, frozenset())
        assert change.on(may) != may


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
        ctx = self.made.ctx()
        ctx.settings.cluster_id = self.cluster
        health: Any = SimpleNamespace(warnings=lambda _: ())
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        lost = OrphanedPolicies(ctx.policies, ctx.clock)
        await PolicyReconciler(ctx, conflicts, health, lost).reconcile(Key.of(body))
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


async def test_policy_refused_at_first_has_no_finalizer(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    made = shop(connection, policy(deletionPolicy="Delete"))
    operator = Operator(made)
    made.topics[TOPICS[1]] = Topic(0, {"team": "a"})
    assert await operator.reconcile() == "TopicExists"
    assert operator.finalizers == []
    assert made.broker.writes == []
    assert await operator.reconcile(adoption="IfPresent") == "Provisioned"
    assert operator.finalizers == [FINALIZER]


async def test_provisioned_policy_refused_later_gets_finalizer(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    made = shop(connection, policy())
    operator = Operator(made)
    assert await operator.reconcile() == "Provisioned"
    made.topics[TOPICS[1]].properties[OWNER] = "this-cluster/shop/other"
    assert await operator.reconcile(deletionPolicy="Delete") == "OwnerConflict"
    assert operator.finalizers == [FINALIZER]


@pytest.mark.parametrize("partitions", [0, 2])
async def test_chained_policy_needs_explicit_permission(
    connection: dict[str, Any], policy: MakeBody, partitions: int
) -> None:
    made = shop(connection, policy())
    made.topics["orders"] = Topic(partitions, {OWNER: "this-cluster/shop/first"})
    operator = Operator(made)
    assert await operator.reconcile() == "ChainedPolicy"
    assert made.broker.writes == []
    assert await operator.reconcile(chaining="Allowed") == "Provisioned"
    # A provisioned policy is not stopped by a later refusal.
    assert await operator.reconcile(chaining="Forbidden") == "Provisioned"


async def test_topics_are_handed_over_only_by_their_owner(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    made = shop(connection, policy())
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
    assert await blue.reconcile() == Reason.HANDED_OVER
    assert blue.owners == {"green/shop/orders"}
    for name in TOPICS:
        kept = {"redrive.io/created", "redrive.io/granted", "redrive.io/source"}
        after = made.topics[name].properties
        assert {key: after[key] for key in kept} == {key: before[name][key] for key in kept}
    writes = len(made.broker.writes)
    assert await blue.reconcile() == Reason.HANDED_OVER
    assert len(made.broker.writes) == writes

    assert await green.reconcile() == "Provisioned"
    assert made.topics[TOPICS[0]].properties["redrive.io/owner-uid"] == "uid-orders"


async def test_ledger_of_other_policy_is_not_taken_over(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    replay = connection.pop("replay")
    made = shop(connection, policy())
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


async def test_policy_moved_to_other_broker_is_refused(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    made = shop(connection, policy(deletionPolicy="Delete"))
    operator = Operator(made)
    assert await operator.reconcile() == "Provisioned"
    # Another connection that leads to the same broker.
    assert await operator.reconcile(connectionRef={"name": "alias"}) == "Provisioned"
    for name in TOPICS:
        del made.topics[name]
    assert await operator.reconcile(connectionRef={"name": "other"}) == "BrokerChanged"
    ready = find(made.stored, "Ready")
    assert ready is not None
    assert (
        f"{TOPICS[0]} and persistent://shop/prod/{TOPICS[1]} are at the broker of" in ready.message
    )
    assert "BrokerConnection shop/alias, with" in ready.message
    assert made.topics.keys() == {"orders", "others"}

    made.kubernetes.add(resources.POLICIES, deleted(made.stored))
    await made.finalize()
    ((_, _, message),) = [e for e in made.kubernetes.announced() if e[1] == "Retained"]
    assert message.endswith("BrokerConnection shop/alias")


async def test_revoke_grants_takes_back_only_own_grants(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    made = shop(connection, policy(deletionPolicy="RevokeGrants"))
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


@pytest.fixture
async def here(connection: Body, policy: MakeBody) -> ReconcileHarness:
    """A policy whose topics are deleted with it."""
    body = policy(deletionPolicy="Delete")
    return reconcile_harness(connection, body, FakeKubernetes())


class Racing(FakeKubernetes):
    """An API server with a DELETE under way that began before the finalizer is added."""

    async def patch(self, resource: resources.Resource, key: Key, patch: Body) -> Body:
        """Answer that the finalizer is there, then delete the object anyway."""
        after = await super().patch(resource, key, patch)
        if resource is resources.POLICIES:
            del self.objects[resource][key]
        return after


def at_first_creation(act: Callable[[], None]) -> Callable[..., Any]:
    """Do something when the broker is asked for the first topic."""
    done: list[web.Request] = []

    async def fault(request: web.Request, do: Do) -> web.StreamResponse:
        if request.method == "PUT" and not done:
            done.append(request)
            act()
        return await do()

    return fault


def is_lost(here: ReconcileHarness) -> None:
    """Have a DELETE end that began before the finalizer was added."""
    del here.kubernetes.objects[resources.POLICIES][KEY]
    here.watch_shows_deletion()


async def test_policy_deleted_while_finalizer_is_added_is_cleaned_up(
    here: ReconcileHarness,
) -> None:
    here.broker.fault = at_first_creation(lambda: is_lost(here))
    await here.reconcile()
    assert here.topics > {SOURCE}  # it was too late to stop
    assert await here.reconcile() is Requeue.BACKOFF  # a call that was sent may take effect late
    here.now += LATE_WRITES
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.topics == {SOURCE}
    assert [reason for _, reason, _ in here.kubernetes.announced()] == ["Deleted"]
    assert here.lost.get(KEY) is None


async def test_policy_seen_deleted_before_finalizer_creates_nothing(
    connection: Body, policy: MakeBody
) -> None:
    class Evidence(Racing):
        async def patch(self, resource: resources.Resource, key: Key, patch: Body) -> Body:
            after = await super().patch(resource, key, patch)
            seeing.watch_shows_deletion()
            return after

    seeing = reconcile_harness(connection, policy(deletionPolicy="Delete"), Evidence())
    assert await seeing.reconcile() is Requeue.ON_CHANGE
    assert seeing.topics == {SOURCE}
    assert seeing.broker.writes == []


async def test_retaining_or_long_gone_policy_leaves_its_topics(
    connection: Body, policy: MakeBody
) -> None:
    for choice, age in (("Retain", timedelta(0)), ("Delete", REQUEST + timedelta(seconds=1))):
        here = reconcile_harness(connection, policy(deletionPolicy=choice), FakeKubernetes())
        await here.reconcile()
        made = here.topics
        here.now += age
        here.watch_shows_deletion()
        assert await here.reconcile() is Requeue.ON_CHANGE
        assert here.topics == made > {SOURCE}


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "not shown yet"])
async def test_successor_keeps_topics_of_orphaned_policy(
    here: ReconcileHarness, policy: MakeBody, *, shown: bool
) -> None:
    here.broker.fault = at_first_creation(lambda: is_lost(here))
    await here.reconcile()
    made = here.topics
    again = policy(deletionPolicy="Retain")
    again["metadata"]["uid"] = "another"
    here.kubernetes.add(resources.POLICIES, again)
    if shown:
        here.ctx.policies.put(again)
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.lost.get(KEY) is None
    assert here.topics == made > {SOURCE}


async def test_topic_created_after_cleanup_is_deleted(connection: Body, policy: MakeBody) -> None:
    """The leader before sent the call, and was killed; this one finds nothing to delete."""
    body = policy(deletionPolicy="Delete")
    former = reconcile_harness(connection, body, FakeKubernetes())
    former.broker.fault = at_first_creation(lambda: None)
    await former.reconcile()
    late = former.broker.namespaces["shop/prod"].topics
    body["metadata"] |= {"finalizers": [FINALIZER], "deletionTimestamp": NOW.isoformat()}
    here = reconcile_harness(connection, body, FakeKubernetes())
    assert await here.reconcile() is Requeue.BACKOFF
    here.broker.namespaces["shop/prod"].topics |= late
    here.now += LATE_WRITES
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.topics == {SOURCE}
    assert here.kubernetes.objects[resources.POLICIES] == {}


@pytest.mark.parametrize(("condition", "status"), [("Ready", "True"), ("Stalled", "True")])
async def test_policy_with_nothing_under_way_is_deleted_at_once(
    connection: Body, policy: MakeBody, condition: str, status: str
) -> None:
    body = policy(deletionPolicy="Delete")
    body["metadata"] |= {"finalizers": [FINALIZER], "deletionTimestamp": NOW.isoformat()}
    fields = {"reason": "Any", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    body["status"] = {"conditions": [{"type": condition, "status": status, **fields}]}
    here = reconcile_harness(connection, body, FakeKubernetes())
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.kubernetes.objects[resources.POLICIES] == {}


async def test_failed_cleanup_of_orphan_is_retried(
    here: ReconcileHarness,
) -> None:
    here.broker.fault = at_first_creation(lambda: is_lost(here))
    await here.reconcile()
    here.broker.fault = answering(503)
    here.now += LATE_WRITES
    assert await here.reconcile() is Requeue.BACKOFF
    here.broker.fault = None
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.topics == {SOURCE}


async def test_policy_still_stored_keeps_its_topics(
    here: ReconcileHarness,
) -> None:
    await here.reconcile()
    made = here.topics
    here.watch_shows_deletion()
    assert here.lost.get(KEY) is not None
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.lost.get(KEY) is None
    assert here.ctx.policies.get(KEY) is not None
    assert here.topics == made > {SOURCE}


async def test_unserved_api_makes_no_policy_an_orphan(connection: Body, policy: MakeBody) -> None:
    def unserved(*_: object) -> None:
        raise NotFoundError("the server could not find the requested resource", remedy="wait")

    here = reconcile_harness(connection, policy(deletionPolicy="Delete"), FakeKubernetes())
    await here.reconcile()
    made = here.topics
    here.kubernetes.before = unserved
    here.watch_shows_deletion()
    with pytest.raises(NotFoundError):
        await here.reconcile()
    here.kubernetes.before = lambda *_: None
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.topics == made > {SOURCE}


async def test_policy_older_than_the_operator_is_no_orphan(
    connection: Body, policy: MakeBody
) -> None:
    body = policy(deletionPolicy="Delete")
    body["metadata"]["finalizers"] = [FINALIZER]
    body["metadata"]["creationTimestamp"] = "2025-12-31T23:58:00Z"
    here = reconcile_harness(connection, body, FakeKubernetes())
    here.watch_shows_deletion()
    assert here.lost.get(KEY) is None


def ctx(policies: Cache, connections: Cache) -> Any:  # noqa: ANN401 - the used part of a Context
    return SimpleNamespace(
        kubernetes=FakeKubernetes(),  # none of the objects is there any more
        policies=policies,
        rocketmq_policies=Cache(),
        connections=connections,
        namespaces=None,
        replays=Cache(),
        clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )


async def test_object_gone_without_event_is_dropped(
    policy: MakeBody,
) -> None:
    body = policy()
    policies, connections = Cache([body]), Cache([body | {"kind": "BrokerConnection"}])
    emptied, key = ctx(policies, connections), Key.of(body)
    conflicts, health = (
        Conflicts(policies, connections, lambda _: None),
        Health(emptied, lambda _: None),
    )
    lost = OrphanedPolicies(policies, emptied.clock)
    reconciler = PolicyReconciler(emptied, conflicts, health, lost)
    assert await reconciler.reconcile(key) is Requeue.ON_CHANGE
    await health.stop()
    assert await connection.reconcile(key, emptied) is Requeue.ON_CHANGE
    assert policies.get(key) is None
    assert connections.get(key) is None
