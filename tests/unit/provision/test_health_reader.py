from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.http import Access, Http
from redrive.policy.naming import TopicName
from redrive.provision.health import Reader
from redrive.provision.poller import RateLimit

PLAIN, PARTS = TopicName("t", "n", "plain"), TopicName("t", "n", "parts")


@asynccontextmanager
async def broker() -> AsyncIterator[tuple[Admin, list[str]]]:
    """A broker with one topic of each kind, and the calls it got."""
    calls = []

    async def answer(request: web.Request) -> web.Response:
        *_, topic, call = request.path.split("/")
        calls.append(f"{topic}/{call}")
        if calls[-1] not in {"plain/stats", "parts/partitioned-stats"}:
            return web.json_response({"reason": "not found"}, status=404)
        return web.json_response({"subscriptions": {}})

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with Http.open() as http:
            yield (
                Admin(http, f"http://127.0.0.1:{runner.addresses[0][1]}", Access.bearer("x")),
                calls,
            )
    finally:
        await runner.cleanup()


async def test_a_topic_is_read_once_within_the_interval_whoever_asks() -> None:
    async with broker() as (admin, calls):
        reader = Reader(60.0, [RateLimit(0.001)])
        for _ in range(3):
            assert await reader.read(admin, PLAIN) == {}
        assert calls == ["plain/stats"]


async def test_a_fresh_answer_is_asked_for_at_once() -> None:
    async with broker() as (admin, calls):
        reader = Reader(60.0, [RateLimit(0.001)])
        for _ in range(2):
            await reader.read(admin, PLAIN, fresh=True)
        assert calls == ["plain/stats", "plain/stats"]


async def test_of_what_kind_a_topic_is_has_to_be_found_out_once() -> None:
    async with broker() as (admin, calls):
        reader = Reader(0.0, [RateLimit(0.001)])
        for _ in range(2):
            await reader.read(admin, PARTS)
        assert calls == ["parts/stats", "parts/partitioned-stats", "parts/partitioned-stats"]


async def test_a_topic_that_is_not_there_is_an_error() -> None:
    async with broker() as (admin, _):
        with pytest.raises(AdminNotFoundError):
            await Reader(60.0, [RateLimit(0.001)]).read(admin, TopicName("t", "n", "absent"))


async def test_a_broker_is_asked_no_more_often_than_so_many_times_a_second() -> None:
    async with broker() as (admin, calls):
        reader, loop = Reader(60.0, [RateLimit(0.02)]), asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.gather(*(reader.read(admin, PLAIN.sibling(str(n))) for n in range(3)),
                             return_exceptions=True)  # fmt: skip
        assert len(calls) == 6
        assert loop.time() - begun >= 5 / 50
