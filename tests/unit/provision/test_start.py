"""What an operator does for policies that it finds at its start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast

import kopf
import pytest

from redrive.api import Body
from redrive.api.conditions import reason
from redrive.kube.cache import Cache
from redrive.kube.connections import Connections, NamespaceLabels
from redrive.kube.context import Context, Settings
from redrive.kube.resources import POLICIES, Key
from redrive.provision import handlers
from tests.support.fake_kubernetes import FakeKubernetes

MakeBody = Callable[..., dict[str, Any]]
NOTHING = cast("Any", None)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = 60


@asynccontextmanager
async def started(*policies: Body) -> AsyncIterator[FakeKubernetes]:
    """An operator that finds *policies* at its start, and no connection."""
    kubernetes, connections = FakeKubernetes(), Cache()
    kubernetes.add(POLICIES, *policies)
    ctx = Context(
        settings=Settings("here", (), "", "", ""),
        kubernetes=kubernetes,
        connections=connections,
        policies=Cache(policies),
        replays=Cache(),
        applications={},
        config_maps=Cache(),
        brokers=Connections(connections, NOTHING, NOTHING, lambda: NOW, NOTHING),
        namespaces=NamespaceLabels(kubernetes),
        clock=lambda: NOW,
        missing=(),
        began=NOW,
    )
    begun = handlers.register(kopf.OperatorRegistry(), ctx)
    try:
        async with asyncio.timeout(SECONDS):
            yield kubernetes
    finally:
        for each in begun:
            await each.stop()


def ready(body: dict[str, Any], since: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    """A policy that was ready when the operator went."""
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Provisioned",
        "message": "",
        "lastTransitionTime": since,
    }
    generation = body["metadata"]["generation"]
    return body | {"status": {"observedGeneration": generation, "conditions": [condition]}}


async def test_a_policy_whose_connection_went_while_no_operator_ran_is_ready_no_more(
    policy: MakeBody,
) -> None:
    async with started(ready(policy())) as kubernetes:
        assert reason((await kubernetes.written()).body) == "ConnectionNotFound"


@pytest.mark.parametrize("since", ["0000-01-01T00:00:00Z", "2026-01-01T00:00:00+99:00"])
async def test_a_status_that_cannot_be_read_does_not_end_the_operator_and_is_written_again(
    policy: MakeBody, since: str
) -> None:
    spoilt = ready(policy("spoilt"), since)
    async with started(spoilt, policy("new")) as kubernetes:
        reasons = dict[str, str]()
        while reasons != {"spoilt": "ConnectionNotFound", "new": "ConnectionNotFound"}:
            body = (await kubernetes.written()).body
            reasons[Key.of(body).name] = reason(body)
        times = {
            condition["lastTransitionTime"]
            for body in kubernetes.objects[POLICIES].values()
            for condition in body["status"]["conditions"]
        }
    assert times == {"2026-01-01T00:00:00Z"}
