"""Stalled policies: when they are reconciled again, and the calls that this takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.admin.errors import error_for
from redrive.admin.http import Call, Endpoint, Http
from redrive.api import Body
from redrive.api.conditions import find, is_ready, reason
from redrive.errors import RedriveError, Requeue
from redrive.kube import resources
from redrive.kube.resources import Key
from redrive.provision import poller
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.poller import CALLS_PER_CHECK, StallChecks, is_checked
from redrive.provision.reconciler import converge
from tests.support.fake_admin import FakeBroker, Namespace, Topic, answering, at_call
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.manifests import changed
from tests.support.operator_in_process import KEY, operator_in_process, reconcile_harness
from tests.unit.provision.test_reconciler import make_world

MakeBody = Callable[..., dict[str, Any]]
RETRY, DEAD = "orders-fulfilment-RETRY", "orders-fulfilment-DLQ"
LEDGER = f"{DEAD}-LEDGER"
SOURCE = "orders"
EXPIRY = "subscription_expiration_time_minutes"
CALLS_PER_NAMESPACE = 3


@dataclass(frozen=True)
class Harness:
    """A policy with its source topic, and a broker for conflicting topics."""

    broker: FakeBroker
    ctx: Any
    body: dict[str, Any]

    @property
    def namespace(self) -> Namespace:
        return self.broker.namespaces["shop/prod"]

    def mark(self, name: str, owner: str, partitions: int = 0) -> None:
        """Have a topic that is marked as kept by *owner*."""
        self.namespace.topics[name] = Topic(partitions, {"redrive.io/owner": owner})

    async def stalls(self, reason: str) -> None:
        """Reconcile the policy, which fails for *reason*, and store that."""
        with pytest.raises(RedriveError) as refused:
            await self._look()
        assert refused.value.reason == reason
        ready = {"type": "Ready", "status": "False", "reason": reason, "message": ""}
        self.body["status"] = {"observedGeneration": 7, "conditions": [ready]}
        assert is_checked(self.body)

    async def is_over(self) -> bool:
        """Return the result of a stall check, with which a reconcile agrees."""
        before = len(self.broker.calls)
        over = await StallChecks(self.ctx).is_over(self.body)
        asked = self.broker.calls[before:]
        of_namespace = [call for call in asked if not call[1].startswith("persistent/shop/prod/o")]
        assert len(of_namespace) in {0, CALLS_PER_NAMESPACE}
        assert len(asked) - len(of_namespace) <= CALLS_PER_CHECK
        if over:
            await self._look()
        else:
            await self.stalls(self.body["status"]["conditions"][0]["reason"])
        return over

    async def _look(self) -> None:
        asked = resolve(self.body, self.ctx)
        await converge(asked, self.body, self.ctx, self._claims())

    def _claims(self) -> Conflicts:
        return Conflicts(self.ctx.policies, self.ctx.connections, lambda _: None)


@pytest.fixture
async def harness(
    connection: dict[str, Any], policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> Harness:
    monkeypatch.setattr(poller, "LISTED_SECONDS", 0.0)
    broker = FakeBroker()
    broker.tenants = {"shop": []}
    broker.namespaces = {"shop/prod": Namespace({"orders": Topic(2, {})})}
    admin = broker.admin()
    body = policy(adoption="IfPresent")
    ctx = make_world(admin, connection, body)

    async def open_(_: Key) -> SimpleNamespace:
        return SimpleNamespace(admin=admin)

    ctx.brokers.open = open_
    return Harness(broker, ctx, body)


Step = Callable[[Harness], object]
"""A change at the broker."""


@pytest.mark.parametrize("partitions", [0, 2])
async def test_owner_conflict_ends_when_all_topics_are_given_up(
    harness: Harness, partitions: int
) -> None:
    harness.mark(RETRY, "elsewhere/shop/orders", 2)
    harness.mark(DEAD, "elsewhere/shop/orders", partitions)
    await harness.stalls("OwnerConflict")
    assert not await harness.is_over()
    harness.namespace.topics[RETRY].properties.clear()
    assert not await harness.is_over()
    harness.namespace.topics[DEAD].properties["redrive.io/owner"] = "this-cluster/shop/gone"
    assert not await harness.is_over()
    harness.body["metadata"]["annotations"] = {"redrive.io/take-over-from": "gone"}
    assert await harness.is_over()


def marked(name: str) -> Step:
    return lambda harness: harness.mark(name, "elsewhere/shop/orders")


def stored(name: str, partitions: int = 0, **properties: str) -> Step:
    return lambda harness: harness.namespace.topics.update({name: Topic(partitions, properties)})


def deleted(name: str) -> Step:
    return lambda harness: harness.namespace.topics.pop(name)


def expiring(minutes: int) -> Step:
    return lambda harness: harness.namespace.policies.update({EXPIRY: minutes})


@pytest.mark.parametrize(
    ("spec", "cause", "reason", "remedy"),
    [
        pytest.param({}, marked(DEAD), "OwnerConflict", deleted(DEAD), id="dead letters"),
        pytest.param({}, marked(LEDGER), "OwnerConflict", deleted(LEDGER), id="ledger"),
        pytest.param(
            {"adoption": "Never"},
            stored(DEAD, team="a"),
            "TopicExists",
            deleted(DEAD),
            id="foreign",
        ),
        pytest.param(
            {}, stored(LEDGER, team="a"), "TopicExists", deleted(LEDGER), id="foreign ledger"
        ),
        pytest.param({}, stored(RETRY), "PartitionsDiffer", deleted(RETRY), id="other kind"),
        pytest.param({}, stored(RETRY), "PartitionsDiffer", stored(SOURCE), id="source changed"),
        pytest.param(
            {"retry": {"partitions": 3}},
            stored(RETRY),
            "PartitionsDiffer",
            stored(RETRY, 1),
            id="partitions",
        ),
        pytest.param({}, expiring(5), "SubscriptionExpiry", expiring(0), id="expiry"),
    ],
)
async def test_stall_ends_when_its_cause_is_removed(
    harness: Harness, spec: dict[str, Any], cause: Step, reason: str, remedy: Step
) -> None:
    harness.body["spec"] |= spec
    cause(harness)
    await harness.stalls(reason)
    assert not await harness.is_over()
    remedy(harness)
    assert await harness.is_over()


@pytest.mark.parametrize("labelled", [False, True])
async def test_config_map_conflict_ends_when_it_is_deleted(
    harness: Harness, *, labelled: bool
) -> None:
    labels = dict([resources.MANAGED]) if labelled else {}
    name = {"namespace": "shop", "name": "orders-redrive"}
    theirs: Body = {"metadata": {**name, "uid": "theirs", "labels": labels}, "data": {}}
    kubernetes: FakeKubernetes = harness.ctx.kubernetes
    kubernetes.add(resources.CONFIG_MAPS, theirs)
    if labelled:
        harness.ctx.config_maps.put({**theirs, "metadata": {**theirs["metadata"]}})
    await harness.stalls("ConfigMapNotOurs")
    before = len(harness.broker.calls)
    assert not await StallChecks(harness.ctx).is_over(harness.body)
    assert len(harness.broker.calls) == before
    kubernetes.objects[resources.CONFIG_MAPS].clear()
    harness.ctx.config_maps.drop(theirs)
    assert await harness.is_over()


async def test_other_failures_end_the_stall_check(harness: Harness, policy: MakeBody) -> None:
    harness.mark(RETRY, "elsewhere/shop/orders", 2)
    await harness.stalls("OwnerConflict")
    asks = StallChecks(harness.ctx)
    harness.broker.fault = at_call(1, answering(500))
    assert await asks.is_over(harness.body)
    harness.broker.fault = None
    assert not await asks.is_over(harness.body)
    broken = policy(maxRetries=-1, generation=8)
    assert await asks.is_over({**broken, "status": harness.body["status"]})


async def test_stall_checks_share_reads_of_namespace(
    harness: Harness, policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    harness.namespace.policies[EXPIRY] = 5
    await harness.stalls("SubscriptionExpiry")
    asks = StallChecks(harness.ctx)
    before = len(harness.broker.calls)
    for number in range(50):
        body = policy(f"orders-{number}") | {"status": harness.body["status"]}
        assert not await asks.is_over(body)
    assert len(harness.broker.calls) - before <= CALLS_PER_NAMESPACE


POLICIES = 50
HOUR = 3_600
CALLS_PER_SECOND = 2.5
"""Limit for all policies and the checks of their connection."""


async def test_refused_policy_stalls_and_is_retried(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    here = reconcile_harness(connection, policy(), FakeKubernetes())
    here.broker.fault = answering(412)
    assert await here.reconcile() is Requeue.SLOW_BACKOFF
    refused = here.kubernetes.objects[resources.POLICIES][KEY]
    stalled = find(refused, "Stalled")
    assert stalled is not None
    assert (stalled.status, stalled.reason) == ("True", "BrokerRefused")
    assert "412" in stalled.message

    here.broker.fault = None
    here.ctx.policies.put(refused)
    assert await here.reconcile() is Requeue.ON_CHANGE
    now = here.kubernetes.objects[resources.POLICIES][KEY]
    assert is_ready(now)
    assert find(now, "Stalled") is None


class Refusing(Http):
    """A broker with the source topics of many policies, where nothing may be created.

    Attributes:
        calls: number of calls, by method and last part of the path.
    """

    def __init__(self) -> None:
        self.calls = Counter[str]()

    async def send(self, call: Call, way: Endpoint) -> Any:  # noqa: ARG002, ANN401
        self.calls[f"{call.method} {call.path.rsplit('/', 1)[-1]}"] += 1
        if call.method != "GET":
            raise error_for(call.does, 412, '{"reason": "not here"}')
        topics = [f"persistent://shop/prod/orders-{number}" for number in range(POLICIES)]
        answers: dict[str, Any] = {
            "clusters": ["standalone"],
            "brokers/version": "4.0.8",
            "namespaces/shop": ["shop/prod"],
            "namespaces/shop/prod": {"auth_policies": {"destination_auth": {}}},
            "persistent/shop/prod": topics,
            "persistent/shop/prod/partitioned": [],
        }
        if call.path.endswith("/properties"):
            answers[call.path] = {}
        if call.path in answers:
            answer = answers[call.path]
            return answer if call.read is None else call.read(answer)
        if call.optional:
            return None
        raise error_for(call.does, 404, '{"reason": "not found"}')


def clock_of_the_loop() -> Callable[[], datetime]:
    """Return a clock that goes as the event loop's."""
    loop, began = asyncio.get_running_loop(), datetime(2026, 1, 1, tzinfo=UTC)
    start = loop.time()
    return lambda: began + timedelta(seconds=loop.time() - start)


@pytest.mark.usefixtures("virtual_time")
async def test_refused_policies_make_few_calls_per_hour(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    metadata = {"namespace": "shop", "name": "main", "uid": "main", "resourceVersion": "1"}
    typed = {"apiVersion": resources.CONNECTIONS.api_version, "kind": "BrokerConnection"}
    open_to_all = changed(connection, authentication={"type": "None"})
    kubernetes, http = FakeKubernetes(), Refusing()
    kubernetes.add(
        resources.CONNECTIONS,
        {**typed, "metadata": {**metadata, "generation": 1}, "spec": open_to_all},
    )
    for number in range(POLICIES):
        topic = f"persistent://shop/prod/orders-{number}"
        kubernetes.add(resources.POLICIES, policy(f"orders-{number}", topic=topic))
    clock = clock_of_the_loop()
    async with operator_in_process(kubernetes, cast("Http", http), clock) as ctx:
        await asyncio.sleep(HOUR)
        assert {reason(body) for body in ctx.policies} == {"BrokerRefused"}
    assert http.calls.total() / HOUR <= CALLS_PER_SECOND, http.calls
    tries = [count for call, count in http.calls.items() if call.startswith("PUT ")]
    assert len(tries) == POLICIES
    assert HOUR / 300 <= min(tries) <= max(tries) <= 40  # a right may be granted at any time
