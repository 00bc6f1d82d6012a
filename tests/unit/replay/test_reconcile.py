"""What happens between a Replay's admission and its SparkApplication, without an API server."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.errors import ForbiddenError, NotFoundError
from redrive.kube.resources import Body, Key, Resource
from redrive.replay.reconcile import reconcile
from tests.unit.replay.test_admission import ctx, replay


class Cluster:
    """An API server whose answer about the ServiceAccount is *answer*."""

    def __init__(self, answer: Exception | None) -> None:
        self.answer = answer
        self.read: list[tuple[Resource, Key]] = []
        self.created: list[str] = []
        self.statuses: list[dict[str, Any]] = []

    async def get(self, resource: Resource, key: Key) -> Body:
        """Answer."""
        self.read.append((resource, key))
        if self.answer is not None:
            raise self.answer
        return {}

    async def create(self, resource: Resource, body: Body) -> Body:
        """Note the kind."""
        self.created.append(resource.kind)
        return {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}

    async def patch_status(self, _: Resource, __: Key, status: dict[str, Any]) -> Body:
        """Note the status."""
        self.statuses.append(status)
        return {**replay(), "status": status}

    async def emit(self, *_: object, **__: object) -> None:
        """Drop every Event."""


async def look(cluster: Cluster) -> Requeue:
    """Reconcile one Replay once."""
    body = replay()
    context = dataclasses.replace(ctx(replays=[body]), kubernetes=cast("Any", cluster))
    return await reconcile(Key.of(body), context, asyncio.Lock())


async def test_a_replay_without_its_service_account_waits_and_looks_again() -> None:
    cluster = Cluster(NotFoundError("it is not there", remedy="none"))
    assert await look(cluster) is Requeue.BACKOFF
    assert cluster.read == [(resources.SERVICE_ACCOUNTS, Key("shop", "redrive-replay"))]
    assert cluster.created == []
    (status,) = cluster.statuses
    assert status["phase"] == "Pending"
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "ServiceAccountNotFound"
    assert "got 'shop/redrive-replay'" in ready["message"]
    assert "kubectl apply -n shop -f examples/replay-rbac.yaml" in ready["message"]
    assert all(c["type"] != "Stalled" for c in status["conditions"])


@pytest.mark.parametrize("answer", [None, ForbiddenError("it is not allowed", remedy="none")])
async def test_a_replay_is_launched_when_the_account_exists_or_may_not_be_read(
    answer: Exception | None,
) -> None:
    cluster = Cluster(answer)
    assert await look(cluster) is Requeue.ON_CHANGE
    assert cluster.created == ["SparkApplication"]
    assert [status["phase"] for status in cluster.statuses] == ["Submitted"]
