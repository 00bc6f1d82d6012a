"""What happens between a Replay's admission and its SparkApplication, without an API server."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from redrive.errors import Requeue
from redrive.kube import resources
from redrive.kube.errors import ForbiddenError
from redrive.kube.resources import Key, Resource
from redrive.replay.reconcile import reconcile
from tests.support.fake_kubernetes import FakeKubernetes
from tests.unit.replay.test_admission import ctx, replay

ACCOUNT = Key("shop", "redrive-replay")


@pytest.fixture
def api() -> FakeKubernetes:
    """An API server with one Replay."""
    api = FakeKubernetes()
    api.add(resources.REPLAYS, replay())
    return api


async def look(api: FakeKubernetes) -> Requeue:
    """Reconcile the Replay once."""
    body = replay()
    context = dataclasses.replace(ctx(replays=[body]), kubernetes=api)
    return await reconcile(Key.of(body), context, asyncio.Lock())


def statuses(api: FakeKubernetes) -> list[dict[str, Any]]:
    """Return each status that was written."""
    return [write.body["status"] for write in api.writes if write.verb == "patch_status"]


async def test_a_replay_without_its_service_account_waits_and_looks_again(
    api: FakeKubernetes,
) -> None:
    read: list[tuple[Resource, Key]] = []

    def note(verb: str, resource: Resource, key: Key) -> None:
        if verb == "get":
            read.append((resource, key))

    api.before = note
    assert await look(api) is Requeue.BACKOFF
    assert read == [(resources.SERVICE_ACCOUNTS, ACCOUNT)]
    assert [write.verb for write in api.writes] == ["patch_status"]
    (status,) = statuses(api)
    assert status["phase"] == "Pending"
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["reason"] == "ServiceAccountNotFound"
    assert "got 'shop/redrive-replay'" in ready["message"]
    assert "kubectl apply -n shop -f examples/replay-rbac.yaml" in ready["message"]
    assert all(c["type"] != "Stalled" for c in status["conditions"])


@pytest.mark.parametrize("forbidden", [False, True])
async def test_a_replay_is_launched_when_the_account_exists_or_may_not_be_read(
    api: FakeKubernetes, *, forbidden: bool
) -> None:
    def refuse(_verb: str, resource: Resource, _key: Key) -> None:
        if resource == resources.SERVICE_ACCOUNTS:
            raise ForbiddenError("it is not allowed", remedy="none")

    if forbidden:
        api.before = refuse
    else:
        api.add(resources.SERVICE_ACCOUNTS, {"metadata": ACCOUNT._asdict()})
    assert await look(api) is Requeue.ON_CHANGE
    created = [write.resource.kind for write in api.writes if write.verb == "create"]
    assert created == ["SparkApplication"]
    assert [status["phase"] for status in statuses(api)] == ["Submitted"]
