"""What keeps one broker, or what stands in its place, from harming others. Over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from redrive.admin import client, http
from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.errors import (
    BrokerUnreachableError,
    IssuerFailedError,
    UnexpectedAnswerError,
)
from redrive.admin.http import Call, Http, Way
from redrive.policy.naming import TopicName
from tests.support.http_server import Answer, serving

TOPIC = TopicName("t", "n", "a")


@asynccontextmanager
async def asking(answer: Answer) -> AsyncIterator[tuple[Http, str]]:
    """Serve *answer* on a free port; give what asks, and where."""
    async with serving(answer) as url, Http.open() as opened:
        yield opened, url


async def trickle(request: web.Request) -> web.StreamResponse:
    """Answer without end, a byte now and then."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.005)


async def test_an_answer_that_never_ends_is_given_up() -> None:
    call = Call("ask", "GET", "x", seconds=0.1)
    async with asyncio.timeout(5), asking(trickle) as (opened, url):
        with pytest.raises(BrokerUnreachableError, match=r"got 'no whole answer within 0\.1 s'"):
            await opened.send(call, Way(url, Access.bearer("x"), asyncio.Semaphore()))


def test_no_call_goes_without_a_limit() -> None:
    assert Call("ask", "GET", "x").seconds == 60


async def test_the_time_of_a_call_begins_with_its_turn() -> None:
    waiting = 25  # more than run at a time: some wait for others
    asked = 0

    async def slow(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(1)
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(20), asking(slow) as (opened, url):
        call = Call("ask", "GET", "x", seconds=1.8)
        way = Way(url, Access.bearer("x"), asyncio.Semaphore(http.CALLS_AT_A_TIME))
        answers = await asyncio.gather(*(opened.send(call, way) for _ in range(waiting)))
    assert answers == [{"partitions": 3}] * waiting


async def test_sixty_hanging_calls_of_one_connection_delay_no_other_at_the_same_broker() -> None:
    hung, full, back = 0, asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal hung
        if request.headers["Authorization"] == "Bearer quick":
            return web.json_response({"partitions": 3})
        hung += 1
        if hung == http.CALLS_AT_A_TIME:
            full.set()
        await back.wait()
        return web.json_response({"partitions": 4})

    async with asyncio.timeout(10), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        slow, quick = (Admin(opened, url, Access.bearer(token)) for token in ("slow", "quick"))
        for _ in range(60):
            tasks.create_task(slow.partitions(TOPIC))
        await full.wait()
        assert await quick.partitions(TOPIC) == 3
        assert hung == http.CALLS_AT_A_TIME
        back.set()
    assert hung == 60


async def test_of_all_connections_a_hundred_quick_calls_are_under_way_at_most() -> None:
    now = most = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(20), asking(answer) as (opened, url):
        admins = [Admin(opened, url, Access.bearer(str(number))) for number in range(8)]
        asked = [admin.partitions(TOPIC) for admin in admins for _ in range(20)]
        assert len(asked) > http.CALLS_OF_ALL
        await asyncio.gather(*asked)
    assert most == http.CALLS_OF_ALL


async def test_connections_that_hang_however_many_they_are_delay_no_other() -> None:
    back = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer quick":
            await back.wait()
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(20), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        for number in range(12):
            slow = Admin(opened, url, Access.bearer(str(number)))
            for _ in range(20):
                tasks.create_task(slow.partitions(TOPIC))
        await asyncio.sleep(0)
        assert await Admin(opened, url, Access.bearer("quick")).partitions(TOPIC) == 3
        assert not back.is_set()
        back.set()


async def test_a_probe_that_hangs_makes_way_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROBE_SECONDS", 0.1)
    back = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await back.wait()
        return web.json_response(["here"])

    async with asyncio.timeout(5), asking(answer) as (opened, url):
        admin = Admin(opened, url, Access.bearer("x"))
        with pytest.raises(BrokerUnreachableError, match=r"no whole answer within 0\.1 s"):
            await admin.clusters()
        back.set()
        assert await admin.clusters() == {"here"}


async def test_what_one_broker_has_kept_by_its_clients_is_not_sent_to_another() -> None:
    cookies: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        cookies.append(request.headers.get("Cookie"))
        response = web.json_response(["here"])
        response.set_cookie("session", "of-the-first")
        return response

    async with asking(answer) as (opened, url):
        # By name: the library keeps no cookies of addresses.
        named = url.replace("127.0.0.1", "localhost")
        for role in ("first", "second"):
            await Admin(opened, named, Access.bearer(role)).clusters()
    assert cookies == [None, None]


async def test_an_answer_that_is_far_too_long_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LONGEST_ANSWER", 2**20)
    counted = {"verb": "GET", "status": "too long"}
    before = REGISTRY.get_sample_value("redrive_admin_calls_total", counted) or 0

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(bytes(2**16))

    async with asyncio.timeout(10), asking(endless) as (opened, url):
        with pytest.raises(UnexpectedAnswerError, match="got 'an answer of more than 1 MiB'"):
            await Admin(opened, url, Access.bearer("x")).partitions(TOPIC)
        with pytest.raises(IssuerFailedError, match="got 'an answer of more than 1 MiB'"):
            await opened.ask_issuer("GET", url, None, None)
    assert REGISTRY.get_sample_value("redrive_admin_calls_total", counted) == before + 1


async def test_an_answer_as_long_as_may_be_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text='["here"]')

    monkeypatch.setattr(http, "LONGEST_ANSWER", len('["here"]'))
    async with asking(answer) as (opened, url):
        assert await Admin(opened, url, Access.bearer("x")).clusters() == {"here"}
