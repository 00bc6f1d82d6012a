"""Reconciles of a policy: their calls, repair of partitions, and pauses."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from redrive.admin import granting
from redrive.admin.client import Admin
from redrive.admin.errors import AdminForbiddenError, BrokerFailedError, BrokerUnreachableError
from redrive.api import Body
from redrive.api.conditions import ConditionStatus, StatusWarning, written
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.retrypolicy import ConnectionRef
from redrive.errors import (
    OwnerConflictError,
    RedriveError,
    Requeue,
)
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.client import UnavailableError
from redrive.kube.connections import Connection
from redrive.kube.context import wall_clock
from redrive.kube.resources import PAUSE, POLICIES, Key
from redrive.policy.naming import TopicName
from redrive.provision import reconciler
from redrive.provision import reconciler as converging
from redrive.provision.actions import Action, CreateSubscription, RestorePartitions
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.observe import around
from redrive.provision.outcome import describe_changes, observed_conditions, paused_conditions
from redrive.provision.poller import CALLS_PER_RECONCILE
from redrive.provision.reconciler import Converged, OrphanedPolicies, PolicyReconciler, converge
from redrive.provision.request import ContestedError
from redrive.reasons import Reason, requeue_of
from tests.support.fake_admin import Do, FakeBroker, Namespace, Topic
from tests.support.fake_kubernetes import FakeKubernetes, edit
from tests.support.operator_in_process import KEY, reconcile_harness
from tests.support.reasons import raises

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


@pytest.mark.parametrize("paused", [False, True])
async def test_paused_policy_does_not_become_progressing(
    connection: dict[str, Any], policy: MakeBody, *, paused: bool
) -> None:
    body = policy()
    body["metadata"]["annotations"] = {PAUSE: str(paused).lower()}
    here = reconcile_harness(connection, body, FakeKubernetes())
    marking = PolicyReconciler(here.ctx, here.conflicts, NOTHING, here.lost)
    await marking.mark_progressing(KEY)
    status = here.kubernetes.objects[POLICIES][KEY].get("status")
    assert (status is None) is paused


async def test_settled_reconcile_takes_no_more_calls_than_planned(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    broker, look = serving(connection, body)
    assert (await look()).actions
    body["status"] = {"observedGeneration": 7, "conditions": [READY], **HAS_LEDGER}

    assert not (await look()).actions  # reads the namespace
    before = len(broker.calls)
    assert not (await look()).actions
    assert len(broker.calls) - before == CALLS_PER_RECONCILE

    broker.namespaces["shop/prod"].topics.pop("orders-fulfilment-DLQ")
    assert (await look()).actions
    assert "orders-fulfilment-DLQ" in broker.namespaces["shop/prod"].topics


async def test_settings_of_the_broker_are_warned_about(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    broker, admin = broker_of_shop("orders")
    broker.settings = {
        "subscriptionTypesEnabled": "[Key_Shared, Shared]",
        "encryptionRequireOnProducer": "true",
    }
    await admin.read_settings()  # as the reconcile of its connection does
    body = policy()
    ctx = make_world(admin, connection, body)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    warnings = (await converge(resolve(body, ctx), body, ctx, conflicts)).warnings
    reasons = {caution.reason for caution in warnings}
    assert reasons >= {"SubscriptionTypeNotAllowed", "EncryptionRequired"}


async def test_observing_reconcile_reads_once_despite_differences(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    broker, look = serving(connection, body)
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
    assert len(broker.calls) - before == CALLS_PER_RECONCILE


async def test_refused_schema_is_retried_with_one_read(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(**ALL)
    avro: dict[str, Any] = {"type": "AVRO", "data": "", "properties": {}}
    odd = {**avro, "type": "STRING"}
    broker, look = serving(connection, body)
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
    assert does == {"GET": CALLS_PER_RECONCILE + 4, "POST": 2}  # versions there and here

    retry.schema = dead.schema = None
    assert len((await look()).actions) == 2
    assert retry.schema == dead.schema == avro


@pytest.mark.parametrize(
    ("reason", "calls"),
    [("TopicNotFound", 4), ("NamespaceNotFound", 5), ("TenantNotFound", 5)],
)
async def test_policies_awaiting_one_topic_share_its_reads(
    connection: dict[str, Any],
    policy: MakeBody,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    calls: int,
) -> None:
    monkeypatch.setattr(converging, "AWAITED_SECONDS", 60)
    waits = {**READY, "status": "False", "reason": reason}
    body = policy() | {"status": {"observedGeneration": 7, "conditions": [waits]}}
    broker, look = serving(connection, body)
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


async def test_new_policies_are_granted_rights_in_one_call(
    connection: dict[str, Any], policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granting, "MAX_GAP_SECONDS", 60.0)
    names = [f"orders-{number}" for number in range(5)]
    bodies = [policy(name, topic=f"persistent://shop/prod/{name}") for name in names]
    broker, admin = broker_of_shop(*names)
    ctx = make_world(admin, connection, *bodies)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    await asyncio.gather(*(converge(resolve(b, ctx), b, ctx, conflicts) for b in bodies))
    assert broker.writes.count(("POST", "namespaces/grantPermissionsOnTopics")) == 1
    granted = broker.namespaces["shop/prod"].grants
    for name in names:
        for kind, rights in (("RETRY", {"consume", "produce"}), ("DLQ", {"produce"})):
            topic = f"persistent://shop/prod/{name}-fulfilment-{kind}"
            assert set(granted[topic]["fulfilment"]) == rights


async def test_new_policy_ignores_cached_missing_topic(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy()
    broker, look = serving(connection, body)
    topics = broker.namespaces["shop/prod"].topics
    orders = topics.pop("orders")
    with raises(Reason.TOPIC_NOT_FOUND):
        await look()
    topics["orders"] = orders
    assert (await look()).actions


async def test_subscription_expiry_is_detected_before_topic_reads(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy()
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    topics = {"orders": Topic(2, {})}
    expiry = {"subscription_expiration_time_minutes": 5}
    broker.namespaces = {"shop/prod": Namespace(topics, {}, expiry)}
    admin = broker.admin()
    ctx = make_world(admin, connection, body)
    with raises(Reason.SUBSCRIPTION_EXPIRY):
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
        (Reason.SUBSCRIPTION_EXPIRY.error("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (OwnerConflictError("it is so", owner="a", got="b", remedy="change it"), Requeue.ON_CHANGE),
        (Reason.PARTITIONS_DIFFER.error("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (Reason.CONFIG_MAP_NOT_OURS.error("it is so", remedy="change it"), Requeue.ON_CHANGE),
        (Reason.TOPIC_NOT_FOUND.error("it is so", remedy="change it"), Requeue.BACKOFF),
        (
            ContestedError(
                "it is so",
                rival=Key("shop", "b"),
                namespace="shop",
                remedy="change it",
                reason=Reason.NAME_COLLISION,
            ),
            Requeue.ON_CHANGE,
        ),
    ],
)
async def test_refusals_without_watch_are_retried(
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
    lost = OrphanedPolicies(ctx.policies, wall_clock)
    policies = PolicyReconciler(ctx, conflicts, NOTHING, lost)
    assert await policies.reconcile(Key.of(body)) is again


@pytest.mark.parametrize(("minutes", "again"), [(5, Requeue.SLOW_BACKOFF), (-5, Requeue.ON_CHANGE)])
@pytest.mark.parametrize(
    ("name", "form"), [("ignore-outages-until", "{}"), ("dead-letter-now", "4711:3:0@{}")]
)
async def test_policy_with_timed_annotation_is_reconciled_again(  # noqa: PLR0913
    connection: dict[str, Any],
    policy: MakeBody,
    *,
    name: str,
    form: str,
    minutes: int,
    again: Requeue,
) -> None:
    body = policy()
    end = (wall_clock() + timedelta(minutes=minutes)).isoformat()
    annotations = {"redrive.io/paused": "true", f"redrive.io/{name}": form.format(end)}
    body["metadata"]["annotations"] = annotations
    ctx = make_world(NOTHING, connection, body)
    ctx.kubernetes.add(POLICIES, body)
    ctx.clock = wall_clock
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    lost = OrphanedPolicies(ctx.policies, wall_clock)
    policies = PolicyReconciler(ctx, conflicts, NOTHING, lost)
    assert await policies.reconcile(Key.of(body)) is again


def broker_of_shop(*names: str) -> tuple[FakeBroker, Admin]:
    """A broker with replicated source topics, and a client of it."""
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    replicated = {"replication_clusters": ["here", "there"]}
    topics = {name: Topic(2, {}) for name in names}
    broker.namespaces = {"shop/prod": Namespace(topics, {}, replicated)}
    return broker, broker.admin()


def serving(
    connection: dict[str, Any], body: Body
) -> tuple[FakeBroker, Callable[[], Awaitable[Converged]]]:
    """A broker with a replicated source topic, and a function that reconciles a policy."""
    broker, admin = broker_of_shop("orders")
    ctx = make_world(admin, connection, body)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)

    async def look() -> Converged:
        return await converge(resolve(body, ctx), body, ctx, conflicts)

    return broker, look


@pytest.mark.parametrize(("minutes", "unloads"), [(0, 1), (61, 0)])
async def test_retry_topic_is_unloaded_once_for_each_request(
    connection: dict[str, Any], policy: MakeBody, minutes: int, unloads: int
) -> None:
    body = policy(adoption="IfPresent")
    request_time = written(wall_clock() - timedelta(minutes=minutes))
    body["metadata"]["annotations"] = {"redrive.io/unload-requested-at": request_time}
    call = ("PUT", "persistent/shop/prod/orders-fulfilment-RETRY/unload")
    broker, look = serving(connection, body)
    result = (await look()).unload
    assert result == ({"requestTime": request_time, "error": None} if unloads else None)
    body["status"] = {"unload": result}
    assert (await look()).unload is None
    assert broker.writes.count(call) == unloads


async def test_refused_unload_does_not_fail_the_policy(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(adoption="IfPresent")
    broker, look = serving(connection, body)
    await look()
    request_time = written(wall_clock())
    body["metadata"]["annotations"] = {"redrive.io/unload-requested-at": request_time}

    async def refuse(request: web.Request, do: Do) -> web.StreamResponse:
        if request.path.endswith("/unload"):
            return web.json_response({"reason": "not for this role"}, status=403)
        return await do()

    broker.fault = refuse
    result = (await look()).unload
    assert result is not None
    assert "not for this role" in result["error"]


def make_world(admin: Admin, connection: dict[str, Any], *policies: Body) -> Any:  # noqa: ANN401
    """Return the context of reconciles of *policies*."""
    spec = BrokerConnectionSpec.model_validate(connection)
    through = {"metadata": {"namespace": "shop", "name": "main", "uid": "u"}, "spec": connection}

    async def resolve(ref: ConnectionRef, namespace: str) -> Connection:
        return Connection(Key(namespace, ref.name), spec, admin)

    kubernetes = FakeKubernetes()
    for body in policies:
        kubernetes.add(POLICIES, body)
    return SimpleNamespace(
        kubernetes=kubernetes,
        policies=Cache(policies),
        connections=Cache([through]),
        namespaces=None,
        config_maps=Cache(),
        brokers=SimpleNamespace(resolve=resolve),
        settings=SimpleNamespace(cluster_id="this-cluster", namespaces=()),
        clock=wall_clock,
    )


GATEWAY = BrokerUnreachableError("a gateway answers 503", remedy="wait")
GONE = Reason.TOPIC_NOT_FOUND.error("the topic is gone", remedy="create it")


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
async def test_single_server_failure_keeps_settled_policy_ready(  # noqa: PLR0913, PLR0917
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
    lost = OrphanedPolicies(ctx.policies, ctx.clock)
    policies = PolicyReconciler(ctx, conflicts, NOTHING, lost)
    again = await policies.reconcile(Key.of(body), failures=failures)
    assert again is requeue_of(error)
    (written,) = ctx.kubernetes.objects[POLICIES].values()
    assert [c["status"] for c in written["status"]["conditions"] if c["type"] == "Ready"] == [ready]


WHOLE = {f"-partition-{number}": ["fulfilment"] for number in range(3)}


@dataclass(frozen=True)
class Shop:
    """A broker, and looks at the policy of one topic with three partitions."""

    broker: FakeBroker
    admin: Admin
    body: Body
    look: Callable[[], Awaitable[Converged]]

    @property
    def retry(self) -> Topic:
        return self.broker.namespaces["shop/prod"].topics["orders-fulfilment-RETRY"]


def partitioned_shop(connection: dict[str, Any], body: Body, **existing: Topic) -> Shop:
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    topics = {"orders": Topic(3, {}), **existing}
    broker.namespaces = {"shop/prod": Namespace(topics)}
    admin = broker.admin()
    ctx = make_world(admin, connection, body)
    conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
    return Shop(
        broker,
        admin,
        body,
        lambda: converge(resolve(body, ctx), body, ctx, conflicts),
    )


async def test_failed_subscription_on_partition_is_retried(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    made = partitioned_shop(connection, policy())

    async def fail_on_one(request: web.Request, do: Do) -> web.StreamResponse:
        answer = await do()
        if request.method == "PUT" and "RETRY/subscription" in request.path:
            made.retry.parts["-partition-1"].clear()
            return web.json_response({"reason": "not on one"}, status=500)
        return answer

    made.broker.fault = fail_on_one
    with pytest.raises(BrokerFailedError, match="not on one"):
        await made.look()
    made.broker.fault = None
    assert CreateSubscription in map(type, (await made.look()).actions)
    assert made.retry.parts == WHOLE
    assert not (await made.look()).actions


async def test_lost_subscription_on_partition_is_created_again(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(adoption="IfPresent")
    made = partitioned_shop(connection, body)
    await made.look()
    body["status"] = {"observedGeneration": 7, "conditions": [READY]}
    made.retry.parts["-partition-2"].clear()
    assert list(map(type, (await made.look()).actions)) == [CreateSubscription]
    assert made.retry.parts == WHOLE
    assert not (await made.look()).actions


@pytest.mark.parametrize("polled", [False, True])
async def test_deleted_partition_is_restored_with_subscription(
    connection: dict[str, Any], policy: MakeBody, *, polled: bool
) -> None:
    """Statistics that were polled before show the subscriptions, and no missing partition."""
    body = policy(adoption="IfPresent")
    made = partitioned_shop(connection, body)
    await made.look()
    body["status"] = {"observedGeneration": 7, "conditions": [READY]}
    if polled:
        retry = TopicName("shop", "prod", "orders-fulfilment-RETRY")
        await made.admin.stats(retry, partitioned=True)
    del made.retry.parts["-partition-0"], made.retry.parts["-partition-1"]
    if polled:
        await around(TOPIC, made.admin, max_age=0.0)
    actions = (await made.look()).actions
    assert list(map(type, actions)) == [RestorePartitions, CreateSubscription]
    assert str(actions[0]).endswith("orders-fulfilment-RETRY: 0, 1")
    assert made.retry.parts == WHOLE
    assert not (await made.look()).actions


async def test_observing_policy_reports_lost_partition_only(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    parts = {"-partition-0": ["fulfilment"], "-partition-1": ["fulfilment"]}
    retry = Topic(3, {}, parts)
    del retry.parts["-partition-2"]
    body = policy(adoption="IfPresent", managementPolicy="Observe")
    made = partitioned_shop(connection, body, **{"orders-fulfilment-RETRY": retry})
    planned_changes = (await made.look()).planned_changes
    assert {RestorePartitions, CreateSubscription} <= set(map(type, planned_changes))
    assert not made.broker.writes
    assert made.retry.parts == parts


async def test_completed_foreign_subscription_is_not_recorded(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    retry = Topic(3, {}, {"-partition-0": ["fulfilment"]})
    made = partitioned_shop(
        connection, policy(adoption="IfPresent"), **{"orders-fulfilment-RETRY": retry}
    )
    await made.look()
    assert made.retry.parts == WHOLE
    assert not made.retry.properties.get("redrive.io/subscription")


TOPIC = TopicName("shop", "prod", "orders")


@pytest.mark.parametrize(
    ("annotations", "is_paused"),
    [(None, False), ({}, False), ({"redrive.io/paused": "true"}, True),
     ({"redrive.io/paused": "false"}, False), ({"paused": "true"}, False)],
)  # fmt: skip
def test_paused_annotation_pauses_policy(
    policy: MakeBody, annotations: dict[str, str] | None, *, is_paused: bool
) -> None:
    body = policy()
    body["metadata"]["annotations"] = annotations
    assert resources.is_paused(body) is is_paused


def conditions_of(*types: str) -> list[dict[str, str]]:
    return [
        {"type": t, "status": "True", "reason": "R", "message": "M",
         "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for t in types
    ]  # fmt: skip


def test_paused_policy_keeps_its_last_conditions(policy: MakeBody) -> None:
    before = conditions_of("Ready", "Reconciling", "LadderDescends", "Paused")
    body = policy() | {"status": {"observedGeneration": 7, "conditions": before}}
    after = paused_conditions(body)
    assert [c.type for c in after] == ["Ready", "LadderDescends", "Paused"]
    assert after[0].status is ConditionStatus.TRUE
    assert "remove the annotation" in after[2].message


def test_paused_policy_with_new_spec_is_unknown(policy: MakeBody) -> None:
    body = policy() | {"status": {"observedGeneration": 6, "conditions": conditions_of("Ready")}}
    statuses = {c.type: c.status for c in paused_conditions(body)}
    assert statuses == {"Ready": ConditionStatus.UNKNOWN, "Paused": ConditionStatus.TRUE}


def test_observing_policy_is_ready_and_shows_planned_changes() -> None:
    actions: list[Action] = [CreateSubscription(TOPIC, str(n) + "x" * 600) for n in range(40)]
    ready, differs, other = observed_conditions(actions, [StatusWarning("Other", "m")])
    assert (ready.type, ready.status, ready.reason) == ("Ready", ConditionStatus.TRUE, "Observed")
    assert (differs.type, other.type) == ("DriftDetected", "Other")
    assert "redrive would have created subscription 0x" in differs.message
    assert differs.message.endswith("; and 35 more")
    shown = describe_changes(actions)
    assert {len(action) for action in shown[:31]} == {512}
    assert shown[31:] == ["9 more changes"]
    assert len({*describe_changes(actions[:32])}) == 32


def test_observing_policy_without_differences_is_only_ready() -> None:
    assert [c.type for c in observed_conditions([], [])] == ["Ready"]
