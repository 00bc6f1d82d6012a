"""What an operator does for policies that it finds at its start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, cast

import kopf
import pytest

from redrive.kube import status
from redrive.kube.cache import Cache
from redrive.kube.client import Kubernetes
from redrive.kube.connections import Connections
from redrive.kube.context import Context, Settings
from redrive.kube.resources import Body, Key, Resource
from redrive.provision import handlers

MakeBody = Callable[..., dict[str, Any]]
NOTHING = cast("Any", None)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = 5


class Statuses(Kubernetes):
    """An API server's part in it: it keeps statuses, and forgets Events."""

    def __init__(self, policies: Iterable[Body]) -> None:
        self.bodies = {Key.of(body): body for body in policies}
        self.written: asyncio.Queue[Body] = asyncio.Queue()

    async def patch_status(self, resource: Resource, key: Key, status: Body) -> Body:
        """Keep the status."""
        assert resource.kind == "RetryPolicy"
        body = self.bodies[key]
        version = str(int(body["metadata"]["resourceVersion"]) + 1)
        metadata = {**body["metadata"], "resourceVersion": version}
        written = {**body, "metadata": metadata, "status": {**body.get("status", {}), **status}}
        self.bodies[key] = written
        self.written.put_nowait(written)
        return written

    async def emit(self, *_: object, **__: object) -> None:
        """Forget it."""


@asynccontextmanager
async def started(*policies: Body) -> AsyncIterator[Statuses]:
    """An operator that finds *policies* at its start, and no connection."""
    kubernetes, connections = Statuses(policies), Cache()
    ctx = Context(
        settings=Settings("here", (), "", "", ""),
        kubernetes=kubernetes,
        connections=connections,
        policies=Cache(policies),
        replays=Cache(),
        applications=Cache(),
        config_maps=Cache(),
        brokers=Connections(connections, NOTHING, NOTHING, lambda: NOW),
        clock=lambda: NOW,
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
        assert status.reason(await kubernetes.written.get()) == "ConnectionNotFound"


@pytest.mark.parametrize("since", ["0000-01-01T00:00:00Z", "2026-01-01T00:00:00+99:00"])
async def test_a_status_that_nobody_can_read_does_not_end_the_operator_and_is_written_anew(
    policy: MakeBody, since: str
) -> None:
    spoilt = ready(policy("spoilt"), since)
    async with started(spoilt, policy("new")) as kubernetes:
        reasons = dict[str, str]()
        while reasons != {"spoilt": "ConnectionNotFound", "new": "ConnectionNotFound"}:
            body = await kubernetes.written.get()
            reasons[Key.of(body).name] = status.reason(body)
        times = {
            condition["lastTransitionTime"]
            for body in kubernetes.bodies.values()
            for condition in body["status"]["conditions"]
        }
    assert times == {"2026-01-01T00:00:00Z"}
