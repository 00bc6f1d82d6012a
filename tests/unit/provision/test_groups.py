"""Claims of policies on groups of RocketMQ clusters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.provision.groups import GroupClaims
from redrive.provision.request import ContestedError, digest_of

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
