from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.client import Admin
from redrive.admin.http import Access, Http
from redrive.admin.model import NamespaceState
from redrive.api import Body
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.desired import Desired, desired
from redrive.provision.diff import config_map_actions
from redrive.provision.poller import NamespaceFacts, has_drifted
from redrive.provision.request import Request
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace, Topic, answering, at_call

MakeBody = Callable[..., dict[str, Any]]
MakeRequest = Callable[..., Request]
MAIN = Key("shop", "main")
NEW = {"uid": "c", "resourceVersion": "1", "generation": 1}
NAMES = [f"orders-{number}" for number in range(30)]


@pytest.fixture
async def made(
    connection: dict[str, Any], policy: MakeBody
) -> AsyncIterator[tuple[NamespaceFacts, FakeBroker]]:
    """Thirty policies, ten to a Pulsar namespace, with no drift."""
    through = {"metadata": {"namespace": "shop", "name": "main", **NEW}, "spec": connection}
    bodies = [
        policy(name, topic=f"persistent://shop/n{number % 3}/{name}")
        for number, name in enumerate(NAMES)
    ]
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))

        async def open_(key: Key) -> SimpleNamespace:
            assert key == MAIN
            return SimpleNamespace(admin=admin)

        ctx: Any = SimpleNamespace(
            policies=Cache(bodies),
            connections=Cache([through]),
            namespaces=None,
            config_maps=Cache(),
            brokers=SimpleNamespace(open=open_),
            settings=SimpleNamespace(cluster_id="here", namespaces=()),
        )
        broker.tenants = {"shop": []}
        broker.namespaces = {f"shop/n{number}": Namespace({}, {}) for number in range(3)}
        for body in bodies:
            wanted = desired(resolve(body, ctx), body, "here")
            ctx.config_maps.put(
                {**wanted.config_map, "metadata": {**wanted.config_map["metadata"], **NEW}}
            )
            there = broker.namespaces[wanted.policy.topic.namespace_name]
            assert wanted.dead_letter is not None
            assert wanted.ledger is not None
            own = (wanted.retry.name, wanted.dead_letter.name, wanted.ledger.name)
            for name in (wanted.policy.topic, *own):
                there.topics[name.local] = Topic(0, {})
            for grant in wanted.grants:
                roles = there.grants.setdefault(str(grant.topic), {})
                roles[grant.role] = sorted(grant.actions)
        yield NamespaceFacts(ctx, Conflicts(ctx.policies, ctx.connections, lambda _: None)), broker


async def drifted_of(facts: NamespaceFacts) -> set[str]:
    return {key.name for key in await facts.drifted(MAIN, facts.ctx.policies)}


async def test_facts_cost_three_calls_for_each_pulsar_namespace(
    made: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = made
    assert await drifted_of(facts) == set()
    assert len(broker.calls) == 9


async def test_what_is_missing_at_the_broker_or_beside_it_is_found(
    made: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = made
    del broker.namespaces["shop/n0"].topics["orders-0-fulfilment-RETRY"]
    del broker.namespaces["shop/n1"].grants["persistent://shop/n1/orders-1-fulfilment-DLQ"]
    (lost,) = (b for b in facts.ctx.config_maps if b["metadata"]["name"] == "orders-2-redrive")
    facts.ctx.config_maps.drop(lost)
    assert await drifted_of(facts) == {"orders-0", "orders-1", "orders-2"}
    found = {body["metadata"]["name"]: body for body in facts.ctx.policies}
    assert facts.lacks_config_map(found["orders-2"])
    assert not facts.lacks_config_map(found["orders-3"])


async def test_what_may_not_be_obeyed_any_more_is_found_without_asking_the_broker(
    made: tuple[NamespaceFacts, FakeBroker], connection: dict[str, Any], policy: MakeBody
) -> None:
    facts, broker = made
    changed = {"namespace": "shop", "name": "main", **NEW, "resourceVersion": "2", "generation": 2}
    narrowed = {**connection, "allow": [{"topics": ["persistent://shop/n2/*"], "roles": ["*"]}]}
    for table, body in (
        (facts.ctx.connections, {"metadata": changed, "spec": narrowed}),
        (facts.ctx.policies, policy("broken", maxRetries=-1, generation=8)),
    ):
        table.put(body)
    found = await drifted_of(facts)
    assert found == {"broken"} | {name for i, name in enumerate(NAMES) if i % 3 != 2}
    assert len(broker.calls) == 3


async def test_policies_that_only_observe_may_differ(
    made: tuple[NamespaceFacts, FakeBroker], policy: MakeBody
) -> None:
    facts, broker = made
    observes = {"topic": "persistent://shop/n0/other", "managementPolicy": "Observe"}
    facts.ctx.policies.put(policy("observes", **observes))
    assert await drifted_of(facts) == set()
    assert len(broker.calls) == 9


async def test_a_namespace_that_is_gone_is_for_its_policies_to_tell(
    made: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = made
    del broker.namespaces["shop/n1"]
    assert await drifted_of(facts) == {name for i, name in enumerate(NAMES) if i % 3 == 1}


async def test_a_broker_that_fails_for_once_sets_nobody_astir(
    made: tuple[NamespaceFacts, FakeBroker],
) -> None:
    facts, broker = made
    broker.fault = at_call(1, answering(500))
    assert await drifted_of(facts) == set()


ORDERS = "persistent://shop/prod/orders"
RETRY, DEAD_LETTER = f"{ORDERS}-fulfilment-RETRY", f"{ORDERS}-fulfilment-DLQ"
LEDGER = f"{DEAD_LETTER}-LEDGER"
BOTH, PRODUCE, CONSUME = frozenset({"produce", "consume"}), frozenset({"produce"}), frozenset[str]()
PERMISSIONS = {
    RETRY: {"fulfilment": BOTH, "replayer": BOTH},
    DEAD_LETTER: {"fulfilment": PRODUCE, "replayer": frozenset({"consume"})},
    LEDGER: {"replayer": BOTH},
}


@pytest.fixture
def wanted(policy: MakeBody, requested: MakeRequest) -> Desired:
    body = policy()
    return desired(requested(body), body, "here")


def listed(source: int = 0, retry: int = 0) -> NamespaceState:
    """A namespace with all that the policy needs; the topics have so many partitions."""
    counts = {ORDERS: source, RETRY: retry, DEAD_LETTER: 0, LEDGER: 0}
    partitions = {f"{t}-partition-{i}" for t, count in counts.items() for i in range(count)}
    return NamespaceState(
        unpartitioned=frozenset({t for t, count in counts.items() if not count} | partitions),
        partitioned=frozenset(t for t, count in counts.items() if count),
        permissions=PERMISSIONS,
        subscription_expiry_minutes=0,
        backlog_quotas={},
        delayed_delivery=None,
    )


def drifted(wanted: Desired, state: NamespaceState) -> bool:
    return has_drifted(wanted, state, wanted.config_map)


def lacks(wanted: Desired, config_map: Body | None) -> bool:
    return any(config_map_actions(wanted.config_map, config_map))


def test_a_topic_has_the_partitions_that_are_there() -> None:
    state = listed(source=12)
    assert state.partitions(TopicName("shop", "prod", "orders")) == 12
    assert state.partitions(TopicName("shop", "prod", "orders-fulfilment-RETRY")) == 0
    assert state.partitions(TopicName("shop", "prod", "missing")) == 0


@pytest.mark.parametrize(("source", "retry"), [(0, 0), (3, 3), (3, 5)])
def test_there_is_no_drift_where_all_is_there(wanted: Desired, source: int, retry: int) -> None:
    assert not drifted(wanted, listed(source, retry))


@pytest.mark.parametrize("missing", [ORDERS, RETRY, DEAD_LETTER])
def test_a_missing_topic_is_drift(wanted: Desired, missing: str) -> None:
    state = listed()
    rest = dataclasses.replace(state, unpartitioned=state.unpartitioned - {missing})
    assert drifted(wanted, rest)


def test_without_dead_letters_nobody_misses_their_topic(
    policy: MakeBody, requested: MakeRequest
) -> None:
    body = policy(deadLetter={"mode": "Discard"})
    discards = desired(requested(body), body, "here")
    state = listed()
    rest = dataclasses.replace(state, unpartitioned=state.unpartitioned - {DEAD_LETTER})
    assert not drifted(discards, rest)


@pytest.mark.parametrize(("source", "retry"), [(4, 3), (3, 0)])
def test_a_source_topic_that_has_grown_is_drift(wanted: Desired, source: int, retry: int) -> None:
    assert drifted(wanted, listed(source, retry))


@pytest.mark.parametrize(
    "permissions",
    [
        {},
        PERMISSIONS | {RETRY: {"fulfilment": BOTH}},
        PERMISSIONS | {RETRY: {"fulfilment": PRODUCE, "replayer": PRODUCE}},
    ],
)
def test_a_missing_right_is_drift(wanted: Desired, permissions: dict[str, Any]) -> None:
    assert drifted(wanted, dataclasses.replace(listed(), permissions=permissions))


def test_more_rights_than_needed_are_no_drift(wanted: Desired) -> None:
    more = PERMISSIONS | {DEAD_LETTER: {"fulfilment": BOTH, "replayer": BOTH, "auditor": BOTH}}
    assert not drifted(wanted, dataclasses.replace(listed(), permissions=more))


def test_a_namespace_that_begins_to_expire_subscriptions_is_drift(wanted: Desired) -> None:
    expiring = dataclasses.replace(listed(), subscription_expiry_minutes=5)
    assert drifted(wanted, expiring)


def test_a_config_map_is_drift_when_missing_changed_or_without_the_label(wanted: Desired) -> None:
    ours = wanted.config_map
    assert not lacks(wanted, ours)
    assert not lacks(wanted, {**ours, "data": {**ours["data"], "note": "mine"}})
    assert lacks(wanted, None)
    assert lacks(wanted, {**ours, "data": {"policy.json": "{}"}})
    assert lacks(wanted, {**ours, "metadata": {"name": "orders-redrive"}})
