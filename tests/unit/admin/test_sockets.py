"""Sockets of a namespace, whatever its number of connections is."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from redrive.admin import connector, http
from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.policy.naming import TopicName
from tests.support.http_server import serving

TOPIC = TopicName("t", "n", "a")


async def test_calls_of_a_namespace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of connections to a server that never answers would use up all descriptors."""
    monkeypatch.setattr(http, "CALLS_OF_NAMESPACE", 10)
    back, full = asyncio.Event(), asyncio.Event()
    now = most = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal now, most
        if request.headers["Authorization"] != "Bearer quick":
            now += 1
            most = max(most, now)
            if now == http.CALLS_OF_NAMESPACE:
                full.set()
            await back.wait()
            now -= 1
        return web.json_response({"partitions": 3})

    async with (
        asyncio.timeout(60),
        serving(answer) as url,
        Http.open() as opened,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(40):
            slow = Admin(opened, url, Access.bearer(str(number)), namespace="hostile")
            tasks.create_task(slow.partitions(TOPIC))
        await full.wait()
        quick = Admin(opened, url, Access.bearer("quick"), namespace="shop")
        assert await quick.partitions(TOPIC) == 3
        back.set()
    assert most == http.CALLS_OF_NAMESPACE


@pytest.mark.parametrize(("limit", "sockets"), [(0, 3), (1, 1)])
async def test_namespace_with_many_sockets_keeps_none_open(
    monkeypatch: pytest.MonkeyPatch, limit: int, sockets: int
) -> None:
    monkeypatch.setattr(connector, "SOCKETS_OF_NAMESPACE", limit)
    peers = set[object]()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(60), serving(answer) as url, Http.open() as opened:
        admin = Admin(opened, url, Access.bearer("x"), namespace="shop")
        for _ in range(3):
            assert await admin.partitions(TOPIC) == 3
    assert len(peers) == sockets
