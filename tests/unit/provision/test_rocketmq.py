"""RocketMQRetryPolicies: reconciles at a cluster of two masters in memory, and claims on groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.rocketmq import Master, QueueCounts, RocketMQSession
from redrive.api.conditions import find, is_ready, reason
from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.resources import PAUSE, ROCKETMQ_POLICIES, Key
from redrive.provision.finalize import CLEANUP_DEADLINE
from redrive.provision.groups import GroupClaims
from redrive.provision.request import ContestedError, digest_of
from tests.support.fake_rocketmq import NOW, RocketMQPolicy

KEY = Key("shop", "orders")
RETRY, DEAD, LEDGER = "%RETRY%fulfilment", "%DLQ%fulfilment", "redrive-ledger-fulfilment"
MASTERS = (Master("a", "a:1"), Master("b", "b:1"))


@dataclass
class Masters:
    """Groups and topics of two masters.

    Attributes:
        down: masters that do not answer.
        unlisted: masters that no name server lists.
    """

    groups: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    topics: dict[tuple[str, str], QueueCounts] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    stored: int = 0
    writes: int = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Masters]:
        yield self

    async def masters(self, recorded: Sequence[str] = ()) -> tuple[Master, ...]:
        listed = {m.name: m.address for m in MASTERS if m.name not in self.unlisted}
        return tuple(Master(n, listed.get(n, "")) for n in sorted({*listed, *recorded}))

    def _check(self, master: Master) -> None:
        if master.name in self.down or not master.address:
            raise BrokerUnreachableError("down", got=master.name, remedy="start it")

    async def retention(self, _: Master) -> timedelta:
        return timedelta(hours=72)

    async def topic(self, master: Master, name: str) -> QueueCounts | None:
        self._check(master)
        return self.topics.get((master.name, name))

    async def group(self, master: Master, name: str) -> dict[str, Any] | None:
        return self.groups.get((master.name, name))

    async def count(self, *_: object) -> int:
        return self.stored

    async def messages(self, master: Master, topic: str) -> int:
        return await RocketMQSession.messages(cast("RocketMQSession", self), master, topic)

    async def has_consumers(self, master: Master, _: str) -> bool:
        self._check(master)
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


async def test_unlisted_master_is_as_one_that_is_down() -> None:
    """The policy was provisioned there; it may also have been removed permanently."""
    shop = Shop()
    await shop.reconcile()
    shop.cluster.unlisted = {"b"}
    del shop.cluster.topics["a", DEAD]
    assert await shop.reconcile(failures=1) is Requeue.BACKOFF
    assert ("a", DEAD) in shop.cluster.topics
    assert reason(shop.body) == "BrokerUnreachable"
    ready = find(shop.body, "Ready")
    assert ready is not None
    assert "got 'b'" in ready.message
    assert shop.body["status"]["masters"] == ["a", "b"]
    fields = {"masters": ["a"]}
    shop.ctx.rocketmq_policies.put(
        await shop.kubernetes.patch_status(ROCKETMQ_POLICIES, KEY, fields)
    )
    await shop.reconcile()
    assert is_ready(shop.body)


async def test_masters_are_recorded_before_their_objects_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shop = Shop()

    async def crash(*_: object) -> None:
        assert shop.body["status"]["masters"] == ["a", "b"]
        raise BrokerUnreachableError("down", remedy="start it")

    monkeypatch.setattr(shop.cluster, "put_group", crash)
    assert await shop.reconcile() is Requeue.BACKOFF
    assert reason(shop.body) == "BrokerUnreachable"


@pytest.mark.parametrize("field", ["down", "unlisted"])
async def test_deletion_waits_for_a_missing_master(field: str) -> None:
    shop = Shop(deletionPolicy="Delete")
    await shop.reconcile()
    setattr(shop.cluster, field, {"b"})
    body = shop.body
    body["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "9999"}
    shop.ctx.rocketmq_policies.put(body)
    await shop.reconcile()
    assert shop.body is not None
    assert ("b", "fulfilment") in shop.cluster.groups
    shop.ctx.clock = lambda: NOW + CLEANUP_DEADLINE
    await shop.reconcile()
    assert shop.body is None
    *_, (_, event, text) = shop.kubernetes.announced()
    assert event == "CleanupAbandoned"
    assert "got 'b'" in text


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


@pytest.mark.parametrize("is_provisioned", [False, True])
async def test_record_of_another_cluster_deletes_nothing(*, is_provisioned: bool) -> None:
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
    if is_provisioned:  # there, where the group and the topics exist
        shop.cluster.unlisted = {"b"}  # which the other cluster does not have
        await shop.reconcile()
        assert is_ready(shop.body)
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


LENT, OWN = Key("platform", "lent"), Key("thief", "own")
SERVERS = {LENT: ("mq:9876",), OWN: ("fake:9876",)}


def connection(key: Key, *servers: str, cluster: str | None = None) -> dict[str, Any]:
    cluster_fields = {} if cluster is None else {"cluster": cluster}
    return {
        "metadata": {**key._asdict(), "uid": str(key), "resourceVersion": "1", "generation": 1},
        "spec": {
            "rocketmq": {
                "nameServers": list(servers),
                "authentication": {"type": "None"},
                **cluster_fields,
            }
        },
    }


def policy(key: Key, through: Key = LENT, *, age: int = 0, **status: object) -> dict[str, Any]:
    """A policy of group `g`, of an age in hours."""
    return {
        "metadata": {
            **key._asdict(), "uid": f"uid-{key}", "resourceVersion": "1", "generation": 1,
            "creationTimestamp": f"2026-01-01T{20 - age:02}:00:00Z",
        },
        "spec": {"connectionRef": through._asdict(), "topic": "t", "group": "g"},
        "status": status,
    }  # fmt: skip


def held(key: Key, through: Key = LENT, at: Key | None = None, age: int = 0) -> dict[str, Any]:
    """A policy that was provisioned through the connection *at*, by default its own."""
    at = at or through
    broker = digest_of(f"{','.join(SERVERS[at])}/")
    status = {"retryTopic": "%RETRY%g", "connection": str(at), "internal": {"brokerDigest": broker}}
    return policy(key, through, age=age, **status)


def claims(*policies: dict[str, Any], **others: Key) -> GroupClaims:
    bodies = [connection(key, *servers) for key, servers in SERVERS.items()]
    bodies += [connection(key, "mq:9876", "mq-2:9876") for key in others.values()]
    ctx: Any = SimpleNamespace(rocketmq_policies=Cache(policies), connections=Cache(bodies))
    return GroupClaims(ctx)


NEW = policy(Key("shop", "orders"))


def test_provisioned_policy_of_another_namespace_has_priority() -> None:
    with pytest.raises(ContestedError) as contested:
        claims(NEW, held(Key("other", "x"))).admit(NEW)
    assert "a RocketMQRetryPolicy of another namespace" in str(contested.value)
    assert contested.value.shown_rival == "another namespace"


@pytest.mark.parametrize(
    "rival",
    [
        policy(Key("thief", "x"), age=9),
        held(Key("thief", "x"), OWN, age=9),
        held(Key("thief", "x"), LENT, OWN, age=9),
    ],
    ids=["new", "of another cluster", "provisioned elsewhere"],
)
def test_unproven_claim_on_a_group_does_not_block(rival: dict[str, Any]) -> None:
    index = claims(NEW, rival)
    index.admit(NEW)
    assert not index.holders(NEW)


def test_connection_with_changed_servers_proves_nothing() -> None:
    rival = held(Key("thief", "x"), OWN, age=9)
    index = claims(NEW, rival)
    index._ctx.connections.put(connection(OWN, *SERVERS[LENT]))  # noqa: SLF001
    index.admit(NEW)


def test_older_policy_of_the_namespace_has_priority() -> None:
    older = policy(Key("shop", "older"), age=1)
    index = claims(NEW, older)
    index.admit(older)
    with pytest.raises(ContestedError, match="RocketMQRetryPolicy shop/older"):
        index.admit(NEW)


def test_oldest_blocked_policy_succeeds_the_holder() -> None:
    """All of them are enqueued when the policy that blocked them is gone."""
    stalled = {"type": "Stalled", "status": "True", "reason": "ResourceConflict"}
    status: dict[str, Any] = {"blockedBy": "shop/gone", "conditions": [stalled]}
    old, young = (policy(Key("shop", f"of-{age}"), age=age, **status) for age in (5, 1))
    index = claims(old, young)
    index.admit(old)
    with pytest.raises(ContestedError, match="RocketMQRetryPolicy shop/of-5"):
        index.admit(young)
    assert not index.affected(old, None)


def test_connections_of_one_owner_share_a_cluster() -> None:
    second = Key("platform", "second")
    rival = held(Key("other", "x"))
    rival["spec"]["connectionRef"] = second._asdict()
    broker = digest_of("mq-2:9876,mq:9876/")
    rival["status"] |= {"connection": str(second), "internal": {"brokerDigest": broker}}
    with pytest.raises(ContestedError):
        claims(NEW, rival, second=second).admit(NEW)


def test_only_blocked_policies_are_affected_by_a_lost_claim() -> None:
    first, crowd = held(Key("shop", "first")), [policy(Key("shop", f"p{n}")) for n in range(9)]
    blocked = policy(Key("shop", "blocked"), blockedBy="shop/first")
    index = claims(first, blocked, *crowd)
    assert index.affected(first, None) == (blocked,)
    assert not index.affected(None, crowd[0])
    assert index.affected(None, held(Key("shop", "second"))) == (first,)
