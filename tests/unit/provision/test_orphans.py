"""Orphaned policies: deleted while they are provisioned, or without an event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
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
from redrive.provision import connection, reconciler
from redrive.provision.claims import Conflicts
from redrive.provision.finalize import LATE_WRITES
from redrive.provision.health import Health
from redrive.provision.orphans import REQUEST, LostPolicies
from redrive.provision.outcome import FINALIZER
from tests.support.fake_admin import Do, answering
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import KEY, NOW, SOURCE, ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]


@pytest.fixture
async def here(connection: Body, policy: MakeBody) -> AsyncIterator[ReconcileHarness]:
    """A policy whose topics are deleted with it."""
    body = policy(deletionPolicy="Delete")
    async with reconcile_harness(connection, body, FakeKubernetes()) as made:
        yield made


class Racing(FakeKubernetes):
    """An API server with a DELETE under way that began before the finalizer is added."""

    async def patch(self, resource: resources.Resource, key: Key, patch: Body) -> Body:
        """Answer that the finalizer is there, then delete the object all the same."""
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


async def test_a_policy_that_is_deleted_while_its_finalizer_is_added_is_cleaned_up_after(
    here: ReconcileHarness,
) -> None:
    here.broker.fault = at_first_creation(lambda: is_lost(here))
    await here.reconcile()
    assert here.topics > {SOURCE}  # it was too late to stop
    assert await here.reconcile() is Requeue.BACKOFF  # what was sent may be done late
    here.now += LATE_WRITES
    assert await here.reconcile() is Requeue.ON_CHANGE
    assert here.topics == {SOURCE}
    assert [reason for _, reason, _ in here.kubernetes.announced()] == ["Deleted"]
    assert here.lost.get(KEY) is None


async def test_a_policy_whose_deletion_is_seen_before_the_finalizer_is_answered_creates_nothing(
    connection: Body, policy: MakeBody
) -> None:
    class Seen(Racing):
        async def patch(self, resource: resources.Resource, key: Key, patch: Body) -> Body:
            after = await super().patch(resource, key, patch)
            seeing.watch_shows_deletion()
            return after

    async with reconcile_harness(connection, policy(deletionPolicy="Delete"), Seen()) as seeing:
        assert await seeing.reconcile() is Requeue.ON_CHANGE
        assert seeing.topics == {SOURCE}
        assert seeing.broker.writes == []


async def test_a_policy_that_retains_and_one_that_went_long_after_leave_their_topics(
    connection: Body, policy: MakeBody
) -> None:
    for choice, age in (("Retain", timedelta(0)), ("Delete", REQUEST + timedelta(seconds=1))):
        async with reconcile_harness(
            connection, policy(deletionPolicy=choice), FakeKubernetes()
        ) as here:
            await here.reconcile()
            made = here.topics
            here.now += age
            here.watch_shows_deletion()
            assert await here.reconcile() is Requeue.ON_CHANGE
            assert here.topics == made > {SOURCE}


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "not shown yet"])
async def test_a_new_policy_of_the_name_keeps_the_topics_of_one_that_was_lost(
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


async def test_a_topic_that_the_broker_creates_after_the_cleanup_is_deleted_too(
    connection: Body, policy: MakeBody
) -> None:
    """The leader before sent the call, and was killed; this one finds nothing to delete."""
    body = policy(deletionPolicy="Delete")
    async with reconcile_harness(connection, body, FakeKubernetes()) as former:
        former.broker.fault = at_first_creation(lambda: None)
        await former.reconcile()
        late = former.broker.namespaces["shop/prod"].topics
    body["metadata"] |= {"finalizers": [FINALIZER], "deletionTimestamp": NOW.isoformat()}
    async with reconcile_harness(connection, body, FakeKubernetes()) as here:
        assert await here.reconcile() is Requeue.BACKOFF
        here.broker.namespaces["shop/prod"].topics |= late
        here.now += LATE_WRITES
        assert await here.reconcile() is Requeue.ON_CHANGE
        assert here.topics == {SOURCE}
        assert here.kubernetes.objects[resources.POLICIES] == {}


@pytest.mark.parametrize(("condition", "status"), [("Ready", "True"), ("Stalled", "True")])
async def test_a_policy_for_which_nothing_is_under_way_goes_at_once(
    connection: Body, policy: MakeBody, condition: str, status: str
) -> None:
    body = policy(deletionPolicy="Delete")
    body["metadata"] |= {"finalizers": [FINALIZER], "deletionTimestamp": NOW.isoformat()}
    said = {"reason": "Any", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    body["status"] = {"conditions": [{"type": condition, "status": status, **said}]}
    async with reconcile_harness(connection, body, FakeKubernetes()) as here:
        assert await here.reconcile() is Requeue.ON_CHANGE
        assert here.kubernetes.objects[resources.POLICIES] == {}


async def test_a_broker_that_fails_in_such_a_cleanup_is_asked_again(
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


async def test_a_policy_that_is_there_after_all_keeps_its_topics(
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


async def test_while_the_api_server_does_not_serve_policies_none_counts_as_lost(
    connection: Body, policy: MakeBody
) -> None:
    def unserved(*_: object) -> None:
        raise NotFoundError("the server could not find the requested resource", remedy="wait")

    async with reconcile_harness(
        connection, policy(deletionPolicy="Delete"), FakeKubernetes()
    ) as here:
        await here.reconcile()
        made = here.topics
        here.kubernetes.before = unserved
        here.watch_shows_deletion()
        with pytest.raises(NotFoundError):
            await here.reconcile()
        here.kubernetes.before = lambda *_: None
        assert await here.reconcile() is Requeue.ON_CHANGE
        assert here.topics == made > {SOURCE}


async def test_a_policy_that_was_there_long_before_the_operator_is_never_lost(
    connection: Body, policy: MakeBody
) -> None:
    body = policy(deletionPolicy="Delete")
    body["metadata"]["finalizers"] = [FINALIZER]
    body["metadata"]["creationTimestamp"] = "2025-12-31T23:58:00Z"
    async with reconcile_harness(connection, body, FakeKubernetes()) as here:
        here.watch_shows_deletion()
        assert here.lost.get(KEY) is None


def ctx(policies: Cache, connections: Cache) -> Any:  # noqa: ANN401 - what of a Context is used
    return SimpleNamespace(
        kubernetes=FakeKubernetes(),  # none of the objects is there any more
        policies=policies,
        connections=connections,
        namespaces=None,
        replays=Cache(),
        clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )


async def test_an_object_that_went_unseen_is_forgotten_and_never_looked_at_again(
    policy: MakeBody,
) -> None:
    body = policy()
    policies, connections = Cache([body]), Cache([body | {"kind": "BrokerConnection"}])
    emptied, key = ctx(policies, connections), Key.of(body)
    conflicts, health = (
        Conflicts(policies, connections, lambda _: None),
        Health(emptied, lambda _: None),
    )
    lost = LostPolicies(policies, emptied.clock)
    assert await reconciler.reconcile(key, emptied, conflicts, health, lost) is Requeue.ON_CHANGE
    await health.stop()
    assert await connection.reconcile(key, emptied) is Requeue.ON_CHANGE
    assert policies.get(key) is None
    assert connections.get(key) is None
