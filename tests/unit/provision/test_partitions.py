"""What partitions lack, or lose, is put right: else what is sent there is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from redrive.admin.client import Admin
from redrive.admin.errors import BrokerFailedError
from redrive.admin.http import Access, Http
from redrive.api import Body
from redrive.provision.actions import CreateSubscription, RestorePartitions
from redrive.provision.claims import Conflicts, resolve
from redrive.provision.reconciler import Converged, converge
from tests.support.fake_admin import SUPERUSER, Do, FakeBroker, Namespace, Topic
from tests.unit.provision.test_calls import READY, make_world

MakeBody = Callable[..., dict[str, Any]]
WHOLE = {f"-partition-{number}": ["fulfilment"] for number in range(3)}


@dataclass(frozen=True)
class Shop:
    """A broker, and looks at the policy of one topic with three partitions."""

    broker: FakeBroker
    body: Body
    look: Callable[[], Awaitable[Converged]]

    @property
    def retry(self) -> Topic:
        return self.broker.namespaces["shop/prod"].topics["orders-fulfilment-RETRY"]


@asynccontextmanager
async def shop(connection: dict[str, Any], body: Body, **there: Topic) -> AsyncIterator[Shop]:
    async with FakeBroker.serving() as broker, aiohttp.ClientSession() as session:
        broker.tenants = {"shop": []}
        topics = {"orders": Topic(3, {}), **there}
        broker.namespaces = {"shop/prod": Namespace(topics)}
        admin = Admin(Http(session), broker.url, Access.bearer(FakeBroker.token(SUPERUSER)))
        ctx = make_world(admin, connection, body)
        conflicts = Conflicts(ctx.policies, ctx.connections, lambda _: None)
        yield Shop(
            broker,
            body,
            lambda: converge(resolve(body, ctx), body, ctx, conflicts),
        )


async def test_a_subscription_that_could_not_be_made_on_one_partition_is_made_by_the_next_look(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with shop(connection, policy()) as made:

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


async def test_a_subscription_that_one_partition_lost_is_made_anew(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(adopt=True)
    async with shop(connection, body) as made:
        await made.look()
        body["status"] = {"observedGeneration": 7, "conditions": [READY]}
        made.retry.parts["-partition-2"].clear()
        assert list(map(type, (await made.look()).actions)) == [CreateSubscription]
        assert made.retry.parts == WHOLE
        assert not (await made.look()).actions


async def test_a_partition_that_somebody_deleted_is_made_anew_with_its_subscription(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    body = policy(adopt=True)
    async with shop(connection, body) as made:
        await made.look()
        body["status"] = {"observedGeneration": 7, "conditions": [READY]}
        del made.retry.parts["-partition-0"], made.retry.parts["-partition-1"]
        actions = (await made.look()).actions
        assert list(map(type, actions)) == [RestorePartitions, CreateSubscription]
        assert str(actions[0]).endswith("orders-fulfilment-RETRY again: 0, 1")
        assert made.retry.parts == WHOLE
        assert not (await made.look()).actions


async def test_who_only_observes_is_told_of_it_and_nothing_is_made(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    parts = {"-partition-0": ["fulfilment"], "-partition-1": ["fulfilment"]}
    retry = Topic(3, {}, parts)
    del retry.parts["-partition-2"]
    body = policy(adopt=True, managementPolicy="Observe")
    async with shop(connection, body, **{"orders-fulfilment-RETRY": retry}) as made:
        planned_changes = (await made.look()).planned_changes
        assert {RestorePartitions, CreateSubscription} <= set(map(type, planned_changes))
        assert not made.broker.writes
        assert made.retry.parts == parts


async def test_a_subscription_of_somebody_else_is_completed_and_not_noted_as_ours(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    retry = Topic(3, {}, {"-partition-0": ["fulfilment"]})
    async with shop(connection, policy(adopt=True), **{"orders-fulfilment-RETRY": retry}) as made:
        await made.look()
        assert made.retry.parts == WHOLE
        assert not made.retry.properties.get("redrive.io/subscription")
