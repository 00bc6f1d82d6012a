"""What an operator reads when it starts, from an API server's part in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from redrive.kube import resources
from redrive.kube.client import ForbiddenError, Kubernetes
from redrive.kube.context import Context, Settings
from redrive.kube.resources import Key, Resource
from tests.support.fake_kubernetes import FakeKubernetes

KINDS = (
    resources.CONNECTIONS,
    resources.POLICIES,
    resources.REPLAYS,
    resources.SPARK_APPLICATIONS,
    resources.CONFIG_MAPS,
)


def shared(*forbidden: str) -> FakeKubernetes:
    """Two namespaces with an object of each kind; those that are *forbidden* may not be listed."""

    def refuse(verb: str, _resource: Resource, key: Key) -> None:
        if verb == "list" and key.namespace in forbidden:
            raise ForbiddenError("may not list", remedy="grant it")

    api = FakeKubernetes()
    for namespace in ("deleted", "shop"):
        metadata = {"namespace": namespace, "name": "a", "uid": "1", "resourceVersion": "1"}
        for resource in KINDS:
            api.add(resource, {"metadata": metadata})
    api.before = refuse
    return api


def connect_to(api: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connect(_fence: object = None) -> AsyncIterator[Kubernetes]:
        yield api

    monkeypatch.setattr(Kubernetes, "connect", connect)


def serving(*namespaces: str) -> Settings:
    return Settings("here", namespaces, "image", "local:///job.py", "account")


async def test_a_namespace_that_may_not_be_read_keeps_no_other_from_being_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect_to(shared("deleted"), monkeypatch)
    async with asyncio.timeout(60), Context.open(serving("deleted", "shop")) as ctx:
        for cache in ctx.caches.values():
            assert [Key.of(body) for body in cache] == [Key("shop", "a")]
    assert caplog.text.count("left out for now: may not list") == 5


async def test_an_operator_that_may_read_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to(shared("deleted", "shop"), monkeypatch)
    with pytest.raises(ForbiddenError, match="may not list"):
        async with Context.open(serving("deleted", "shop")):
            pass


async def test_labels_that_a_connection_selects_by_are_known_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = FakeKubernetes()
    identity = {"uid": "1", "resourceVersion": "1"}
    selecting = {"namespaces": {"selector": {"matchLabels": {"team": "shop"}}}, "topics": []}
    for name, allow in (("own", [{"topics": []}]), ("selecting", [selecting])):
        metadata = {"namespace": "brokers", "name": name, **identity}
        api.add(resources.CONNECTIONS, {"metadata": metadata, "spec": {"allow": allow}})
        reference = {"connectionRef": {"namespace": "brokers", "name": name}}
        metadata = {"namespace": f"uses-{name}", "name": "orders", **identity}
        api.add(resources.POLICIES, {"metadata": metadata, "spec": reference})
    read = list[Key]()
    api.before = lambda verb, _, key: read.append(key) if verb == "get" else None
    labelled = {"metadata": {"name": "uses-selecting", "labels": {"team": "shop"}}}
    api.objects[resources.NAMESPACES][Key("", "uses-selecting")] = labelled
    connect_to(api, monkeypatch)
    async with asyncio.timeout(60), Context.open(serving()) as ctx:
        assert ctx.namespaces.of("uses-selecting") == {"team": "shop"}
        assert read == [Key("", "uses-selecting")]
