"""Shares of namespaces in sockets, calls, and the time that TLS takes."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from typing import Any
from unittest.mock import Mock

import pytest
import trustme
from aiohttp import web

from redrive.admin import connector, http, shares
from redrive.admin.access import Access, tls_context
from redrive.admin.client import Admin
from redrive.admin.connector import taking_turns
from redrive.admin.errors import BrokerUnreachableError
from redrive.admin.http import Http
from redrive.admin.shares import BURST_SECONDS, SHARE, FairTls, Shares
from redrive.policy.naming import TopicName
from tests.support.http_servers import serving

AUTHORITY = trustme.CA()


def settings() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return those of a client and of a server."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert("localhost").configure_cert(server)
    return tls_context(ca=AUTHORITY.cert_pem.bytes().decode()), server


class Ends:
    """Client and server of one TLS connection of a namespace."""

    def __init__(self, namespace: str, budget: Shares) -> None:
        client, server = settings()
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        shares.namespace_of_call.set(namespace)
        shares.shares_of_call.set(budget)
        made: Any = client.wrap_bio(down, up, server_hostname="localhost")
        self.client: FairTls = made
        self.server = server.wrap_bio(up, down, server_side=True)

    def step(self) -> None:
        """Continue the handshake at both ends."""
        for end in (self.client, self.server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_handshakes_of_a_late_namespace_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can't wait, and each with a chain of slow certificates takes a quarter of a second."""
    budget, seconds = Shares(lambda: 1_000.0), itertools.count()
    one, second, other = Ends("hostile", budget), Ends("hostile", budget), Ends("shop", budget)
    with monkeypatch.context() as patch:
        patch.setattr(time, "thread_time", lambda: next(seconds))
        one.step()
    assert budget.pause_of("hostile") == pytest.approx(1 / SHARE - BURST_SECONDS)
    for late in (one, second):
        with pytest.raises(ssl.SSLError, match="handshakes of this namespace take too long"):
            late.step()
    other.step()
    other.step()
    assert other.client.version() == "TLSv1.3"


def test_records_wait_for_the_share_of_their_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends session tickets without end would keep the event loop busy."""
    now, seconds = 1_000.0, itertools.count()
    budget = Shares(lambda: now)
    ends = Ends("hostile", budget)
    ends.step()
    ends.step()
    ends.client.stop = stop = Mock()
    ends.server.write(b"one")
    ends.server.write(b"two")
    with monkeypatch.context() as patch:
        patch.setattr(time, "thread_time", lambda: next(seconds))
        assert ends.client.read(100) == b"one"
    with pytest.raises(ssl.SSLWantReadError):
        ends.client.read(100)
    stop.assert_called_once()
    now += budget.pause_of("hostile")
    assert ends.client.read(100) == b"two"


async def test_namespace_waits_for_its_share_before_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later, budget = Mock(), Shares(lambda: 1_000.0)
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", later)
    monkeypatch.setattr(time, "thread_time", itertools.count().__next__)
    with budget.using("hostile"):
        pass
    (begin,) = taking_turns(budget).on_connection_create_start

    async def connect(namespace: str) -> None:
        shares.namespace_of_call.set(namespace)
        await begin(Mock(), Mock(), Mock())

    hostile = asyncio.create_task(connect("hostile"))
    await asyncio.create_task(connect("shop"))
    assert not hostile.done()
    ((pause, _, _),) = (call.args for call in later.call_args_list)
    assert pause == budget.pause_of("hostile") > 0
    hostile.cancel()


async def test_call_fails_if_the_handshake_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL verifies 100 KiB of certificates in one step, which takes up to a second."""
    monkeypatch.setattr(shares, "MAX_HANDSHAKE", 100)
    client, server = settings()
    serving = await asyncio.start_server(Mock(), "localhost", ssl=server)
    async with asyncio.timeout(60), serving, Http.open() as http:
        url = f"https://localhost:{serving.sockets[0].getsockname()[1]}"
        with pytest.raises(BrokerUnreachableError, match="a connection without valid TLS"):
            await Admin(http, url, Access.bearer("x", client)).partitions(TopicName("t", "n", "a"))


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
