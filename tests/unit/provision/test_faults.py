"""Every call to the broker fails once, in every way: the next look makes up for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from redrive.admin.client import Admin
from redrive.admin.errors import AdminConflictError, AdminError
from redrive.admin.http import Access, Http
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import Requeue, TopicExistsError
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.connections import Connection
from redrive.kube.resources import Key
from redrive.kube.status import Publisher
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.finalize import LATE_WRITES, finalize
from redrive.provision.outcome import FINALIZER, publish
from redrive.provision.reconciler import Converged, converge
from tests.support.fake_admin import (
    SUPERUSER,
    Do,
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
QUOTAS = {
    "message_age": {
        "limit": -1,
        "limitSize": -1,
        "limitTime": 60,
        "policy": "consumer_backlog_eviction",
    }
}
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
        return await converge(resolve(self.stored, ctx), self.stored, ctx, conflicts)

    async def finalize(self, http: Http | None = None) -> Requeue:
        """Do what the deletion of the policy asks for, as a restarted operator would."""
        ctx = self.ctx(http)
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        out = Publisher(self.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        outcome = await finalize(self.stored, ctx, conflicts)
        await publish(self.stored, outcome, out)
        return outcome.requeue

    @property
    def stored(self) -> Body:
        """The policy as the API server has it."""
        return self.kubernetes.objects[resources.POLICIES][Key.of(self.policy)]

    @property
    def topics(self) -> dict[str, Topic]:
        """The topics at the broker."""
        return self.broker.namespaces["shop/prod"].topics

    @property
    def config_maps(self) -> dict[Key, Any]:
        """What consumers find in Kubernetes."""
        found = self.kubernetes.objects[resources.CONFIG_MAPS]
        return {key: config_map["data"] for key, config_map in found.items()}

    def ctx(self, http: Http | None) -> Any:  # noqa: ANN401
        """What a reconcile needs of the world."""

        async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
            admin = Admin(
                http or self.http, self.broker.url, Access.bearer(FakeBroker.token(SUPERUSER))
            )
            spec = BrokerConnectionSpec.model_validate(self.connection["spec"])
            return Connection(Key(namespace, ref.name), spec, admin)

        return SimpleNamespace(
            kubernetes=self.kubernetes,
            policies=Cache([self.stored]),
            config_maps=Cache(self.kubernetes.objects[resources.CONFIG_MAPS].values()),
            connections=Cache(
                {**self.connection, "metadata": {**self.connection["metadata"], "name": name}}
                for name in ("main", "alias", "other")
            ),
            namespaces=None,
            brokers=SimpleNamespace(resolve=resolve),
            settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
            clock=lambda: DELETED + LATE_WRITES,
            began=DELETED,
        )


@asynccontextmanager
async def shop(connection: dict[str, Any], policy: Body) -> AsyncIterator[Shop]:
    body = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        grants = {"persistent://shop/prod/others": {"fulfilment": ["consume"]}}
        topics = {"orders": Topic(2, {}), "others": Topic(0, {"a": "b"}, {"": ["s"]})}
        broker.namespaces = {"shop/prod": Namespace(topics, grants)}
        kubernetes = FakeKubernetes()
        kubernetes.add(resources.POLICIES, policy)
        yield Shop(broker, Http(session), kubernetes, body, policy)


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
            with suppress(AdminError):  # where a policy works without what is refused
                # Only where nothing else ends the call: a busy machine is slow with others too.
                limit = HASTY if FAULTS[fault] is hanging else aiohttp.ClientTimeout()
                async with aiohttp.ClientSession(timeout=limit) as session:
                    await disturbed.look(Http(session))
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
    body = policy(deletionPolicy="Delete", adopt=True)
    async with standing(connection, body) as undisturbed:
        before = len(undisturbed.broker.calls)
        assert await undisturbed.finalize() is Requeue.ON_CHANGE
        calls = len(undisturbed.broker.calls) - before
        left = undisturbed.broker.namespaces["shop/prod"].topics
        # A ledger stays with its dead-letter topic: it holds what was moved, and may not be again.
        kept = {"orders-fulfilment-DLQ", "orders-fulfilment-DLQ-LEDGER"}
        assert left.keys() == {"orders", "others"} | kept
        assert left["orders-fulfilment-DLQ"].subscriptions == []
        assert left["orders-fulfilment-DLQ"].policies == {"messageTTL": 3600}
        assert left["orders-fulfilment-DLQ"].quotas == QUOTAS
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
        made.topics["orders-fulfilment-DLQ"] = Topic(
            0, {}, policies={"messageTTL": 3600}, quotas=dict(QUOTAS)
        )
        await made.look()
        made.kubernetes.add(resources.POLICIES, deleted(made.stored))
        yield made


def created_in_part(made: Shop) -> Fault:
    """Store a topic without partitions, lose its properties, and be killed before the answer."""

    async def befall(request: web.Request, do: Do) -> web.StreamResponse:
        topic = request.match_info.get("topic", "")
        if request.method != "PUT" or not request.path.endswith(f"/{topic}"):
            return await do()
        made.broker.fault = None
        await do()
        made.topics[topic].properties.clear()
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    return befall


async def test_a_topic_that_was_created_and_whose_properties_were_lost_is_redrives_own(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(deletionPolicy="Delete")
    async with shop(connection, body) as undisturbed, shop(connection, body) as disturbed:
        await undisturbed.look()
        disturbed.broker.fault = created_in_part(disturbed)
        with pytest.raises(AdminError):
            await disturbed.look()
        assert disturbed.topics["orders-fulfilment-DLQ"].properties == {}
        await disturbed.look()
        assert disturbed.broker.namespaces == undisturbed.broker.namespaces


async def test_a_deletion_takes_a_topic_whose_properties_were_lost_when_it_was_created(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy(deletionPolicy="Delete")) as disturbed:
        disturbed.broker.fault = created_in_part(disturbed)
        with pytest.raises(AdminError):
            await disturbed.look()
        disturbed.kubernetes.add(resources.POLICIES, deleted(disturbed.stored))
        await disturbed.finalize()
        assert disturbed.topics.keys() == {"orders", "others"}


@pytest.mark.parametrize(
    "theirs", [Topic(0, {"team": "a"}), Topic(0, {}, {"": ["theirs"]})], ids=str
)
async def test_a_topic_that_others_create_first_is_not_called_redrives(
    connection: dict[str, Any], policy: MakeBody, theirs: Topic
) -> None:
    async with shop(connection, policy()) as contested:

        async def forestall(request: web.Request, do: Do) -> web.StreamResponse:
            if request.method == "PUT" and request.path.endswith("/orders-fulfilment-DLQ"):
                contested.topics["orders-fulfilment-DLQ"] = theirs
            return await do()

        contested.broker.fault = forestall
        with pytest.raises(AdminConflictError):
            await contested.look()
        contested.broker.fault = None
        with pytest.raises(TopicExistsError):
            await contested.look()
