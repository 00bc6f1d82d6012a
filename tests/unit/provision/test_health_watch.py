"""When and how often topics are read; what is found there is tried at a real broker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from redrive.admin.errors import AdminForbiddenError
from redrive.admin.model import AckPersistence, SubscriptionStats
from redrive.api import Body
from redrive.api.conditions import StatusWarning
from redrive.api.connection import BrokerConnectionSpec
from redrive.kube.context import Context
from redrive.kube.resources import POLICIES, Key
from redrive.provision import health as provision_health
from redrive.provision.health import INTERVAL_SECONDS, Health, Reader
from redrive.provision.poller import RateLimit
from tests.support.fake_kubernetes import FakeKubernetes

MakeBody = Callable[..., dict[str, Any]]
READY = {"type": "Ready", "status": "True", "reason": "Provisioned", "message": ""}
pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_connections_to_one_broker_share_the_pace_of_its_statistics(
    ctx: Context,
    policy: MakeBody,
    connection: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces: list[RateLimit] = []
    all_begun = asyncio.Event()

    class Noting(Reader):
        """A reader that tells its pace."""

        def __init__(self, interval: float, given: Sequence[RateLimit]) -> None:
            super().__init__(interval, given)
            paces.append(given[0])
            if len(paces) == 3:
                all_begun.set()

    monkeypatch.setattr(provision_health, "Reader", Noting)
    for name, url in (("a", "http://b:80"), ("b", "http://b:80/"), ("c", "http://other:80")):
        metadata = {"namespace": "shop", "name": name, "uid": name, "resourceVersion": "1"}
        ctx.connections.put({"metadata": metadata, "spec": connection | {"adminUrl": url}})
        body = policy(name, connectionRef={"name": name})
        ctx.policies.put(body | {"status": {"conditions": [READY]}})
    health = Health(ctx, lambda _: None)
    async with asyncio.timeout(5):
        await all_begun.wait()
    await health.stop()
    first, second, other = paces
    assert first is second
    assert other is not first


NOTHING_WAITS = SubscriptionStats(0, 0, 0, durable=False, ack_holes=0, oldest=None)
ORDERS = Key("shop", "orders")


class Cluster:
    """The API server, the broker and the clock around one policy that nothing happens to."""

    def __init__(self, ctx: Context, connection: Mapping[str, Any], body: Body) -> None:
        self.kubernetes = FakeKubernetes()
        self.seen = self.waits = 0
        self.found: dict[str, SubscriptionStats] = {}
        self.quotas: dict[str, dict[str, Any]] = {"topic": {}, "namespace": {}}
        self.refuses_quotas = False
        self.of_broker: int | None = None
        self.now = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
        self.ctx = dataclasses.replace(
            ctx, kubernetes=self.kubernetes, brokers=cast("Any", self), clock=lambda: self.now
        )
        metadata = {"namespace": "shop", "name": "main", "uid": "main", "resourceVersion": "1"}
        self.ctx.connections.put({"metadata": metadata, "spec": connection})
        self.change(body)
        self.admin = self
        self.spec = BrokerConnectionSpec.model_validate(connection)

    async def resolve(self, *_: object) -> Cluster:
        """Resolve every connection to this broker."""
        return self

    async def stats(self, *_: object, **__: object) -> dict[str, SubscriptionStats]:
        """Answer for every topic that as much waits there."""
        waits = dataclasses.replace(NOTHING_WAITS, backlog=self.waits)
        return {"fulfilment": waits, "redrive": waits, **self.found}

    async def topic_policy(self, *_: object) -> dict[str, Any]:
        """Answer with the quotas that are set on the dead-letter topic."""
        if self.refuses_quotas:
            raise AdminForbiddenError("no", remedy="ask")
        return self.quotas["topic"]

    async def namespace(self, *_: object, **__: object) -> SimpleNamespace:
        """Answer with those of the namespace."""
        return SimpleNamespace(backlog_quotas=self.quotas["namespace"])

    async def default_backlog_quota(self) -> int | None:
        """Answer with that of the broker."""
        return self.of_broker

    async def ack_persistence(self) -> AckPersistence:
        """Answer as an old broker does."""
        return AckPersistence()

    def change(self, policy: Body) -> None:
        """Change the policy, and have a watch show it."""
        self.kubernetes.add(POLICIES, policy)
        self.ctx.policies.put(policy)

    async def written(self) -> str:
        """The `observedAt` of the next write."""
        async with asyncio.timeout(5):
            write = await self.kubernetes.written()
        self.seen += 1
        observed_at: str = write.body["status"]["backlog"]["observedAt"]
        return observed_at


@pytest.fixture
def cluster(ctx: Context, policy: MakeBody, connection: dict[str, Any]) -> Cluster:
    return Cluster(ctx, connection, policy() | {"status": {"conditions": [READY]}})


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[None]:
    """Watch over the policy's topics, and move on by a second after the first look."""
    health = Health(cluster.ctx, lambda _: None)
    try:
        assert await cluster.written() == "2026-11-21T09:00:00Z"
        cluster.now += timedelta(seconds=1)
        yield
    finally:
        await health.stop()
    assert len(cluster.kubernetes.writes) == cluster.seen


def replay(phase: str, policy: str = "orders") -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": "r", "uid": "r", "resourceVersion": "1"}
    spec = {"policyRef": {"name": policy}}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


async def test_a_backlog_is_read_again_when_a_replay_of_the_policy_ends(
    cluster: Cluster,
) -> None:
    async with watching(cluster):
        cluster.ctx.replays.put(replay("Running"))
        cluster.ctx.replays.put(replay("Completed"))
        assert await cluster.written() == "2026-11-21T09:00:01Z"
        cluster.ctx.replays.put(replay("Completed"))
        await asyncio.sleep(INTERVAL_SECONDS / 2)


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"conditions": [READY | {"status": "False"}]}},
        {"status": {"conditions": []}},
    ],
)
async def test_a_backlog_is_read_again_when_the_policy_becomes_ready(
    cluster: Cluster, change: dict[str, Any]
) -> None:
    async with watching(cluster):
        ready = cluster.ctx.policies.get(ORDERS) or {}
        cluster.change({**ready, **change})
        cluster.change(ready)
        assert await cluster.written() == "2026-11-21T09:00:01Z"


async def test_a_backlog_is_read_again_when_a_reconcile_is_requested(
    cluster: Cluster,
) -> None:
    async with watching(cluster):
        ready = cluster.ctx.policies.get(ORDERS) or {}
        annotations = {"redrive.io/reconcile-requested-at": "now"}
        cluster.change({**ready, "metadata": {**ready["metadata"], "annotations": annotations}})
        assert await cluster.written() == "2026-11-21T09:00:01Z"


async def test_a_backlog_is_not_read_again_for_what_does_not_concern_it(
    cluster: Cluster,
) -> None:
    async with watching(cluster):
        cluster.ctx.replays.put(replay("Running"))
        cluster.ctx.replays.put(replay("Completed", policy="others"))
        cluster.change(cluster.ctx.policies.get(ORDERS) or {})
        await asyncio.sleep(INTERVAL_SECONDS / 2)


NOT_READY = READY | {"status": "False", "reason": "BrokerFailed"}


async def test_a_policy_that_is_not_ready_any_more_keeps_its_series_until_it_is_gone(
    cluster: Cluster, policy: MakeBody
) -> None:
    labels = {
        "policy": "orders",
        "policy_namespace": "shop",
        "source_topic": "persistent://shop/prod/orders",
        "subscription": "fulfilment",
        "role": "dead-letter",
    }

    def shown() -> float | None:
        return REGISTRY.get_sample_value("redrive_backlog_messages", labels)

    async def reaches(count: float) -> None:
        async with asyncio.timeout(2 * INTERVAL_SECONDS):
            while shown() != count:  # noqa: ASYNC110 - a gauge has no event
                await asyncio.sleep(1)

    health = Health(cluster.ctx, lambda _: None)
    await reaches(0)
    failed = policy() | {"status": {"conditions": [NOT_READY], "retryTopic": "x"}}
    cluster.change(failed | {"metadata": failed["metadata"] | {"resourceVersion": "100000"}})
    cluster.waits = 7
    await reaches(7)
    cluster.ctx.policies.drop(policy())
    assert shown() is None
    await health.stop()


MEBIBYTE = 2**20
QUOTA = {"destination_storage": {"limitSize": MEBIBYTE, "policy": "producer_exception"}}


async def shown(health: Health, cluster: Cluster, enqueued: list[Key]) -> list[str]:
    """Wait for two looks; return what they find, and forget for which policies they enqueued."""
    await asyncio.sleep(2 * INTERVAL_SECONDS + 1)
    body = cluster.ctx.policies.get(ORDERS) or {}
    found = health.warnings(body)
    assert (ORDERS in enqueued) == (set(found) != set(_conditions(body)))
    conditions = [READY, *({**READY, "type": w.reason, "message": w.message} for w in found)]
    cluster.change({**body, "status": {**body["status"], "conditions": conditions}})
    enqueued.clear()
    return [warning.reason for warning in found]


def _conditions(body: Body) -> list[StatusWarning]:
    found = body["status"]["conditions"]
    return [StatusWarning(c["type"], c["message"]) for c in found if c["type"] != "Ready"]


@pytest.mark.parametrize("by", ["policy", "topic", "namespace", "broker"])
async def test_a_dead_letter_topic_nears_its_quota_whoever_has_set_it(
    cluster: Cluster, policy: MakeBody, by: str
) -> None:
    if by == "policy":
        status = (cluster.ctx.policies.get(ORDERS) or {})["status"]
        cluster.change(policy(deadLetter={"backlogQuota": {"size": "1Mi"}}) | {"status": status})
    elif by == "broker":
        cluster.of_broker = MEBIBYTE
    else:
        # What a topic has goes before what its namespace has, and that before the broker's.
        cluster.of_broker = 1
        cluster.quotas["namespace"] = {"destination_storage": {"limitSize": 1}}
        cluster.quotas[by] = QUOTA
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    near = ["QuotaNearlyReached"]
    for percent, reasons in ((0, []), (79, []), (81, near), (71, near), (69, [])):
        size = percent * MEBIBYTE // 100
        cluster.found["redrive"] = dataclasses.replace(NOTHING_WAITS, bytes=size)
        assert await shown(health, cluster, enqueued) == reasons, percent
    await health.stop()


async def test_a_quota_that_is_lifted_or_can_not_be_read_warns_of_nothing(cluster: Cluster) -> None:
    cluster.of_broker = 1
    cluster.quotas["namespace"] = {"destination_storage": {"limitSize": -1}}
    cluster.found["redrive"] = dataclasses.replace(NOTHING_WAITS, bytes=MEBIBYTE)
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    assert await shown(health, cluster, enqueued) == []
    await health.stop()

    cluster.quotas["namespace"] = QUOTA
    cluster.refuses_quotas = True
    cluster.found["fulfilment"] = dataclasses.replace(
        NOTHING_WAITS, backlog=1, consumers=1, oldest=cluster.now - timedelta(days=1)
    )
    health = Health(cluster.ctx, enqueued.append)
    assert await shown(health, cluster, enqueued) == ["RetriesOverdue"]
    await health.stop()


async def test_retries_that_are_due_and_not_delivered_are_overdue_until_they_are_delivered(
    cluster: Cluster,
) -> None:
    due = dataclasses.replace(
        NOTHING_WAITS, backlog=1, consumers=1, oldest=cluster.now - timedelta(days=1)
    )
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    for found, reasons in (
        (NOTHING_WAITS, []),
        (dataclasses.replace(due, consumers=0), []),
        (due, ["RetriesOverdue"]),
        (dataclasses.replace(due, oldest=due.oldest and due.oldest + timedelta(hours=1)),
         ["RetriesOverdue"]),
        (dataclasses.replace(due, oldest=cluster.now), []),
        (due, ["RetriesOverdue"]),
        (dataclasses.replace(due, delivered=1), []),
    ):  # fmt: skip
        cluster.found["fulfilment"] = found
        assert await shown(health, cluster, enqueued) == reasons, found
    await health.stop()
