"""Orphaned policies: deleted while they are provisioned, or without an event."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from redrive.api import Body
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import NotFoundError
from redrive.kube.resources import Key
from redrive.provision import connection
from redrive.provision.claims import Conflicts
from redrive.provision.finalize import LATE_WRITES
from redrive.provision.health import Health
from redrive.provision.outcome import FINALIZER
from redrive.provision.reconciler import REQUEST, OrphanedPolicies, PolicyReconciler
from tests.support.fake_admin import Do, answering
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import KEY, NOW, SOURCE, ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]


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
