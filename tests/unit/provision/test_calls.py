"""How many calls to the broker a look at a settled policy takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.errors import AdminForbiddenError, BrokerFailedError, BrokerUnreachableError
from redrive.admin.http import Access, Http
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import (
    ConfigMapNotOursError,
    OwnerConflictError,
    PartitionsDifferError,
    RedriveError,
    Requeue,
    SubscriptionExpiryError,
    TopicNotFoundError,
)
from redrive.kube.cache import Cache
from redrive.kube.client import UnavailableError
from redrive.kube.connections import Connection
from redrive.kube.context import wall_clock
from redrive.kube.resources import POLICIES, Key
from redrive.provision import reconciler
from redrive.provision import reconciler as converging
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.orphans import LostPolicies
from redrive.provision.poller import CALLS_PER_LOOK
from redrive.provision.reconciler import Converged, converge
from redrive.provision.request import NameCollisionError
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes, edit

MakeBody = Callable[..., dict[str, Any]]
NOTHING: Any = None

ALL = {
    "retry": {"partitions": 3},
    "deadLetter": {
        "messageTTL": "30d",
        "retention": {"time": "7d", "size": "200Mi"},
        "backlogQuota": {"size": "100Mi"},
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
HAS_LEDGER = {"ledgerTopic": "persistent://shop/prod/orders-fulfilment-DLQ-LEDGER"}


async def test_a_look_at_a_settled_policy_takes_no_more_calls_than_the_rotation_allows_for(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    async with serving(connection, body) as (broker, look):
        assert (await look()).actions
        body["status"] = {"observedGeneration": 7, "conditions": [READY], **HAS_LEDGER}

        assert not (await look()).actions  # reads the namespace
        before = len(broker.calls)
        assert not (await look()).actions
        assert len(broker.calls) - before == CALLS_PER_LOOK

        broker.namespaces["shop/prod"].topics.pop("orders-fulfilment-DLQ")
        assert (await look()).actions
        assert "orders-fulfilment-DLQ" in broker.namespaces["shop/prod"].topics


async def test_a_look_at_a_policy_that_only_observes_reads_once_though_all_differs(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    async with serving(connection, body) as (broker, look):
        assert (await look()).actions
        topics = broker.namespaces["shop/prod"].topics
        for name in ("orders-fulfilment-RETRY", "orders-fulfilment-DLQ"):
            for subscriptions in topics[name].parts.values():
                subscriptions.clear()
        edit(body, managementPolicy="Observe")
        # Two subscriptions, and the ConfigMap, which shows the generation; reads the namespace.
        assert len((await look()).planned_changes) == 3
        body["status"] = {"observedGeneration": 8, "conditions": [READY], **HAS_LEDGER}
        before = len(broker.calls)
        assert len((await look()).planned_changes) == 3
        assert len(broker.calls) - before == CALLS_PER_LOOK


async def test_a_look_at_a_policy_whose_schema_is_refused_reads_once_and_tries_again(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    avro: dict[str, Any] = {"type": "AVRO", "data": "", "properties": {}}
    odd = {**avro, "type": "STRING"}
    async with serving(connection, body) as (broker, look):
        assert (await look()).actions
        topics = broker.namespaces["shop/prod"].topics
        retry, dead = (topics[f"orders-fulfilment-{kind}"] for kind in ("RETRY", "DLQ"))
        topics["orders"].schema, retry.schema, dead.schema = avro, odd, odd
        body["status"] = {"observedGeneration": 7, "conditions": [READY], **HAS_LEDGER}
        assert not (await look()).actions  # reads the namespace
        before = len(broker.calls)
        made = await look()
        assert [caution.reason for caution in made.warnings] == ["SchemaRefused"]
        does = Counter(method for method, _ in broker.calls[before:])
        assert does == {"GET": CALLS_PER_LOOK + 4, "POST": 2}  # versions there and here

        retry.schema = dead.schema = None
        assert len((await look()).actions) == 2
        assert retry.schema == dead.schema == avro


@pytest.mark.parametrize(
    ("reason", "calls"),
    [("TopicNotFound", 4), ("NamespaceNotFound", 5), ("TenantNotFound", 5)],
)
async def test_a_hundred_policies_that_wait_for_a_source_topic_share_what_one_reads(
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    calls: int,
) -> None:
    monkeypatch.setattr(converging, "AWAITED_SECONDS", 60)
    waits = {**READY, "status": "False", "reason": reason}
    body = policy() | {"status": {"observedGeneration": 7, "conditions": [waits]}}
    async with serving(connection, body) as (broker, look):
        tenants, namespaces = broker.tenants, broker.namespaces
        broker.tenants = {} if reason == "TenantNotFound" else tenants
        broker.namespaces = {"shop/prod": Namespace()} if reason == "TopicNotFound" else {}
        for _ in range(100):
            with pytest.raises(RedriveError) as refusal:
                await look()
            assert refusal.value.reason == reason
        assert len(broker.calls) == calls
        broker.tenants, broker.namespaces = tenants, namespaces
        monkeypatch.setattr(converging, "AWAITED_SECONDS", 0)
        assert (await look()).actions


async def test_a_policy_that_is_new_is_never_told_of_a_missing_topic_by_what_was_read_before(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy()
    async with serving(connection, body) as (broker, look):
        topics = broker.namespaces["shop/prod"].topics
        orders = topics.pop("orders")
        with pytest.raises(TopicNotFoundError):
            await look()
        topics["orders"] = orders
        assert (await look()).actions


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
        ctx = make_world(admin, connection, body)
        with pytest.raises(SubscriptionExpiryError):
            await converge(
                resolve(body, ctx),
                body,
                ctx,
                Conflicts(ctx.policies, ctx.connections, lambda _: None),
            )
        assert len(broker.calls) == 4  # with that for the release


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (SubscriptionExpiryError("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (OwnerConflictError("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (PartitionsDifferError("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (ConfigMapNotOursError("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (TopicNotFoundError("it is so", remedy="change it"), Requeue.BACKOFF),
        (
            NameCollisionError("it is so", rival=Key("shop", "b"), remedy="change it"),
            Requeue.ON_CHANGE,
        ),
    ],
)
async def test_only_what_no_watch_shows_the_end_of_is_looked_at_again(
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    error: RedriveError,
    again: Requeue,
) -> None:
    async def refuse(*_: object) -> None:
        raise error

    body = policy()
    ctx = make_world(NOTHING, connection, body)
    ctx.kubernetes.add(POLICIES, body)
    ctx.clock = wall_clock
    monkeypatch.setattr(reconciler, "converge", refuse)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    lost = LostPolicies(ctx.policies, wall_clock)
    assert await reconciler.reconcile(Key.of(body), ctx, conflicts, NOTHING, lost) is again


@asynccontextmanager
async def serving(
    connection: dict[str, Any], body: Body
) -> AsyncIterator[tuple[FakeBroker, Callable[[], Awaitable[Converged]]]]:
    """A broker with a replicated source topic, and what looks at a policy for it."""
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        replicated = {"replication_clusters": ["here", "there"]}
        broker.namespaces = {"shop/prod": Namespace({"orders": Topic(2, {})}, {}, replicated)}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        ctx = make_world(admin, connection, body)
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)

        async def look() -> Converged:
            return await converge(resolve(body, ctx), body, ctx, conflicts)

        yield broker, look


def make_world(admin: Admin, connection: dict[str, Any], body: Body) -> Any:  # noqa: ANN401
    """What a reconcile needs of the world."""
    spec = BrokerConnectionSpec.model_validate(connection)
    through = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}

    async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
        return Connection(Key(namespace, ref.name), spec, admin)

    kubernetes = FakeKubernetes()
    kubernetes.add(POLICIES, body)
    return SimpleNamespace(
        kubernetes=kubernetes,
        policies=Cache([body]),
        connections=Cache([through]),
        namespaces=None,
        config_maps=Cache(),
        brokers=SimpleNamespace(resolve=resolve),
        settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
        clock=wall_clock,
    )


GATEWAY = BrokerUnreachableError("a gateway answers 503", remedy="wait")
GONE = TopicNotFoundError("the topic is gone", remedy="create it")


@pytest.mark.parametrize(
    ("error", "is_settled", "failures", "ready"),
    [
        (GATEWAY, True, 0, "True"),
        (BrokerFailedError("503", remedy="wait"), True, 0, "True"),
        (UnavailableError("the API server answers 503", remedy="wait"), True, 0, "True"),
        (GATEWAY, True, 1, "False"),  # it stays
        (GATEWAY, False, 0, "False"),  # nothing is known of it otherwise
        (GONE, True, 0, "False"),  # no failure of a server
        (AdminForbiddenError("403", remedy="grant"), True, 0, "False"),  # will not pass
    ],
)
async def test_a_single_failure_of_a_server_leaves_what_is_settled_ready(  # noqa: PLR0913, PLR0917
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    error: RedriveError,
    is_settled: bool,  # noqa: FBT001
    failures: int,
    ready: str,
) -> None:
    async def fail(*_: object) -> None:
        raise error

    body = policy()
    body["status"] = {"observedGeneration": 7 if is_settled else 6, "conditions": [READY]}
    ctx = make_world(NOTHING, connection, body)
    ctx.kubernetes.add(POLICIES, body)
    ctx.clock = wall_clock
    monkeypatch.setattr(reconciler, "converge", fail)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    lost = LostPolicies(ctx.policies, ctx.clock)
    again = await reconciler.reconcile(
        Key.of(body), ctx, conflicts, NOTHING, lost, failures=failures
    )
    assert again is error.requeue
    (written,) = ctx.kubernetes.objects[POLICIES].values()
    assert [c["status"] for c in written["status"]["conditions"] if c["type"] == "Ready"] == [ready]
