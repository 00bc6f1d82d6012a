"""What an operator reads when it starts, from an API server's part in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from redrive.kube.client import Kubernetes
from redrive.kube.context import Context, Settings
from redrive.kube.errors import ForbiddenError
from redrive.kube.resources import Body, Key, Resource


class Shared(Kubernetes):
    """Namespaces with an object of each kind, of which some may not be read."""

    def __init__(self, *forbidden: str) -> None:
        self.forbidden = forbidden

    async def list(self, _resource: Resource, namespace: str | None = None) -> list[Body]:
        """Give its one object, unless that is forbidden."""
        if namespace in self.forbidden:
            raise ForbiddenError("may not list", remedy="grant it")
        named = {"name": "a", "uid": "1", "resourceVersion": "1"}
        return [{"metadata": {**named, "namespace": namespace}}]


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
    connect_to(Shared("deleted"), monkeypatch)
    async with asyncio.timeout(5), Context.open(serving("deleted", "shop")) as ctx:
        for cache in ctx.caches.values():
            assert [Key.of(body) for body in cache] == [Key("shop", "a")]
    assert caplog.text.count("left out for now: may not list") == 5


async def test_an_operator_that_may_read_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_to(Shared("deleted", "shop"), monkeypatch)
    with pytest.raises(ForbiddenError, match="may not list"):
        async with Context.open(serving("deleted", "shop")):
            pass
