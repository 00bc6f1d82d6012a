"""How exactly the broker keeps the delays of a retry topic: as its ladder needs, where it can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from redrive.admin import client
from redrive.api.conditions import find, is_ready
from redrive.errors import Requeue
from redrive.kube import resources
from tests.support.fake_admin import Do, Topic
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.reconcile_harness import KEY, ReconcileHarness, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
BY_DEFAULT = {"active": True, "maxDeliveryDelayInMillis": 0}


@pytest.fixture
async def harness(
    connection: dict[str, Any], policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ReconcileHarness]:
    """A policy whose shortest delay is 1 s, at a broker of 4.0 that is asked for its release."""
    monkeypatch.setattr(client, "VERSION_SECONDS", 0)
    async with reconcile_harness(connection, policy(), FakeKubernetes()) as made:
        yield made


def retry_topic(harness: ReconcileHarness) -> Topic:
    return harness.broker.namespaces["shop/prod"].topics["orders-fulfilment-RETRY"]


async def look(harness: ReconcileHarness, **spec: object) -> dict[str, Any]:
    """Have the policy reconciled, with another *spec* if one is given; return it."""
    body = harness.kubernetes.objects[resources.POLICIES][KEY]
    if spec:
        metadata = body["metadata"] | {"generation": body["metadata"]["generation"] + 1}
        body = body | {"spec": body["spec"] | spec, "metadata": metadata}
        harness.kubernetes.add(resources.POLICIES, body)
    harness.ctx.policies.put(body)
    assert await harness.reconcile() is Requeue.ON_CHANGE
    after: dict[str, Any] = harness.kubernetes.objects[resources.POLICIES][KEY]
    return after


async def test_the_tick_follows_the_shortest_delay(harness: ReconcileHarness) -> None:
    await look(harness)
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 50}
    await look(harness, delayLadder={"delays": ["5s", "10s"]})
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 250}
    await look(harness, delayLadder={"delays": ["5s", "10s"]}, delayLevels=["2s"])
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 100}
    await look(harness, delayLadder={"fixed": "2s"}, delayLevels=None)
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 100}
    await look(harness, delayLadder={"fixed": "1h"}, delayLevels=["1m"])
    assert retry_topic(harness).policies["delayedDelivery"] == BY_DEFAULT | {"tickTime": 1_000}


async def test_the_tick_is_taken_back_when_the_broker_is_upgraded_to_one_that_stalls_with_it(
    harness: ReconcileHarness,
) -> None:
    await look(harness)
    assert retry_topic(harness).policies["delayedDelivery"]["tickTime"] == 50
    harness.broker.version = "4.2.4"
    await look(harness)
    assert "delayedDelivery" not in retry_topic(harness).policies
    writes = len(harness.broker.writes)
    await look(harness)
    assert len(harness.broker.writes) == writes
    harness.broker.version = "4.0.8"
    await look(harness)
    assert retry_topic(harness).policies["delayedDelivery"]["tickTime"] == 50


@pytest.mark.parametrize("refusal", [403, 405, 412])
async def test_a_broker_that_forbids_it_is_warned_of_and_all_else_is_done(
    harness: ReconcileHarness, refusal: int
) -> None:
    async def forbid(request: web.Request, do: Do) -> web.StreamResponse:
        if request.method == "POST" and request.path.endswith("/delayedDelivery"):
            return web.json_response({"reason": "not allowed"}, status=refusal)
        return await do()

    harness.broker.fault = forbid
    found = await look(harness)
    assert is_ready(found)
    warning = find(found, "DelayedDeliveryRefused")
    assert warning is not None
    assert "so retries may come 1 s early, and the shortest delay is 1s" in warning.message
    assert "not allowed" in warning.message
    assert retry_topic(harness).subscriptions == ["fulfilment"]
    retry_topic(harness).policies["delayedDelivery"] = {"active": False, "tickTime": 1_000}
    found = await look(harness)
    warning = find(found, "DelayedDeliveryRefused")
    assert warning is not None
    assert "so retries come at once, whatever their delay" in warning.message
    harness.broker.fault = None
    found = await look(harness)
    assert find(found, "DelayedDeliveryRefused") is None
    assert retry_topic(harness).policies["delayedDelivery"]["active"] is True


@pytest.mark.parametrize("version", ["4.2.4", "not told"])
async def test_a_delay_that_is_over_at_once_is_warned_of_where_no_tick_can_be_set(
    harness: ReconcileHarness, version: str
) -> None:
    harness.broker.version = version
    found = await look(harness)
    warning = find(found, "RetriesEarly")
    assert warning is not None
    assert "so one of 1s at once" in warning.message
    assert "got a tick of 1 s on persistent://shop/prod/orders-fulfilment-RETRY" in warning.message
    assert "set delayedDeliveryTickTimeMillis=50 in the configuration" in warning.message
    assert is_ready(found)
    found = await look(harness)
    assert find(found, "RetriesEarly") == warning
    found = await look(harness, delayLadder={"delays": ["2s", "10s"]})
    assert find(found, "RetriesEarly") is None
    found = await look(harness, delayLevels=["1s"])
    assert find(found, "RetriesEarly") is not None


async def test_a_broker_of_a_finer_tick_is_not_warned_of_when_the_topic_is_new_either(
    harness: ReconcileHarness,
) -> None:
    harness.broker.version = "4.2.4"
    harness.broker.in_force["delayedDelivery"] = BY_DEFAULT | {"tickTime": 50}
    found = await look(harness)
    assert is_ready(found)
    assert find(found, "RetriesEarly") is None
    harness.broker.in_force["delayedDelivery"] = BY_DEFAULT | {"tickTime": 1_000}
    found = await look(harness)
    assert find(found, "RetriesEarly") is not None


async def test_a_delay_of_which_the_tick_is_set_is_not_warned_of(
    harness: ReconcileHarness,
) -> None:
    assert find(await look(harness), "RetriesEarly") is None
    assert find(await look(harness), "RetriesEarly") is None


async def test_a_policy_that_observes_is_not_warned_of_a_tick_that_is_not_known(
    harness: ReconcileHarness,
) -> None:
    harness.broker.version = "4.2.4"
    assert find(await look(harness, managementPolicy="Observe"), "RetriesEarly") is None
