"""How many calls to the broker a look at a settled policy takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from tests.fake_admin import SUPERUSER, FakeBroker, Namespace, Topic
from tests.unit.provision.test_faults import ConfigMaps

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.api.connection import PulsarConnectionSpec
from redrive.cluster.connections import Connection, ConnectionRef
from redrive.cluster.keeper import Again
from redrive.cluster.resources import Body, Key, Resource
from redrive.cluster.table import Table
from redrive.cluster.world import wall_clock
from redrive.errors import RedriveError
from redrive.provision import reconcile
from redrive.provision.claims import Claims
from redrive.provision.errors import (
    ConfigMapNotOursError,
    NameCollisionError,
    OwnerConflictError,
    PartitionsDifferError,
    SubscriptionExpiryError,
    TopicNotFoundError,
)
from redrive.provision.gather import gather
from redrive.provision.rounds import CALLS_PER_LOOK

MakeBody = Callable[..., dict[str, Any]]
NOTHING: Any = None

ALL = {
    "retry": {"partitions": 3},
    "deadLetter": {
        "messageTTL": "30d",
        "retention": {"time": "7d", "megabytes": 100},
        "backlogQuota": {"megabytes": 100},
        "readerRoles": ["shop-oncall"],
    },
}
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Provisioned",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


async def test_a_look_at_a_settled_policy_takes_no_more_calls_than_the_rotation_allows_for(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        replicated = {"replication_clusters": ["here", "there"]}
        broker.namespaces = {"shop/prod": Namespace({"orders": Topic(2, {})}, {}, replicated)}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        world = make_world(admin, connection, body)
        claims = Claims(world.policies, lambda _: None)

        async def look() -> reconcile.Provisioned:
            return await reconcile.provision(gather(body, world), body, world, claims)

        assert (await look()).steps
        body["status"] = {"observedGeneration": 7, "conditions": [READY]}

        assert not (await look()).steps  # reads the namespace
        before = len(broker.calls)
        assert not (await look()).steps
        assert len(broker.calls) - before == CALLS_PER_LOOK

        broker.namespaces["shop/prod"].topics.pop("orders-fulfilment-DLQ")
        assert (await look()).steps
        assert "orders-fulfilment-DLQ" in broker.namespaces["shop/prod"].topics


async def test_that_idle_subscriptions_are_deleted_is_found_before_any_topic_is_read(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy()
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        topics = {"orders": Topic(2, {})}
        expiry = {"subscription_expiration_time_minutes": 5}
        broker.namespaces = {"shop/prod": Namespace(topics, {}, expiry)}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        world = make_world(admin, connection, body)
        with pytest.raises(SubscriptionExpiryError):
            await reconcile.provision(
                gather(body, world), body, world, Claims(world.policies, lambda _: None)
            )
        assert len(broker.calls) == 3


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (SubscriptionExpiryError, Again.WHEN_WOKEN),
        (OwnerConflictError, Again.WHEN_WOKEN),
        (PartitionsDifferError, Again.WHEN_WOKEN),
        (ConfigMapNotOursError, Again.WHEN_WOKEN),
        (TopicNotFoundError, Again.SOON),
        (NameCollisionError, Again.WHEN_WOKEN),
    ],
)
async def test_only_what_nobody_tells_the_end_of_is_looked_at_again(
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    error: type[RedriveError],
    again: Again,
) -> None:
    async def refuse(*_: object) -> None:
        raise error("it is so", remedy="change it")

    class Statuses(ConfigMaps):
        async def patch_status(self, resource: Resource, key: Key, status: Body) -> Body:
            del resource
            return {**body, "status": status} if key == Key.of(body) else {}

        async def emit(self, *_: object, **__: object) -> None:
            """Forget it."""

    body = policy()
    world = make_world(NOTHING, connection, body)
    world.kubernetes, world.clock = Statuses(), wall_clock
    monkeypatch.setattr(reconcile, "provision", refuse)
    claims = Claims(world.policies, lambda _: None)
    assert await reconcile.reconcile(Key.of(body), world, claims, NOTHING) is again


def make_world(admin: Admin, connection: dict[str, Any], body: Body) -> Any:  # noqa: ANN401
    """What a reconcile needs of the world."""
    spec = PulsarConnectionSpec.model_validate(connection)
    through = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}

    async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
        return Connection(Key(namespace, ref.name), spec, admin)

    return SimpleNamespace(
        kubernetes=ConfigMaps(),
        policies=Table([body]),
        connections=Table([through]),
        config_maps=Table(),
        brokers=SimpleNamespace(resolve=resolve),
        settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
    )
