"""Every call to the broker fails once, in every way: the next look makes up for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.errors import AdminError
from redrive.admin.http import Http
from redrive.api.connection import PulsarConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.connections import Connection
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher
from redrive.provision.conflicts import Conflicts
from redrive.provision.converge import Converged, converge
from redrive.provision.finalize import LATE_WRITES, finalize
from redrive.provision.finalizer import FINALIZER
from redrive.provision.outcome import publish
from redrive.provision.resolve import resolve
from tests.support.fake_admin import (
    SUPERUSER,
    FakeBroker,
    Fault,
    Namespace,
    Topic,
    answering,
    at_call,
    done_but_not_told,
    hanging,
)
from tests.support.fake_kubernetes import FakeKubernetes

MakeBody = Callable[..., dict[str, Any]]

HASTY = aiohttp.ClientTimeout(total=0.5)
DELETED = datetime(2026, 1, 1, tzinfo=UTC)
FAULTS: dict[str, Fault] = {
    **{str(status): answering(status) for status in (409, 412, 429, 500, 503)},
    "no answer": hanging,
    "done, but not told": done_but_not_told,
}


def deleted(policy: Body) -> Body:
    """The policy while it is being deleted."""
    going = {"finalizers": [FINALIZER], "deletionTimestamp": DELETED.isoformat()}
    return {**policy, "metadata": {**policy["metadata"], **going}}


@dataclass(frozen=True)
class Shop:
    """A broker with a source topic and what others own, and a policy to provision."""

    broker: FakeBroker
    http: Http
    kubernetes: FakeKubernetes
    connection: Body
    policy: Body

    async def look(self, http: Http | None = None) -> Converged:
        """Provision the policy as a restarted operator would: nothing is remembered."""
        ctx = self.ctx(http)
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        asked = resolve(self.policy, ctx)
        return await converge(asked, self.policy, ctx, conflicts)

    async def finalize(self, http: Http | None = None) -> Requeue:
        """Do what the deletion of the policy asks for, as a restarted operator would."""
        ctx = self.ctx(http)
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        out = Publisher(self.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        body = self.kubernetes.objects[resources.POLICIES][Key.of(self.policy)]
        outcome = await finalize(body, ctx, conflicts)
        await publish(body, outcome, out)
        return outcome.requeue

    @property
    def config_maps(self) -> dict[Key, dict[str, Any]]:
        """What the policy has in Kubernetes."""
        return self.kubernetes.objects[resources.CONFIG_MAPS]

    def ctx(self, http: Http | None) -> Any:  # noqa: ANN401
        """What a reconcile needs of the world."""

        async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
            admin = Admin(
                http or self.http, self.broker.url, Access.bearer(FakeBroker.token(SUPERUSER))
            )
            spec = PulsarConnectionSpec.model_validate(self.connection["spec"])
            return Connection(Key(namespace, ref.name), spec, admin)

        return SimpleNamespace(
            kubernetes=self.kubernetes,
            policies=Cache([self.policy]),
            connections=Cache([self.connection]),
            namespaces=None,
            brokers=SimpleNamespace(resolve=resolve),
            settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
            clock=lambda: DELETED + LATE_WRITES,
        )


@asynccontextmanager
async def shop(connection: dict[str, Any], policy: Body) -> AsyncIterator[Shop]:
    body = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        grants = {"persistent://shop/prod/others": {"fulfilment": ["consume"]}}
        topics = {"orders": Topic(2, {}), "others": Topic(0, {"a": "b"}, {"": ["s"]})}
        broker.namespaces = {"shop/prod": Namespace(topics, grants)}
        yield Shop(broker, Http(session), FakeKubernetes(), body, policy)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_call_that_fails_is_made_up_for_by_the_next_look(
    connection: dict[str, Any], policy: MakeBody, fault: str
) -> None:
    async with shop(connection, policy()) as undisturbed:
        made = await undisturbed.look()
        assert made.actions
        calls = len(undisturbed.broker.calls)
        assert (await undisturbed.look()).actions == ()
    for number in range(1, calls + 1):
        async with shop(connection, policy()) as disturbed:
            disturbed.broker.fault = at_call(number, FAULTS[fault])
            try:
                # Only where nothing else ends the call: a busy machine is slow with others too.
                limit = HASTY if FAULTS[fault] is hanging else aiohttp.ClientTimeout()
                async with aiohttp.ClientSession(timeout=limit) as session:
                    await disturbed.look(Http(session))
            except AdminError:
                disturbed.broker.fault = None  # a busy machine may have been too slow before it
                await disturbed.look()
            broker = disturbed.broker
            assert broker.namespaces == undisturbed.broker.namespaces, broker.calls[number - 1]
            assert disturbed.config_maps == undisturbed.config_maps
            assert (await disturbed.look()).actions == ()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_call_that_fails_in_a_deletion_is_made_up_for_by_the_next_look(
    connection: dict[str, Any], policy: MakeBody, fault: str
) -> None:
    body = policy(deletionPolicy="Delete")
    async with standing(connection, body) as undisturbed:
        before = len(undisturbed.broker.calls)
        assert await undisturbed.finalize() is Requeue.ON_CHANGE
        calls = len(undisturbed.broker.calls) - before
        left = undisturbed.broker.namespaces["shop/prod"].topics
        assert left.keys() == {"orders", "others", "orders-fulfilment-DLQ"}
        assert left["orders-fulfilment-DLQ"].subscriptions == []
        assert calls > 10
    for number in range(1, calls + 1):
        async with standing(connection, body) as disturbed:
            broker, policies = disturbed.broker, disturbed.kubernetes.objects[resources.POLICIES]
            broker.fault = at_call(number, FAULTS[fault])
            limit = HASTY if FAULTS[fault] is hanging else aiohttp.ClientTimeout()
            async with aiohttp.ClientSession(timeout=limit) as session:
                again = await disturbed.finalize(Http(session))
            if again is Requeue.BACKOFF:
                broker.fault = None
                assert policies[Key.of(body)]["metadata"]["finalizers"] == [FINALIZER]
                again = await disturbed.finalize()
            assert again is Requeue.ON_CHANGE
            assert policies == {}  # the only finalizer is gone
            assert broker.namespaces == undisturbed.broker.namespaces, broker.calls[-number:]


@asynccontextmanager
async def standing(connection: dict[str, Any], policy: Body) -> AsyncIterator[Shop]:
    """A shop with a policy that is provisioned and being deleted.

    Its dead-letter topic was there before.
    """
    async with shop(connection, policy) as made:
        made.broker.namespaces["shop/prod"].topics["orders-fulfilment-DLQ"] = Topic(0, {})
        await made.look()
        made.kubernetes.add(resources.POLICIES, deleted(policy))
        yield made
