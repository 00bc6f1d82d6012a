from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.kube.cache import Cache
from redrive.kube.resources import Key
from redrive.provision.conflicts import Conflicts
from redrive.provision.desired import desired
from redrive.provision.namespace_facts import NamespaceFacts
from redrive.provision.resolve import resolve
from tests.support.fake_admin import SUPERUSER, FakeBroker, Namespace, Topic, answering, at_call

MakeBody = Callable[..., dict[str, Any]]
MAIN = Key("shop", "main")
NEW = {"uid": "c", "resourceVersion": "1"}
NAMES = [f"orders-{number}" for number in range(30)]


@pytest.fixture
async def survey(
    connection: dict[str, Any], policy: MakeBody
) -> AsyncIterator[tuple[NamespaceFacts, FakeBroker]]:
    """Thirty policies, ten to a Pulsar namespace, with nothing amiss."""
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
            for name in (wanted.policy.topic, wanted.retry.name, wanted.dead_letter.name):
                there.topics[name.local] = Topic(0, {})
            for grant in wanted.grants:
                roles = there.grants.setdefault(str(grant.topic), {})
                roles[grant.role] = sorted(grant.actions)
        yield NamespaceFacts(ctx, Conflicts(ctx.policies, lambda _: None)), broker


async def amiss(survey: NamespaceFacts) -> set[str]:
    return {key.name for key in await survey.amiss(MAIN, survey.ctx.policies)}


async def test_a_survey_costs_three_calls_for_each_pulsar_namespace(
    survey: tuple[NamespaceFacts, FakeBroker],
) -> None:
    surveyor, broker = survey
    assert await amiss(surveyor) == set()
    assert len(broker.calls) == 9


async def test_what_is_missing_at_the_broker_or_beside_it_is_found(
    survey: tuple[NamespaceFacts, FakeBroker],
) -> None:
    surveyor, broker = survey
    del broker.namespaces["shop/n0"].topics["orders-0-fulfilment-RETRY"]
    del broker.namespaces["shop/n1"].grants["persistent://shop/n1/orders-1-fulfilment-DLQ"]
    (lost,) = (b for b in surveyor.ctx.config_maps if b["metadata"]["name"] == "orders-2-redrive")
    surveyor.ctx.config_maps.drop(lost)
    assert await amiss(surveyor) == {"orders-0", "orders-1", "orders-2"}
    found = {body["metadata"]["name"]: body for body in surveyor.ctx.policies}
    assert surveyor.lacks_config_map(found["orders-2"])
    assert not surveyor.lacks_config_map(found["orders-3"])


async def test_what_may_not_be_obeyed_any_more_is_found_without_asking_the_broker(
    survey: tuple[NamespaceFacts, FakeBroker], connection: dict[str, Any], policy: MakeBody
) -> None:
    surveyor, broker = survey
    changed = {"namespace": "shop", "name": "main", **NEW, "resourceVersion": "2"}
    narrowed = {**connection, "allowedTopics": ["persistent://shop/n2/*"]}
    for table, body in (
        (surveyor.ctx.connections, {"metadata": changed, "spec": narrowed}),
        (surveyor.ctx.policies, policy("broken", maxRetries=-1)),
    ):
        table.put(body)
    found = await amiss(surveyor)
    assert found == {"broken"} | {name for i, name in enumerate(NAMES) if i % 3 != 2}
    assert len(broker.calls) == 3


async def test_policies_that_only_observe_may_differ(
    survey: tuple[NamespaceFacts, FakeBroker], policy: MakeBody
) -> None:
    surveyor, broker = survey
    observes = {"topic": "persistent://shop/n0/other", "managementPolicy": "Observe"}
    surveyor.ctx.policies.put(policy("observes", **observes))
    assert await amiss(surveyor) == set()
    assert len(broker.calls) == 9


async def test_a_namespace_that_is_gone_is_for_its_policies_to_tell(
    survey: tuple[NamespaceFacts, FakeBroker],
) -> None:
    surveyor, broker = survey
    del broker.namespaces["shop/n1"]
    assert await amiss(surveyor) == {name for i, name in enumerate(NAMES) if i % 3 == 1}


async def test_a_broker_that_fails_for_once_sets_nobody_astir(
    survey: tuple[NamespaceFacts, FakeBroker],
) -> None:
    surveyor, broker = survey
    broker.fault = at_call(1, answering(500))
    assert await amiss(surveyor) == set()
