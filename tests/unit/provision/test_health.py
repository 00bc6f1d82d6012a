"""Health of topics: when they are read, how often, and the metrics of a policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.errors import AdminForbiddenError, AdminNotFoundError
from redrive.admin.http import Http
from redrive.admin.internal_stats import BrokerSettings
from redrive.admin.model import SubscriptionStats, TopicStats, TopicUsage
from redrive.admin.policies import BY_SIZE, LIMITS, Quotas
from redrive.api import Body
from redrive.api.conditions import StatusWarning
from redrive.api.connection import BrokerConnectionSpec
from redrive.kube.context import Context
from redrive.kube.resources import POLICIES, Key
from redrive.policy.model import BLOCKED_KEYS
from redrive.policy.naming import TopicName
from redrive.provision import health as provision_health
from redrive.provision.findings import blocked_keys_of
from redrive.provision.health import (
    INTERVAL_SECONDS,
    SETTINGS_SECONDS,
    Health,
    Reader,
)
from redrive.provision.poller import RateLimit
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.manifests import changed

MakeBody = Callable[..., dict[str, Any]]
READY = {"type": "Ready", "status": "True", "reason": "Provisioned", "message": ""}


@pytest.mark.usefixtures("virtual_time")
async def test_connections_to_one_broker_share_its_rate_limit(
    ctx: Context,
    policy: MakeBody,
    connection: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paces: list[RateLimit] = []
    all_begun = asyncio.Event()

    class Noting(Reader):
        """A reader that tells its pace."""

        def __init__(self, interval: float, limits: Sequence[RateLimit]) -> None:
            super().__init__(interval, limits)
            paces.append(limits[0])
            if len(paces) == 3:
                all_begun.set()

    monkeypatch.setattr(provision_health, "Reader", Noting)
    for name, url in (("a", "http://b:80"), ("b", "http://b:80/"), ("c", "http://other:80")):
        metadata = {"namespace": "shop", "name": name, "uid": name, "resourceVersion": "1"}
        ctx.connections.put({"metadata": metadata, "spec": changed(connection, adminURL=url)})
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
        self.published = {"": 0}
        self.blocked: dict[str, Any] = {}
        self.lost: set[str] = set()
        self.quotas: dict[str, dict[str, Any]] = {"topic": {}, "namespace": {}}
        self.refuses_quotas = self.terminates = False
        self.senders = 1
        self.statistics_reads: list[str] = []
        self.state_reads: list[str] = []
        self.limits = {"maxProducersPerTopic": 2}
        self.limit_reads: list[tuple[str, str]] = []
        self.unknown_limit, self.types = "", frozenset[str]()
        self.type_reads = set[str]()
        self.names = {"orders", "orders-fulfilment-RETRY", "orders-fulfilment-DLQ"}
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

    async def stats(self, topic: TopicName, *, producers: bool, **_: object) -> TopicStats:
        """Answer for every topic that as much waits there, and with a consumer's blocked key."""
        self.statistics_reads.append(topic.local)
        waits = dataclasses.replace(NOTHING_WAITS, backlog=self.waits)
        producer = {BLOCKED_KEYS: json.dumps([self.blocked])}
        stats = {"fulfilment": waits, "redrive": waits, **self.found}
        existing = {name: one for name, one in stats.items() if name not in self.lost}
        return TopicStats(existing, self.published, [producer] if producers else ())

    async def topic_policy(self, *_: object) -> dict[str, Any]:
        """Answer with the quotas that are set on the dead-letter topic."""
        if self.refuses_quotas:
            raise AdminForbiddenError("no", remedy="ask")
        return self.quotas["topic"]

    async def namespace(self, *_: object, **__: object) -> SimpleNamespace:
        """Answer with those of the namespace."""
        return SimpleNamespace(backlog_quotas=self.quotas["namespace"])

    async def limit(self, topic: TopicName, setting: str, **_: object) -> int:
        """Answer for every topic, from the limits of the test."""
        self.limit_reads.append((topic.local, setting))
        if setting == self.unknown_limit:
            raise AdminForbiddenError("no", remedy="ask")
        return self.limits.get(setting, 0)

    async def subscription_types(self, topic: TopicName) -> frozenset[str]:
        """Answer for every topic."""
        self.type_reads.add(topic.local)
        return self.types

    async def is_terminated(self, topic: TopicName, **_: object) -> bool:
        """Answer for the retry topic alone that it is terminated."""
        self.state_reads.append(topic.local)
        return self.terminates and topic.local.endswith("RETRY")

    async def usage(self, *_: object, **__: object) -> TopicUsage:
        """Answer for every topic that it has so many producers."""
        return TopicUsage({}, self.senders, 0)

    async def quotas_in_force(self, topic: TopicName, *, max_age: float) -> Quotas:
        """Combine those of all levels, as the client does."""
        return await Admin.quotas_in_force(cast("Admin", self), topic, max_age=max_age)

    async def read_settings(self) -> BrokerSettings:
        """Answer as an old broker does, with its quotas."""
        limit = self.of_broker
        quotas: Quotas = {} if limit is None else {BY_SIZE: {"limitSize": limit}}
        return BrokerSettings(quotas=quotas)

    def change(self, policy: Body) -> None:
        """Change the policy, and have a watch show it."""
        self.kubernetes.add(POLICIES, policy)
        self.ctx.policies.put(policy)

    async def written(self) -> str:
        """The `observedTime` of the next write."""
        async with asyncio.timeout(5):
            write = await self.kubernetes.written()
        self.seen += 1
        observed_time: str = write.body["status"]["backlog"]["observedTime"]
        return observed_time


@pytest.fixture
def cluster(ctx: Context, policy: MakeBody, connection: dict[str, Any]) -> Cluster:
    return Cluster(ctx, connection, policy() | {"status": {"conditions": [READY]}})


@asynccontextmanager
async def watching(cluster: Cluster) -> AsyncIterator[None]:
    """Poll the topics of the policy, and advance the clock by a second after the first poll."""
    health = Health(cluster.ctx, lambda _: None)
    try:
        assert await cluster.written() == "2026-11-21T09:00:00Z"
        cluster.now += timedelta(seconds=1)
        yield
    finally:
        await health.stop()
    assert len(cluster.kubernetes.writes) == cluster.seen


def replay_in_phase(phase: str, policy: str = "orders") -> dict[str, Any]:
    metadata = {"namespace": "shop", "name": "r", "uid": "r", "resourceVersion": "1"}
    spec = {"policyRef": {"name": policy}}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


@pytest.mark.usefixtures("virtual_time")
async def test_finished_replay_has_the_backlog_read_again(
    cluster: Cluster,
) -> None:
    async with watching(cluster):
        cluster.ctx.replays.put(replay_in_phase("Running"))
        cluster.ctx.replays.put(replay_in_phase("Completed"))
        assert await cluster.written() == "2026-11-21T09:00:01Z"
        cluster.ctx.replays.put(replay_in_phase("Completed"))
        await asyncio.sleep(INTERVAL_SECONDS / 2)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    "change",
    [
        {"status": {"conditions": [READY | {"status": "False"}]}},
        {"status": {"conditions": []}},
    ],
)
async def test_ready_policy_has_its_backlog_read_again(
    cluster: Cluster, change: dict[str, Any]
) -> None:
    async with watching(cluster):
        ready = cluster.ctx.policies.get(ORDERS) or {}
        cluster.change({**ready, **change})
        cluster.change(ready)
        assert await cluster.written() == "2026-11-21T09:00:01Z"


@pytest.mark.usefixtures("virtual_time")
async def test_requested_reconcile_has_the_backlog_read_again(
    cluster: Cluster,
) -> None:
    async with watching(cluster):
        ready = cluster.ctx.policies.get(ORDERS) or {}
        annotations = {"redrive.io/reconcile-requested-at": "now"}
        cluster.change({**ready, "metadata": {**ready["metadata"], "annotations": annotations}})
        assert await cluster.written() == "2026-11-21T09:00:01Z"


@pytest.mark.usefixtures("virtual_time")
async def test_unrelated_changes_do_not_read_the_backlog(
    cluster: Cluster,
) -> None:
    async with watching(cluster):
        cluster.ctx.replays.put(replay_in_phase("Running"))
        cluster.ctx.replays.put(replay_in_phase("Completed", policy="others"))
        cluster.change(cluster.ctx.policies.get(ORDERS) or {})
        await asyncio.sleep(INTERVAL_SECONDS / 2)


BLOCKED = {
    "keyHash": "00" * 6,
    "sinceTime": "2026-11-21T09:00:00Z",
    "messageID": "1:2:0",
    "cause": "E",
    "failures": 2,
    "behind": 3,
}


def test_invalid_blocked_keys_are_left_out() -> None:
    earlier = BLOCKED | {"keyHash": "11" * 6, "sinceTime": "2026-11-21T08:00:00+00:00"}
    invalid: list[dict[str, Any]] = [
        {"cause": "\x1b[2J"}, {"keyHash": "../"}, {"behind": -1}, {"messageID": "ü"},
    ]  # fmt: skip
    items = [BLOCKED, *(BLOCKED | {"keyHash": "22" * 6} | change for change in invalid), 7, earlier]
    producers = [{BLOCKED_KEYS: text} for text in (json.dumps(items), "{", '{"a": 1}')]
    shown = blocked_keys_of([*producers, {}])
    assert [key.key_hash for key in shown] == ["11" * 6, "00" * 6]
    many = [BLOCKED | {"keyHash": f"{number:012}"} for number in range(50)]
    assert len(blocked_keys_of([{BLOCKED_KEYS: json.dumps(many)}])) == 20


def test_blocked_keys_are_read_up_to_a_length() -> None:
    """Megabytes of them, which any role with `produce` can write, would block the operator."""
    older = [BLOCKED | {"keyHash": "11" * 6, "sinceTime": "2026-11-21T08:00:00+00:00"}]
    one, many = json.dumps([BLOCKED]), json.dumps(older * 1_100)
    assert 256 * 1_024 / 2 < len(many) < 256 * 1_024

    def hashes(*texts: str) -> list[str]:
        return [key.key_hash for key in blocked_keys_of([{BLOCKED_KEYS: text} for text in texts])]

    assert hashes(one, many) == ["11" * 6, "00" * 6]
    assert hashes(one * 2_000, one) == ["00" * 6]
    assert hashes(json.dumps([BLOCKED] * 1_100), many, one) == ["00" * 6]


def test_blocked_key_of_two_producers_is_shown_once() -> None:
    producers = [{BLOCKED_KEYS: json.dumps([BLOCKED | {"failures": n}])} for n in (2, 4, 3)]
    assert [key.failures for key in blocked_keys_of(producers)] == [4]


@pytest.mark.usefixtures("virtual_time")
async def test_changed_figures_of_blocked_keys_are_written_seldom(
    cluster: Cluster, policy: MakeBody
) -> None:
    ordered = policy(subscriptionType="KeyShared", ordering="PerKey")
    cluster.change(ordered | {"status": {"conditions": [READY]}})
    health = Health(cluster.ctx, lambda _: None)

    async def writes(key: dict[str, Any], after: timedelta) -> int:
        cluster.blocked, cluster.now = key, cluster.now + after
        before = len(cluster.kubernetes.writes)
        await asyncio.sleep(3 * INTERVAL_SECONDS)
        return len(cluster.kubernetes.writes) - before

    minute = timedelta(minutes=1)
    assert await writes(BLOCKED, minute) == 1
    assert await writes(BLOCKED | {"behind": 4, "failures": 3}, minute) == 0
    assert await writes(BLOCKED | {"behind": 5}, 10 * minute) == 1
    assert await writes(BLOCKED | {"messageID": "1:3:0"}, minute) == 1
    await health.stop()


NOT_READY = READY | {"status": "False", "reason": "BrokerFailed"}


@pytest.mark.usefixtures("virtual_time")
async def test_failed_policy_keeps_its_series_until_deletion(
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


@pytest.mark.usefixtures("virtual_time")
async def test_refused_sends_are_warned_about_until_they_end(
    cluster: Cluster, policy: MakeBody
) -> None:
    enqueued: list[Key] = []
    sequenced = policy(
        subscriptionType="KeyShared", ordering="PerKey", deadLetter={"sequenced": True}
    )
    cluster.change(sequenced | {"status": {"conditions": [READY]}})
    health = Health(cluster.ctx, enqueued.append)
    cluster.terminates = True
    assert await reasons_shown(health, cluster, enqueued) == ["SendsRefused"]
    assert set(cluster.state_reads) == {
        f"orders-fulfilment-{end}" for end in ("RETRY", "DLQ", "DLQ-SEQUENCES", "DLQ-LEDGER")
    }
    cluster.terminates = False
    assert await reasons_shown(health, cluster, enqueued) == []
    cluster.senders = 2
    assert await reasons_shown(health, cluster, enqueued) == ["SendsRefused"]
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("reads", ["replay", "inspection", ""])
async def test_types_of_dead_letters_are_read_for_readers(
    ctx: Context, policy: MakeBody, connection: dict[str, Any], reads: str
) -> None:
    user = connection.pop("replay")
    cluster = Cluster(
        ctx,
        connection | ({reads: user} if reads else {}),
        policy() | {"status": {"conditions": [READY]}},
    )
    health = Health(cluster.ctx, lambda _: None)
    await asyncio.sleep(2 * INTERVAL_SECONDS)
    assert ("orders-fulfilment-DLQ" in cluster.type_reads) == bool(reads)
    assert cluster.type_reads >= {"orders", "orders-fulfilment-RETRY"}
    await health.stop()


ELSEWHERE = {"elsewhere": 400}
"""Policies at other brokers, with which each poll reads two settings."""


def add_policies(cluster: Cluster, policy: MakeBody, numbers: Mapping[str, int]) -> None:
    """Add ready policies, so many for each connection; only those of `ELSEWHERE` are not polled."""
    connection = cluster.ctx.connections.get(Key("shop", "main")) or {}
    for name, number in numbers.items():
        if name not in ELSEWHERE:
            metadata = {**connection["metadata"], "name": name, "uid": name}
            cluster.ctx.connections.put({**connection, "metadata": metadata})
        for index in range(number):
            topic = f"persistent://shop/prod/{name}-{index}"
            body = policy(f"{name}-{index}", topic=topic, connectionRef={"name": name})
            cluster.change(body | {"status": {"conditions": [READY]}})


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("others", "state_reads", "limit_reads"),
    [
        ({}, 15, 15),
        ({"a": 8, "b": 8}, 15, 15),
        ({"a": 19, "b": 20}, 15, 4),  # each poll reads eight settings, of which three are states
        ({"a": 20, "b": 20}, 1, 1),
        (ELSEWHERE, 1, 1),
    ],
)
async def test_settings_are_read_often_by_few_policies(
    cluster: Cluster,
    policy: MakeBody,
    others: Mapping[str, int],
    state_reads: int,
    limit_reads: int,
) -> None:
    add_policies(cluster, policy, others)
    health = Health(cluster.ctx, lambda _: None)
    await asyncio.sleep(SETTINGS_SECONDS)
    cluster.state_reads.clear()
    cluster.limit_reads.clear()
    await asyncio.sleep(SETTINGS_SECONDS)
    assert cluster.state_reads.count("orders-fulfilment-RETRY") == state_reads
    reads = [cluster.limit_reads.count(("orders-fulfilment-RETRY", limit)) for limit in LIMITS]
    assert limit_reads - 1 <= min(reads) <= max(reads) == limit_reads
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_request_does_not_wait_for_settings_of_other_policies(
    cluster: Cluster, policy: MakeBody
) -> None:
    """A poll that reads twenty settings takes two seconds."""
    add_policies(cluster, policy, {"a": 13})
    health = Health(cluster.ctx, lambda _: None)
    await asyncio.sleep(INTERVAL_SECONDS + 15)
    first = cluster.ctx.policies.get(Key("shop", "a-0")) or {}
    cluster.statistics_reads.clear()
    health.request(first)
    await asyncio.sleep(6)
    assert "a-0-fulfilment-RETRY" in cluster.statistics_reads
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_many_policies_read_limits_every_15_minutes(
    cluster: Cluster, policy: MakeBody
) -> None:
    add_policies(cluster, policy, ELSEWHERE)
    enqueued: list[Key] = []
    cluster.found = {"fulfilment": dataclasses.replace(NOTHING_WAITS, consumers=3)}
    limits = [(topic, setting) for topic in sorted(cluster.names) for setting in LIMITS]
    health = Health(cluster.ctx, enqueued.append)
    assert await reasons_shown(health, cluster, enqueued) == []
    assert len(set(cluster.limit_reads)) == len(cluster.limit_reads) < len(limits) / 2
    await asyncio.sleep(SETTINGS_SECONDS)
    assert sorted(set(cluster.limit_reads)) == sorted(limits)
    limited = {"maxConsumersPerTopic": 3}
    for limits_now, types in ((limited, ()), ({}, ("Exclusive",)), (limited, ())):
        cluster.limits, cluster.types = limits_now, frozenset(types)
        await asyncio.sleep(SETTINGS_SECONDS)
        assert await reasons_shown(health, cluster, enqueued) == ["ConsumersRefused"]
    cluster.unknown_limit = "maxConsumersPerTopic"
    await asyncio.sleep(SETTINGS_SECONDS)
    assert await reasons_shown(health, cluster, enqueued) == ["ConsumersRefused"]
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("by", ["topic", "namespace"])
async def test_quota_by_age_of_any_level_warns(cluster: Cluster, by: str) -> None:
    cluster.quotas[by] = {"message_age": {"limitTime": 1, "policy": "producer_request_hold"}}
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    await asyncio.sleep(SETTINGS_SECONDS)
    assert await reasons_shown(health, cluster, enqueued) == ["SendsRefused"]
    cluster.quotas[by] = {"message_age": {"limitTime": -1, "policy": "producer_exception"}}
    await asyncio.sleep(2 * SETTINGS_SECONDS)
    assert await reasons_shown(health, cluster, enqueued) == []
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_limit_that_can_not_be_read_is_unknown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.limits, readable = {"maxMessageSize": 2**20}, cluster.limit

    async def limit(topic: TopicName, setting: str) -> int:
        if topic.local == "orders":
            raise AdminForbiddenError("no", remedy="ask")
        return await readable(topic, setting)

    monkeypatch.setattr(cluster, "limit", lambda topic, setting, **_: limit(topic, setting))
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    await asyncio.sleep(SETTINGS_SECONDS)
    assert await reasons_shown(health, cluster, enqueued) == []
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_all_limits_are_read_however_seldom_a_topic_is_polled(cluster: Cluster) -> None:
    limits = {(topic, setting) for topic in cluster.names for setting in LIMITS}
    health = Health(cluster.ctx, lambda _: None, interval=4_000)
    await asyncio.sleep(30 * 4_000)
    assert set(cluster.limit_reads) == limits
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("lost", "spec", "enqueues"),
    [
        pytest.param("fulfilment", {}, True, id="retries"),
        pytest.param("redrive", {}, True, id="dead letters"),
        pytest.param("redrive", {"deadLetter": {"mode": "Discard"}}, False, id="discards"),
        pytest.param("fulfilment", {"managementPolicy": "Observe"}, False, id="observes"),
        pytest.param("none", {}, False, id="complete"),
    ],
)
async def test_policy_without_its_subscription_is_enqueued(
    cluster: Cluster, policy: MakeBody, lost: str, spec: dict[str, Any], *, enqueues: bool
) -> None:
    cluster.change(policy(**spec) | {"status": {"conditions": [READY]}})
    cluster.lost = {lost}
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    await asyncio.sleep(INTERVAL_SECONDS / 2)
    await health.stop()
    assert enqueued == [ORDERS] * enqueues


MEBIBYTE = 2**20
QUOTA = {"destination_storage": {"limitSize": MEBIBYTE, "policy": "producer_exception"}}


async def reasons_shown(health: Health, cluster: Cluster, enqueued: list[Key]) -> list[str]:
    """Wait for two reads; return the reasons of their warnings, and clear *enqueued*."""
    await asyncio.sleep(2 * INTERVAL_SECONDS + 1)
    body = cluster.ctx.policies.get(ORDERS) or {}
    warnings = health.warnings(body)
    assert (ORDERS in enqueued) == (set(warnings) != set(_conditions(body)))
    conditions = [READY, *({**READY, "type": w.reason, "message": w.message} for w in warnings)]
    cluster.change({**body, "status": {**body["status"], "conditions": conditions}})
    enqueued.clear()
    return [warning.reason for warning in warnings]


def _conditions(body: Body) -> list[StatusWarning]:
    conditions = body["status"]["conditions"]
    return [StatusWarning(c["type"], c["message"]) for c in conditions if c["type"] != "Ready"]


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("by", ["policy", "topic", "namespace", "broker"])
async def test_quota_warning_applies_to_quotas_of_any_level(
    cluster: Cluster, policy: MakeBody, by: str
) -> None:
    if by == "policy":
        status = (cluster.ctx.policies.get(ORDERS) or {})["status"]
        cluster.change(policy(deadLetter={"backlogQuota": {"size": "1Mi"}}) | {"status": status})
    elif by == "broker":
        cluster.of_broker = MEBIBYTE
    else:
        # A quota of the topic precedes that of its namespace, and that the broker's.
        cluster.of_broker = 1
        cluster.quotas["namespace"] = {"destination_storage": {"limitSize": 1}}
        cluster.quotas[by] = QUOTA
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    near = ["QuotaNearlyReached"]
    for percent, reasons in ((0, []), (79, []), (81, near), (71, near), (69, [])):
        size = percent * MEBIBYTE // 100
        cluster.found["redrive"] = dataclasses.replace(NOTHING_WAITS, bytes=size)
        assert await reasons_shown(health, cluster, enqueued) == reasons, percent
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_lifted_or_unreadable_quota_warns_of_nothing(cluster: Cluster) -> None:
    cluster.of_broker = 1
    cluster.quotas["namespace"] = {"destination_storage": {"limitSize": -1}}
    cluster.found["redrive"] = dataclasses.replace(NOTHING_WAITS, bytes=MEBIBYTE)
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    assert await reasons_shown(health, cluster, enqueued) == []
    await health.stop()

    cluster.quotas["namespace"] = QUOTA
    cluster.refuses_quotas = True
    cluster.found["fulfilment"] = dataclasses.replace(
        NOTHING_WAITS, backlog=1, consumers=1, oldest=cluster.now - timedelta(days=1)
    )
    health = Health(cluster.ctx, enqueued.append)
    assert await reasons_shown(health, cluster, enqueued) == ["RetriesOverdue"]
    await health.stop()


@pytest.mark.usefixtures("virtual_time")
async def test_overdue_retries_are_warned_about_until_delivery(
    cluster: Cluster,
) -> None:
    due = dataclasses.replace(
        NOTHING_WAITS, backlog=1, consumers=1, oldest=cluster.now - timedelta(days=1)
    )
    enqueued: list[Key] = []
    health = Health(cluster.ctx, enqueued.append)
    for statistics, reasons in (
        (NOTHING_WAITS, []),
        (dataclasses.replace(due, consumers=0), []),
        (due, ["RetriesOverdue"]),
        (dataclasses.replace(due, oldest=due.oldest and due.oldest + timedelta(hours=1)),
         ["RetriesOverdue"]),
        (dataclasses.replace(due, oldest=cluster.now), []),
        (due, ["RetriesOverdue"]),
        (dataclasses.replace(due, delivered=1), []),
    ):  # fmt: skip
        cluster.found["fulfilment"] = statistics
        assert await reasons_shown(health, cluster, enqueued) == reasons, statistics
    await health.stop()


PLAIN, PARTS = TopicName("t", "n", "plain"), TopicName("t", "n", "parts")


@asynccontextmanager
async def serving_broker() -> AsyncIterator[tuple[Admin, list[str]]]:
    """A broker with one topic of each kind, and the calls it got."""
    calls = []

    async def answer(request: web.Request) -> web.Response:
        *_, topic, call = request.path.split("/")
        calls.append(f"{topic}/{call}")
        if calls[-1] not in {"plain/stats", "parts/partitioned-stats"}:
            return web.json_response({"reason": "not found"}, status=404)
        return web.json_response({"subscriptions": {}})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with Http.open() as http:
            yield (
                Admin(http, f"http://127.0.0.1:{runner.addresses[0][1]}", Access.bearer("x")),
                calls,
            )
    finally:
        await runner.cleanup()


async def test_topic_is_read_once_within_the_interval() -> None:
    async with serving_broker() as (admin, calls):
        reader = Reader(60.0, [RateLimit(0.001)])
        for _ in range(3):
            assert await reader.read(admin, PLAIN) == {}
        assert calls == ["plain/stats"]


async def test_fresh_read_is_not_cached() -> None:
    async with serving_broker() as (admin, calls):
        reader = Reader(60.0, [RateLimit(0.001)])
        for _ in range(2):
            await reader.read(admin, PLAIN, own=True)
        assert calls == ["plain/stats", "plain/stats"]


async def test_topic_kind_is_detected_once() -> None:
    async with serving_broker() as (admin, calls):
        reader = Reader(0.0, [RateLimit(0.001)])
        for _ in range(2):
            await reader.read(admin, PARTS)
        assert calls == ["parts/stats", "parts/partitioned-stats", "parts/partitioned-stats"]


async def test_missing_topic_raises_not_found() -> None:
    async with serving_broker() as (admin, _):
        with pytest.raises(AdminNotFoundError):
            await Reader(60.0, [RateLimit(0.001)]).read(admin, TopicName("t", "n", "absent"))


async def test_reader_keeps_to_its_rate_limit() -> None:
    async with serving_broker() as (admin, calls):
        reader, loop = Reader(60.0, [RateLimit(0.02)]), asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.gather(*(reader.read(admin, PLAIN.sibling(str(n))) for n in range(3)),
                             return_exceptions=True)  # fmt: skip
        assert len(calls) == 6
        assert loop.time() - begun >= 5 / 50


@pytest.mark.usefixtures("virtual_time")
async def test_dead_letters_are_counted_while_a_replay_drains(cluster: Cluster) -> None:
    def count() -> float | None:
        labels = {
            "policy": "orders",
            "policy_namespace": "shop",
            "source_topic": "persistent://shop/prod/orders",
            "subscription": "fulfilment",
        }
        return REGISTRY.get_sample_value("redrive_dead_letters_total", labels)

    cluster.waits, cluster.published = 9, {"": 9}
    health = Health(cluster.ctx, lambda _: None)
    for waiting, published, counted in ((9, 9, 0), (4, 11, 2), (0, 14, 5)):
        cluster.waits, cluster.published = waiting, {"": published}
        await asyncio.sleep(INTERVAL_SECONDS + 5)
        assert count() == counted
    await health.stop()
    assert count() is None
