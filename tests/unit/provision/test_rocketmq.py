"""Reconciles of a RocketMQRetryPolicy at a cluster of two masters in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest

from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.rocketmq import Master, QueueCounts, RocketMQSession
from redrive.api.conditions import find, reason
from redrive.errors import Requeue
from redrive.kube.resources import PAUSE, Key
from tests.support.rocketmq_policy import RocketMQPolicy

KEY = Key("shop", "orders")
RETRY, DEAD, LEDGER = "%RETRY%fulfilment", "%DLQ%fulfilment", "redrive-ledger-fulfilment"
MASTERS = (Master("a", "a:1"), Master("b", "b:1"))


@dataclass
class Masters:
    """Groups and topics of two masters; calls to a master in `down` fail."""

    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    topics: dict[tuple[str, str], QueueCounts] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    stored: int = 0
    writes: int = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Masters]:
        yield self

    async def masters(self) -> tuple[Master, ...]:
        return MASTERS

    async def retention(self, _: Master) -> timedelta:
        return timedelta(hours=72)

    async def topic(self, master: Master, name: str) -> QueueCounts | None:
        if master.name in self.down:
            raise BrokerUnreachableError("down", remedy="start it")
        return self.topics.get((master.name, name))

    async def group(self, master: Master, name: str) -> dict[str, Any] | None:
        return self.groups.get((master.name, name))

    async def count(self, *_: object) -> int:
        return self.stored

    async def messages(self, master: Master, topic: str) -> int:
        return await RocketMQSession.messages(cast("RocketMQSession", self), master, topic)

    async def has_consumers(self, *_: object) -> bool:
        return False

    async def put_group(self, master: Master, settings: dict[str, Any]) -> None:
        self.writes += 1
        self.groups[master.name, settings["groupName"]] = {"consumeEnable": True} | settings

    async def put_topic(self, master: Master, name: str, queues: int) -> None:
        self.writes += 1
        self.topics[master.name, name] = QueueCounts(queues, queues, 6)

    async def delete_group(self, master: Master, name: str) -> None:
        self.groups.pop((master.name, name), None)

    async def delete_topic(self, master: Master, name: str) -> None:
        self.topics.pop((master.name, name), None)


class Shop(RocketMQPolicy):
    """A policy with its operator, and the cluster."""

    def __init__(self, **spec: object) -> None:
        self.cluster = Masters(topics={(m.name, "orders"): QueueCounts(4, 4, 6) for m in MASTERS})
        super().__init__(self.cluster, **spec)


async def test_group_and_topics_are_made_at_each_master() -> None:
    shop = Shop(maxRetries=3, ladder=["10s", "1m"])
    assert await shop.reconcile() is Requeue.ON_CHANGE
    assert reason(shop.body) == "Provisioned"
    assert shop.body["status"]["masters"] == ["a", "b"]
    assert shop.body["status"]["warnings"] == ["DeadLettersExpire", "NoOwnershipMark"]
    for master in ("a", "b"):
        group = shop.cluster.groups[master, "fulfilment"]
        assert group["retryMaxTimes"] == 3
        assert group["groupRetryPolicy"]["customizedRetryPolicy"] == {"next": [10_000, 60_000]}
        assert {(master, RETRY), (master, DEAD)} <= shop.cluster.topics.keys()
    writes = shop.cluster.writes
    assert await shop.reconcile() is Requeue.ON_CHANGE
    assert shop.cluster.writes == writes


async def test_drift_is_repaired_and_other_settings_are_kept() -> None:
    shop = Shop()
    await shop.reconcile()
    shop.cluster.groups["b", "fulfilment"] |= {"retryMaxTimes": 1, "consumeEnable": False}
    del shop.cluster.topics["a", DEAD]
    await shop.reconcile()
    group = shop.cluster.groups["b", "fulfilment"]
    assert (group["retryMaxTimes"], group["consumeEnable"]) == (16, False)
    assert ("a", DEAD) in shop.cluster.topics
    assert ("Normal", "Repaired") in [event[:2] for event in shop.kubernetes.announced()]


async def test_master_that_is_down_does_not_stop_the_others() -> None:
    shop = Shop()
    shop.cluster.down = {"a"}
    assert await shop.reconcile() is Requeue.BACKOFF
    assert reason(shop.body) == "BrokerUnreachable"
    assert shop.cluster.groups.keys() == {("b", "fulfilment")}
    shop.cluster.down = set()
    assert await shop.reconcile() is Requeue.ON_CHANGE
    assert shop.cluster.groups.keys() == {("a", "fulfilment"), ("b", "fulfilment")}


async def test_observing_policy_writes_nothing() -> None:
    shop = Shop(managementPolicy="Observe")
    await shop.reconcile()
    assert shop.cluster.writes == 0
    assert len(shop.body["status"]["plannedChanges"]) == 6


async def test_drift_of_a_paused_group_is_repaired_after_it() -> None:
    shop = Shop()
    await shop.reconcile()
    policy, writes = shop.ctx.rocketmq_policies.get(KEY), shop.cluster.writes
    policy["metadata"]["annotations"] = {PAUSE: "true"}
    del shop.cluster.topics["a", DEAD]
    await shop.reconcile()
    assert shop.cluster.writes == writes
    assert find(shop.body, "Paused") is not None
    shop.ctx.rocketmq_policies.get(KEY)["metadata"]["annotations"] = {}
    await shop.reconcile()
    assert ("a", DEAD) in shop.cluster.topics
    assert find(shop.body, "Paused") is None


@pytest.mark.parametrize("messages", [0, 7])
async def test_deletion_keeps_topics_with_messages(messages: int) -> None:
    shop = Shop(deletionPolicy="Delete")
    shop.has_replays = True
    await shop.reconcile()
    assert shop.cluster.topics["b", LEDGER] == QueueCounts(1, 1, 6)
    shop.cluster.stored = messages
    body = shop.body
    body["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "9999"}
    shop.ctx.rocketmq_policies.put(body)
    await shop.reconcile()
    assert shop.body is None
    assert shop.cluster.groups == {}
    kept = {topic for _, topic in shop.cluster.topics}
    assert kept == {"orders"} | ({RETRY, DEAD, LEDGER} if messages else set())
    assert ("a", "orders") in shop.cluster.topics


async def test_record_of_another_cluster_deletes_nothing() -> None:
    shop = Shop(deletionPolicy="Delete")
    spec = {"rocketmq": {"nameServers": ["fake:9876"], "authentication": {"type": "None"}}}
    metadata = {"namespace": "shop", "name": "main", "uid": "c", "generation": 1}
    connection = {"metadata": {**metadata, "resourceVersion": "1"}, "spec": spec}
    shop.ctx.connections.put(connection)
    await shop.reconcile()
    other = {"rocketmq": {**spec["rocketmq"], "nameServers": ["mq:9876"]}}
    shop.ctx.connections.put(
        {"metadata": {**metadata, "generation": 2, "resourceVersion": "2"}, "spec": other}
    )
    body = shop.body
    body["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "9999"}
    shop.ctx.rocketmq_policies.put(body)
    await shop.reconcile()
    assert shop.body is None
    assert ("a", "fulfilment") in shop.cluster.groups


async def test_policy_beyond_the_limit_creates_nothing() -> None:
    shop = Shop()
    for number in range(100):
        body = {**shop.body, "status": {"retryTopic": "x"}}
        names = {"name": f"p{number}", "uid": f"u{number}"}
        shop.ctx.rocketmq_policies.put({**body, "metadata": {**body["metadata"], **names}})
    await shop.reconcile()
    assert reason(shop.body) == "LimitExceeded"
    assert shop.cluster.writes == 0


async def test_remoting_clients_are_warned_about() -> None:
    shop = Shop(clients="Remoting", maxRetries=3)
    await shop.reconcile()
    assert shop.body["status"]["warnings"][0] == "NotEnforced"
    assert "retryMaxTimes" not in shop.cluster.groups["a", "fulfilment"]
