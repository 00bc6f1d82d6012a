"""Behaviour of a broker's admin API that redrive relies on: the real one and the fake agree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.errors import (
    AdminConflictError,
    AdminError,
    AdminForbiddenError,
    AdminNotFoundError,
    AuthenticationFailedError,
    BrokerRefusedError,
)
from redrive.admin.http import Call, CallSlots, Endpoint
from redrive.admin.internal_stats import REQUIRES_ENCRYPTION
from redrive.admin.model import (
    PULSAR_RELEASES,
    Grant,
    RightsChange,
    Schema,
    SubscriptionStats,
    TopicSubscriptions,
)
from redrive.admin.policies import Deduplicates, Holds, LimitsBacklog, TopicPolicy, Ttl
from redrive.policy.naming import TopicName
from tests.support.fake_admin import SUPERUSER

World = Any  # of the conftest

CONSUME, BOTH = frozenset({"consume"}), frozenset({"consume", "produce"})
NOTHING: frozenset[str] = frozenset()
STAYS = Holds("inactiveTopicPolicies", (("deleteWhileInactive", False),))


def topic(world: World, name: str) -> TopicName:
    return TopicName(world.tenant, "prod", name)


async def make(world: World, name: str, partitions: int = 0) -> TopicName:
    made = topic(world, name)
    await world.admin.create_topic(made, partitions, {"owner": "me"})
    return made


async def set_grants(admin: Admin, *grants: Grant) -> None:
    """Give each role the actions of its grant, and no others."""
    changes = [
        RightsChange(grant.topic, grant.role, grant.actions, BOTH - grant.actions)
        for grant in grants
    ]
    with admin.granting(grants[0].topic.namespace_name) as grant:
        await grant(changes)


async def test_any_token_is_good_for_the_clusters_and_no_other_is(world: World) -> None:
    assert await world.client("outsider").clusters() == {"standalone"}
    for token in ("x", "not.a.token"):
        with pytest.raises(AuthenticationFailedError):
            await world.client_with(token).clusters()


async def test_any_token_is_good_for_the_version(world: World) -> None:
    release = (await world.client("outsider").version())[:2]
    assert PULSAR_RELEASES.oldest <= release <= PULSAR_RELEASES.newest
    with pytest.raises(AuthenticationFailedError):
        await world.client_with("x").version()


async def test_existence_of_tenants_and_namespaces_is_read(world: World) -> None:
    assert await world.admin.tenant_exists(world.tenant)
    assert not await world.admin.tenant_exists("absent")
    empty = await world.admin.namespace(world.namespace)
    assert (empty.unpartitioned, empty.partitioned, empty.permissions) == (set(), set(), {})
    for namespace in (f"{world.tenant}/absent", "absent/prod"):
        with pytest.raises(AdminNotFoundError):
            await world.admin.namespace(namespace)


async def test_missing_tenant_right_is_named(world: World) -> None:
    alone, parts = await make(world, "a"), await make(world, "parts", 1)
    outsider = world.client("outsider")
    asks: list[Callable[[], Awaitable[object]]] = [
        lambda: outsider.tenant_exists(world.tenant),
        lambda: outsider.namespace(world.namespace),
        lambda: outsider.create_topic(topic(world, "b"), 0, {}),
        lambda: outsider.create_topic(topic(world, "b"), 2, {}),
        lambda: outsider.subscriptions(alone, partitioned=False),
        lambda: outsider.subscriptions(parts, partitioned=True),
        lambda: outsider.restore_partitions(parts),
        lambda: outsider.unload(alone),
        lambda: outsider.create_subscription(alone, "s"),
        lambda: outsider.set_properties(alone, {"a": "b"}),
        lambda: outsider.topic_policy(alone, Deduplicates()),
        lambda: set_grants(outsider, Grant(alone, "r", CONSUME)),
        lambda: set_grants(outsider, Grant(alone, "r", NOTHING)),
    ]
    for ask in asks:
        with pytest.raises(AdminForbiddenError):
            await ask()
    state = await world.admin.namespace(world.namespace)
    topics = {str(alone), str(parts.partition(0))}
    assert (state.unpartitioned, state.permissions) == (topics, {})


@pytest.mark.parametrize("partitions", [0, 3])
async def test_topic_is_created_once_and_properties_are_added(
    world: World, partitions: int
) -> None:
    made = await make(world, "größe 100%+#".replace(" ", ""), partitions)
    for other in (0, 2):
        with pytest.raises(AdminConflictError):
            await world.admin.create_topic(made, other, {})
    await world.admin.set_properties(made, {"more": "of it"})
    metadata = await world.admin.metadata(made, partitioned=bool(partitions))
    assert metadata.partitions == await world.admin.partitions(made) == partitions
    unasked = await world.admin.metadata(made, partitioned=False)
    assert metadata.properties == unasked.properties == {"owner": "me", "more": "of it"}
    state = await world.admin.namespace(world.namespace)
    assert state.partitioned == ({str(made)} if partitions else set())
    parts = {f"{made}-partition-{index}" for index in range(partitions)}
    assert state.unpartitioned == (parts or {str(made)})


async def test_partitions_are_added_and_never_taken_away(world: World) -> None:
    parts, plain = await make(world, "parts", 2), await make(world, "plain")
    await world.admin.create_subscription(parts, "s")
    await world.admin.add_partitions(parts, 3)
    await world.admin.add_partitions(parts, 3)
    assert await world.admin.partitions(parts) == 3
    assert await subscriptions(world, parts, 3) == ({"s"}, {"s"}, {"s"})
    with pytest.raises(BrokerRefusedError):
        await world.admin.add_partitions(parts, 2)
    for no_such in (plain, topic(world, "absent")):
        with pytest.raises(AdminConflictError):
            await world.admin.add_partitions(no_such, 3)


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_subscription_is_made_once(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    assert not any(await subscriptions(world, made, partitions))
    for name in ("s", "a+b%41"):
        await world.admin.create_subscription(made, name)
        with pytest.raises(AdminConflictError):
            await world.admin.create_subscription(made, name)
    subscribed = await subscriptions(world, made, partitions)
    assert subscribed == ({"s", "a+b%41"},) * max(partitions, 1)


async def subscriptions(
    world: World, made: TopicName, partitions: int
) -> tuple[AbstractSet[str] | None, ...]:
    """The names of a topic's subscriptions, by partition."""
    subscribed: TopicSubscriptions = await world.admin.subscriptions(
        made, partitioned=bool(partitions)
    )
    assert len(subscribed.parts) == max(partitions, 1)
    return subscribed.parts


async def test_a_subscription_that_one_partition_lacks_is_made_there(world: World) -> None:
    made = await make(world, "größe-100%+#", 3)
    await world.admin.create_subscription(made, "s")
    await world.admin.delete_subscription(made.partition(1), "s")
    assert await subscriptions(world, made, 3) == ({"s"}, set(), {"s"})
    await world.admin.create_subscription(made, "s")
    assert await subscriptions(world, made, 3) == ({"s"}, {"s"}, {"s"})
    with pytest.raises(AdminConflictError):
        await world.admin.create_subscription(made, "s")


async def test_subscription_of_some_partitions_is_deleted(
    world: World,
) -> None:
    made = await make(world, "a", 2)
    await world.admin.create_subscription(made, "s")
    await world.admin.delete_subscription(made.partition(0), "s")
    with pytest.raises(AdminNotFoundError):
        await world.admin.delete_subscription(made, "s")
    assert await subscriptions(world, made, 2) == (set(), set())


async def test_deleted_partitions_are_reported_and_recreated(world: World) -> None:
    made = await make(world, "größe-100%+#", 3)
    await set_grants(world.admin, Grant(made, "r", CONSUME))
    await world.admin.create_subscription(made, "s")
    await world.admin.delete_topic(made.partition(1), partitioned=False)
    assert await subscriptions(world, made, 3) == ({"s"}, None, {"s"})
    state = await world.admin.namespace(world.namespace)
    assert state.partitions(made) == 1
    assert state.permissions == {str(made): {"r": CONSUME}}
    metadata = await world.admin.metadata(made, partitioned=True)
    assert (metadata.partitions, metadata.properties) == (3, {"owner": "me"})
    usage = await world.admin.usage(made, partitioned=True, subscription="s")
    assert set(usage.subscriptions) == {"s"}
    await world.admin.restore_partitions(made)
    await world.admin.restore_partitions(made)
    assert await subscriptions(world, made, 3) == ({"s"}, set(), {"s"})
    for part in range(3):
        await world.admin.delete_topic(made.partition(part), partitioned=False)
    assert await subscriptions(world, made, 3) == (None, None, None)
    usage = await world.admin.usage(made, partitioned=True, subscription="s")
    assert (usage.subscriptions, usage.producers, usage.uncounted) == ({}, 0, 0)
    await world.admin.create_subscription(made, "s")  # makes the partitions too
    assert await subscriptions(world, made, 3) == ({"s"}, {"s"}, {"s"})


@pytest.mark.parametrize("partitions", [0, 2])
async def test_unloaded_topic_is_there_again(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    await world.admin.create_subscription(made, "s")
    await world.admin.unload(made)
    await world.admin.unload(made)
    usage = await world.admin.usage(made, partitioned=bool(partitions), subscription="s")
    assert set(usage.subscriptions) == {"s"}
    with pytest.raises(AdminNotFoundError):
        await world.admin.unload(topic(world, "absent"))


async def test_only_partitioned_topics_get_missing_partitions(world: World) -> None:
    for no_such in (await make(world, "plain"), topic(world, "absent")):
        with pytest.raises(AdminNotFoundError):
            await world.admin.restore_partitions(no_such)


READS: dict[str, Callable[[Admin, TopicName], Awaitable[object]]] = {
    "partitions": lambda admin, absent: admin.partitions(absent),
    "metadata": lambda admin, absent: admin.metadata(absent, partitioned=False),
    "subscriptions": lambda admin, absent: admin.subscriptions(absent, partitioned=False),
    "subscriptions of partitions": lambda admin, absent: admin.subscriptions(
        absent, partitioned=True
    ),
    "policy": lambda admin, absent: admin.topic_policy(absent, Deduplicates()),
    "deduplication": lambda admin, absent: admin.deduplicates(absent),
    "stats": lambda admin, absent: admin.stats(absent, partitioned=False),
    "use": lambda admin, absent: admin.usage(absent, partitioned=False, subscription="s"),
    "partitioned use": lambda admin, absent: admin.usage(
        absent, partitioned=True, subscription="s"
    ),
    "partitioned stats": lambda admin, absent: admin.stats(absent, partitioned=True),
}


@pytest.mark.parametrize("read", READS)
async def test_missing_objects_are_not_found(world: World, read: str) -> None:
    with pytest.raises(AdminNotFoundError, match="absent"):
        await READS[read](world.admin, topic(world, "absent"))


async def test_missing_topic_gets_nothing(world: World) -> None:
    absent = topic(world, "absent")
    with pytest.raises(AdminError, match="412"):
        await world.admin.create_subscription(absent, "s")
    with pytest.raises(AdminNotFoundError):
        await set_grants(world.admin, Grant(absent, "r", CONSUME))
    with pytest.raises(AdminNotFoundError):
        await world.admin.create_topic(TopicName(world.tenant, "absent", "a"), 0, {})
    assert (await world.admin.namespace(world.namespace)).unpartitioned == set()


@pytest.mark.parametrize("partitions", [0, 2])
async def test_statistics_suit_the_kind_of_topic(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    await world.admin.create_subscription(made, "s")
    for oldest in (False, True):
        stats = await world.admin.stats(made, partitioned=bool(partitions), oldest=oldest)
        none = SubscriptionStats(
            0, 0, 0, durable=True, ack_holes=0, oldest=None, partitions=max(partitions, 1)
        )
        assert stats == {"s": none}
    with pytest.raises(AdminNotFoundError):
        await world.admin.stats(made, partitioned=not partitions)


@pytest.mark.parametrize("partitions", [0, 2])
async def test_topic_use_is_counted_and_subscription_deleted(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    for name in ("s", "a+b%41"):
        await world.admin.create_subscription(made, name)
    usage = await world.admin.usage(made, partitioned=bool(partitions), subscription="s")
    assert set(usage.subscriptions) == {"s", "a+b%41"}
    assert (usage.producers, usage.uncounted) == (0, 0)
    await world.admin.delete_subscription(made, "a+b%41")
    subscribed = await subscriptions(world, made, partitions)
    assert subscribed == ({"s"},) * max(partitions, 1)
    with pytest.raises(AdminNotFoundError):
        await world.admin.delete_subscription(made, "a+b%41")


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_schema_is_read_as_it_was_given(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    for empty in (made, topic(world, "absent")):
        assert await world.admin.schema(empty) is None
        assert await world.admin.schemas(empty) == ()
    record = '{"type":"record","name":"R","fields":[{"name":"x","type":"int"}]}'
    schema = Schema("JSON", record, {"a": "b"})
    for _ in range(2):
        await world.admin.put_schema(made, schema)
        assert await world.admin.schema(made) == schema
    with pytest.raises(AdminConflictError):
        await world.admin.put_schema(made, Schema("STRING", "", {}))
    assert await world.admin.schema(made) == schema
    optional = '{"name":"y","type":["null","int"],"default":null}'
    later = Schema("JSON", record.replace("]}", f",{optional}]}}"), {})
    for version in (later, schema):  # an older one that is set again is no version of its own
        await world.admin.put_schema(made, version)
    assert await world.admin.schemas(made) == (schema, later)
    assert await world.admin.schema(made) == later


@pytest.mark.parametrize("partitions", [0, 2])
async def test_deduplication_in_force_is_read(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    assert not await world.admin.deduplicates(made)
    [write] = Deduplicates().writes(None)
    await world.admin.set_topic_policy(made, Deduplicates(), write)
    await settled(world.admin, made, Deduplicates(), None)
    assert await world.admin.deduplicates(made)


async def test_a_topic_of_plain_bytes_has_no_schema(world: World) -> None:
    made = await make(world, "a")
    await world.admin.put_schema(made, Schema("NONE", "", {}))
    assert await world.admin.schema(made) is None
    assert await world.admin.schemas(made) == ()


async def test_settings_are_those_of_the_configuration(world: World) -> None:
    settings = await world.client(SUPERUSER).read_settings()
    types = {"Exclusive", "Failover", "Key_Shared", "Shared"}
    assert (settings.subscription_types, settings.requires_encryption) == (types, False)
    call = Call("read the configuration", "GET", "brokers/configuration/runtime")
    access = Access.bearer(world.tokens.token(SUPERUSER))
    written = await world.http.send(call, Endpoint(world.url, access, CallSlots(1)))
    assert written[REQUIRES_ENCRYPTION] == "false"


async def test_settings_are_unknown_to_other_roles(world: World) -> None:
    settings = await world.admin.read_settings()
    assert (settings.subscription_types, settings.requires_encryption) == (NOTHING, False)


async def test_a_grant_replaces_and_an_empty_one_takes_away(world: World) -> None:
    a, b = await make(world, "a"), await make(world, "b", 2)
    await set_grants(world.admin, Grant(a, "r", BOTH), Grant(b, "r", CONSUME))
    await set_grants(world.admin, Grant(a, "r", CONSUME), Grant(a, "other", BOTH))
    permissions = (await world.admin.namespace(world.namespace)).permissions
    assert permissions == {str(a): {"r": CONSUME, "other": BOTH}, str(b): {"r": CONSUME}}
    await set_grants(world.admin, Grant(a, "r", NOTHING), Grant(b, "never", NOTHING))
    permissions = (await world.admin.namespace(world.namespace)).permissions
    assert {name: roles for name, roles in permissions.items() if roles} == {
        str(a): {"other": BOTH},
        str(b): {"r": CONSUME},
    }


async def test_missing_topic_does_not_block_grants_on_others(world: World) -> None:
    alone = await make(world, "a")
    grants = Grant(topic(world, "absent"), "r", CONSUME), Grant(alone, "team a/../b", CONSUME)
    with pytest.raises(AdminNotFoundError):
        await set_grants(world.admin, *grants)
    permissions = (await world.admin.namespace(world.namespace)).permissions
    assert permissions == {str(alone): {"team a/../b": CONSUME}}
    grants = Grant(topic(world, "absent"), "r", NOTHING), Grant(alone, "team a/../b", NOTHING)
    await set_grants(world.admin, *grants)  # on one that is absent is nothing to take
    assert not any((await world.admin.namespace(world.namespace)).permissions.values())


@pytest.mark.parametrize("partitions", [0, 2])
async def test_a_deleted_topic_takes_its_grants_with_it(world: World, partitions: int) -> None:
    made = await make(world, "a", partitions)
    await set_grants(world.admin, Grant(made, "r", CONSUME))
    with pytest.raises(AdminConflictError):
        await world.admin.delete_topic(made, partitioned=not partitions)
    await world.admin.delete_topic(made, partitioned=bool(partitions))
    with pytest.raises(AdminNotFoundError):
        await world.admin.delete_topic(made, partitioned=bool(partitions))
    state = await world.admin.namespace(world.namespace)
    assert (state.unpartitioned, state.partitioned) == (set(), set())
    assert not any(state.permissions.values())


@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize(
    ("policy", "before"),
    [
        (Deduplicates(), None),
        (Ttl(0), None),
        (Ttl(864_001), None),
        (STAYS, {"deleteWhileInactive": True}),
        (Holds("delayedDelivery", (("active", True), ("tickTime", 2_000))), {"active": True}),
        (
            Holds("retention", (("retentionTimeInMinutes", 5), ("retentionSizeInMB", -1))),
            {"retentionTimeInMinutes": 0},
        ),
        (LimitsBacklog(1_024), {}),
    ],
    ids=str,
)
async def test_a_topic_policy_that_was_written_will_do(
    world: World, policy: TopicPolicy, before: object, partitions: int
) -> None:
    made = await make(world, "a", partitions)
    value = await world.admin.topic_policy(made, policy)
    if isinstance(before, dict):
        assert before.items() <= value.items()
    else:
        assert value is before
    writes = list(policy.writes(value))
    assert writes
    for write in writes:
        await world.admin.set_topic_policy(made, policy, write)
    assert list(policy.writes(await settled(world.admin, made, policy, value))) == []


async def settled(admin: Admin, made: TopicName, policy: TopicPolicy, before: object) -> object:
    """Return the value of a policy, once the broker shows that it was written."""
    async with asyncio.timeout(60):
        while (value := await admin.topic_policy(made, policy)) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return value


async def test_a_time_to_live_below_nothing_is_refused(world: World) -> None:
    made = await make(world, "a")
    [write] = Ttl(-5).writes(None)
    with pytest.raises(BrokerRefusedError, match="412 Invalid value for message TTL"):
        await world.admin.set_topic_policy(made, Ttl(-5), write)
