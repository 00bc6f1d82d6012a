"""What a broker refuses for good: a policy stalls, and a hundred of them keep no broker busy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from redrive.admin.errors import error_for
from redrive.admin.http import Call, Http, Way
from redrive.api.conditions import find, is_ready, reason
from redrive.errors import Requeue
from redrive.kube import resources
from tests.support.fake_admin import answering
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.operator_in_process import operator_in_process
from tests.support.reconcile_harness import KEY, reconcile_harness

MakeBody = Callable[..., dict[str, Any]]
POLICIES = 100
HOUR = 3_600
CALLS_PER_SECOND = 5.0
"""Of all policies, the checks of their connection among them; measured 4, and 117 to 168 where
what is refused is tried again within 15 s."""


async def test_a_policy_that_the_broker_refuses_stalls_and_is_tried_again_within_minutes(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    async with reconcile_harness(connection, policy(), FakeKubernetes()) as here:
        here.broker.fault = answering(412)
        assert await here.reconcile() is Requeue.SLOW_BACKOFF
        refused = here.kubernetes.objects[resources.POLICIES][KEY]
        stalled = find(refused, "Stalled")
        assert stalled is not None
        assert (stalled.status, stalled.reason) == ("True", "BrokerRefused")
        assert "412" in stalled.message

        here.broker.fault = None
        here.ctx.policies.put(refused)
        assert await here.reconcile() is Requeue.ON_CHANGE
        now = here.kubernetes.objects[resources.POLICIES][KEY]
        assert is_ready(now)
        assert find(now, "Stalled") is None


class Refusing(Http):
    """A broker with the source topics of many policies, where nothing may be created.

    Attributes:
        calls: how often each was made, by method and what it is about.
    """

    def __init__(self) -> None:
        self.calls = Counter[str]()

    async def send(self, call: Call, way: Way) -> Any:  # noqa: ARG002, ANN401
        self.calls[f"{call.method} {call.path.rsplit('/', 1)[-1]}"] += 1
        if call.method != "GET":
            raise error_for(call.does, 412, '{"reason": "not here"}')
        topics = [f"persistent://shop/prod/orders-{number}" for number in range(POLICIES)]
        answers = {
            "clusters": ["standalone"],
            "brokers/version": "4.0.8",
            "namespaces/shop": ["shop/prod"],
            "namespaces/shop/prod": {"auth_policies": {"destination_auth": {}}},
            "persistent/shop/prod": topics,
            "persistent/shop/prod/partitioned": [],
        }
        if call.path in answers:
            return answers[call.path]
        if call.path.endswith("/properties"):
            return {}
        raise error_for(call.does, 404, '{"reason": "not found"}')


def clock_of_the_loop() -> Callable[[], datetime]:
    """Return a clock that goes as the event loop's."""
    loop, began = asyncio.get_running_loop(), datetime(2026, 1, 1, tzinfo=UTC)
    start = loop.time()
    return lambda: began + timedelta(seconds=loop.time() - start)


@pytest.mark.usefixtures("virtual_time")
async def test_a_hundred_policies_that_are_refused_make_few_calls_within_an_hour(
    connection: dict[str, Any], policy: MakeBody
) -> None:
    metadata = {"namespace": "shop", "name": "main", "uid": "main", "resourceVersion": "1"}
    typed = {"apiVersion": resources.CONNECTIONS.api_version, "kind": "BrokerConnection"}
    open_to_all = connection | {"authentication": {"none": {}}}
    kubernetes, http = FakeKubernetes(), Refusing()
    kubernetes.add(
        resources.CONNECTIONS,
        {**typed, "metadata": {**metadata, "generation": 1}, "spec": open_to_all},
    )
    for number in range(POLICIES):
        topic = f"persistent://shop/prod/orders-{number}"
        kubernetes.add(resources.POLICIES, policy(f"orders-{number}", topic=topic))
    clock = clock_of_the_loop()
    async with operator_in_process(kubernetes, cast("Http", http), clock) as ctx:
        await asyncio.sleep(HOUR)
        assert {reason(body) for body in ctx.policies} == {"BrokerRefused"}
    assert http.calls.total() / HOUR <= CALLS_PER_SECOND, http.calls
    tries = [count for call, count in http.calls.items() if call.startswith("PUT ")]
    assert len(tries) == POLICIES
    assert HOUR / 300 <= min(tries) <= max(tries) <= 40  # a right may be granted at any time
