"""HTTP to brokers over real sockets: limits, credentials and errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import threading
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from prometheus_client import REGISTRY
from yarl import URL

from redrive.admin import client, errors, http
from redrive.admin.access import Access, tls_context
from redrive.admin.client import Admin
from redrive.admin.connector import LOOKUPS_OF_NAMESPACE, FairHandler
from redrive.admin.errors import (
    BrokerFailedError,
    BrokerUnreachableError,
)
from redrive.admin.fair_slots import namespace_of_object
from redrive.admin.http import LONG_ANSWERS_AT_A_TIME, Call, CallSlots, Endpoint, Http
from redrive.admin.shares import (
    BURST_SECONDS,
    SHARE,
    TURN_SECONDS,
    Shares,
    namespace_of_call,
)
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from tests.support.http_servers import Answer, serving
from tests.support.reasons import raises

TOPIC = TopicName("t", "n", "a")
INTERNAL_STATS = {"ledgers": [], "cursors": {}, "lastConfirmedEntry": "1:-1"}


@asynccontextmanager
async def asking(answer: Answer) -> AsyncIterator[tuple[Http, str]]:
    """Serve *answer* on a free port; yield a client and its URL."""
    async with serving(answer) as url, Http.open() as opened:
        yield opened, url


async def trickle(request: web.Request) -> web.StreamResponse:
    """Answer without end, a byte now and then."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.005)


async def test_endless_slow_answer_times_out() -> None:
    call = Call("ask", "GET", "x", seconds=0.1)
    async with asyncio.timeout(60), asking(trickle) as (opened, url):
        with pytest.raises(BrokerUnreachableError, match=r"got 'no whole answer within 0\.1 s'"):
            await opened.send(call, Endpoint(url, Access.bearer("x"), CallSlots(1)))


def test_call_has_a_default_timeout() -> None:
    assert Call("ask", "GET", "x").seconds == 60


async def test_timeout_of_call_starts_with_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = http.CALLS_AT_A_TIME + 5  # some wait for others
    within, begun, requests = http._within, 0, 0  # noqa: SLF001 - where the time of a call begins
    full, back = asyncio.Event(), asyncio.Event()

    def begin(seconds: float) -> AbstractAsyncContextManager[None]:
        nonlocal begun
        begun += 1
        return within(seconds)

    async def answer(_: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        if requests == http.CALLS_AT_A_TIME:
            full.set()
        await back.wait()
        return web.json_response({"partitions": 3})

    monkeypatch.setattr(http, "_within", begin)
    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        call = Call("ask", "GET", "x")
        way = Endpoint(url, Access.bearer("x"), CallSlots(http.CALLS_AT_A_TIME))
        sent = [tasks.create_task(opened.send(call, way)) for _ in range(waiting)]
        await full.wait()
        assert begun == http.CALLS_AT_A_TIME
        back.set()
        assert await asyncio.gather(*sent) == [{"partitions": 3}] * waiting
    assert begun == waiting


async def test_hanging_calls_of_a_connection_delay_no_other() -> None:
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

    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        slow, quick = (Admin(opened, url, Access.bearer(token)) for token in ("slow", "quick"))
        for _ in range(60):
            tasks.create_task(slow.partitions(TOPIC))
        await full.wait()
        assert await quick.partitions(TOPIC) == 3
        assert hung == http.CALLS_AT_A_TIME
        back.set()
    assert hung == 60


async def test_hanging_name_server_of_a_namespace_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up, answered, hanging = socket.getaddrinfo, threading.Event(), asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def hang(host: str, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if host != "localhost":
            loop.call_soon_threadsafe(hanging.release)
            answered.wait()
        return look_up("localhost", *arguments, **options)

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"partitions": 3})

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        hosts = [*(f"host-{number}" for number in range(40)), "localhost"]

        def ask(host: str, namespace: str) -> asyncio.Task[int]:
            address, access = f"http://{host}:{URL(url).port}", Access.bearer("x")
            admin = Admin(opened, address, access, namespace=namespace)
            return tasks.create_task(admin.partitions(TOPIC))

        sent = [ask(host, "hostile") for host in hosts]
        for _ in range(LOOKUPS_OF_NAMESPACE):
            await hanging.acquire()
        assert await ask("localhost", "shop") == 3
        assert hanging.locked()
        assert not any(call.done() for call in sent)
        answered.set()
        assert await asyncio.gather(*sent) == [3] * len(sent)


async def test_slow_parses_pause_the_reading_of_their_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that sends chunks of one byte without end would keep the event loop busy."""
    now, seconds = 1_000.0, itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    later = Mock()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", later)
    shares = Shares(lambda: now)

    def connected(namespace: str) -> tuple[FairHandler, Mock]:
        namespace_of_call.set(namespace)
        handler, transport = FairHandler(shares), Mock()
        handler.set_response_params()
        handler.connection_made(transport)
        return handler, transport

    def counts() -> list[tuple[int, int]]:
        return [(t.pause_reading.call_count, t.resume_reading.call_count) for t in transports]

    answer = b"HTTP/1.1 102 Processing\r\n\r\n"
    (hostile, first), (_, second) = connected("hostile"), connected("hostile")
    hostile.data_received(answer)
    hostile.resume_reading(resume_parser=False)  # by the library, which has read its buffer
    (reused, fourth), (_, fifth) = connected("hostile"), connected("shop")
    transports = (first, second, connected("hostile")[1], fourth, fifth)
    namespace_of_call.set("shop")
    reused.set_response_params()  # another namespace has a connection to the same broker
    assert counts() == [(1, 0), (0, 0), (1, 0), (1, 1), (0, 0)]

    ((pause, resume, namespace),) = (call.args for call in later.call_args_list)
    assert pause == pytest.approx(1 / SHARE - BURST_SECONDS)
    now += pause
    resume(namespace)
    assert [count for count in counts() if count == (1, 0)] == [(1, 0)]
    resume(namespace)
    resume(namespace)
    assert counts() == [(1, 1), (0, 0), (1, 1), (1, 2), (0, 0)]
    assert {call.args[0] for call in later.call_args_list[1:]} == {TURN_SECONDS}


async def test_concurrent_calls_of_all_connections_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "SLOW_SECONDS", 60)  # also where the machine is busy
    now = most = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.05)
        now -= 1
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(60), asking(answer) as (opened, url):
        admins = [Admin(opened, url, Access.bearer(str(number))) for number in range(8)]
        calls = [admin.partitions(TOPIC) for admin in admins for _ in range(20)]
        assert len(calls) > http.CALLS_OF_ALL
        await asyncio.gather(*calls)
    assert most == http.CALLS_OF_ALL


async def test_crowd_of_calls_delays_no_other_namespace() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        await asyncio.sleep(0.01)
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        shared = Admin(opened, url, Access.bearer("x"))

        def ask(name: str, namespace: str) -> None:
            namespace_of_object.set(namespace)
            tasks.create_task(shared.partitions(TopicName("t", "n", name)))

        for number in range(10 * http.CALLS_AT_A_TIME):
            ask(f"a-{number}", "crowd")
        ask("orders", "shop")
    place = next(place for place, path in enumerate(asked) if "orders" in path)
    assert place <= 2 * http.CALLS_AT_A_TIME


async def test_many_hanging_connections_delay_no_other() -> None:
    back = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.headers["Authorization"] != "Bearer quick":
            await back.wait()
        return web.json_response({"partitions": 3})

    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        for number in range(12):
            slow = Admin(opened, url, Access.bearer(str(number)))
            for _ in range(20):
                tasks.create_task(slow.partitions(TOPIC))
        await asyncio.sleep(0)
        assert await Admin(opened, url, Access.bearer("quick")).partitions(TOPIC) == 3
        assert not back.is_set()
        back.set()


async def test_hanging_probe_times_out_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    back = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await back.wait()
        return web.json_response(["here"])

    async with asyncio.timeout(60), asking(answer) as (opened, url):
        admin = Admin(opened, url, Access.bearer("x"))
        with monkeypatch.context() as patch:
            patch.setattr(client, "PROBE_TIMEOUT_SECONDS", 0.1)
            with pytest.raises(BrokerUnreachableError, match=r"no whole answer within 0\.1 s"):
                await admin.clusters()
        back.set()
        assert await admin.clusters() == {"here"}


async def test_cookies_of_a_broker_are_not_sent() -> None:
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


async def endless(request: web.Request) -> web.StreamResponse:
    """Answer without end, as fast as may be."""
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(bytes(2**16))


async def test_oversized_answer_is_not_read_to_its_end() -> None:
    counted = {"verb": "GET", "status": "too long"}
    before = REGISTRY.get_sample_value("redrive_admin_calls_total", counted) or 0
    async with asyncio.timeout(60), asking(endless) as (opened, url):
        admin = Admin(opened, url, Access.bearer("x"))
        with raises(Reason.UNEXPECTED_ANSWER, match="got 'an answer of more than 1 MiB'"):
            await admin.partitions(TOPIC)
        with raises(Reason.UNEXPECTED_ANSWER, match="got 'an answer of more than 1 MiB'"):
            await admin.clusters()
        with raises(Reason.UNEXPECTED_ANSWER, match="got 'an answer of more than 24 MiB'"):
            await admin.internal_stats(TOPIC)
        with raises(Reason.ISSUER_FAILED, match="got 'an answer of more than 64 KiB'"):
            await opened.ask_issuer("GET", url, None, Endpoint(url, Access(), CallSlots(1)))
    assert REGISTRY.get_sample_value("redrive_admin_calls_total", counted) == before + 3


async def test_call_without_usable_proxy_counts_as_uncallable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = {"verb": "GET", "status": "uncallable"}
    before = REGISTRY.get_sample_value("redrive_admin_calls_total", counted) or 0
    monkeypatch.setenv("HTTP_PROXY", "socks5://proxy:1080")
    async with Http.open() as opened:
        with raises(Reason.PROXY_INVALID, match="got 'socks5://proxy:1080'"):
            await Admin(opened, "http://broker:8080", Access.bearer("x")).clusters()
    assert REGISTRY.get_sample_value("redrive_admin_calls_total", counted) == before + 1


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-hidden\r\n",
        b"hidden: value\n" * 3,
        b"HTTP/1.1 hidden\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nhidden\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhidden\r\nvalue",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhidden",
        b"",
    ],
)
async def test_answer_that_is_not_http_is_not_shown(sent: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, Http.open() as opened:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BrokerUnreachableError) as unreachable:
            await Admin(opened, url, Access.bearer("x")).clusters()
        with raises(Reason.ISSUER_FAILED) as failed:
            await opened.ask_issuer("GET", url, None, Endpoint(url, Access(), CallSlots(1)))
    shown = (
        "an answer that is not complete, valid HTTP"
        if sent
        else "the connection was closed without an answer"
    )
    for message in (str(unreachable.value), str(failed.value)):
        assert f"got '{shown}';" in message
        assert "hidden" not in message


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (aiohttp.ServerTimeoutError("Timeout on http://hidden"), "no answer in time"),
        (TimeoutError("no whole answer within 3 s"), "no whole answer within 3 s"),
        (ConnectionRefusedError(111, "Connect call failed ('10.0.0.1', 1)"), "Connection refused"),
        (ssl.SSLError(1, "[SSL: hidden]"), "a connection without valid TLS"),
        (aiohttp.ClientError("hidden"), "ClientError"),
    ],
)
def test_transport_failure_names_its_kind(error: Exception, shown: str) -> None:
    assert http.transport_failure(error) == shown


async def test_unknown_host_is_named_as_unknown() -> None:
    async with Http.open() as opened:
        with pytest.raises(BrokerUnreachableError, match="the host name is unknown"):
            await Admin(opened, "http://host.invalid:1", Access.bearer("x")).clusters()


async def test_endless_error_is_read_only_in_part() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(status=500)
        await answer.prepare(request)
        while True:
            await answer.write(b"[" * 2**16)

    async with asyncio.timeout(60), asking(refuse) as (opened, url):
        with pytest.raises(BrokerFailedError):
            await Admin(opened, url, Access.bearer("x")).clusters()


async def test_answer_of_maximum_length_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text='["here"]')

    call = Call("ask", "GET", "x", longest=len('["here"]'))
    async with asking(answer) as (opened, url):
        way = Endpoint(url, Access.bearer("x"), CallSlots(1))
        assert await opened.send(call, way) == ["here"]
        # In turn, too.
        monkeypatch.setattr(http, "SHORT_ANSWER", 1)
        assert await opened.send(call, way) == ["here"]


async def test_list_of_hundred_thousand_topics_is_read() -> None:
    names = [f"persistent://a-tenant/a-namespace/topic-{number:06}" for number in range(100_000)]

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([] if request.path.endswith("/partitioned") else names)

    async with asyncio.timeout(30), asking(answer) as (opened, url):
        topics, _ = await Admin(opened, url, Access.bearer("x")).topics("a-tenant/a-namespace")
    assert topics == set(names)


@pytest.mark.parametrize(
    ("bomb", "shown"),
    [
        (b"[" + b"[]," * 1_100_000 + b"[]]", "JSON of more than 1000000 values"),
        (b"[" * 900_000 + b"]" * 900_000, "JSON that is nested too deeply"),
        (b"{" + b'"":{},' * 1_100_000 + b'"":{}}', "JSON of more than 1000000 values"),
    ],
    ids=["lists", "deep", "objects"],
)
async def test_json_that_would_exhaust_memory_is_not_parsed(bomb: bytes, shown: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=bomb, content_type="application/json")

    async with asyncio.timeout(30), asking(answer) as (opened, url):
        admin = Admin(opened, url, Access.bearer("x"))
        tracemalloc.start()
        try:
            with raises(Reason.UNEXPECTED_ANSWER) as caught:
                await admin.internal_stats(TOPIC)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert str(caught.value) == (
        "adminURL does not lead to a Pulsar admin API: unexpected response to "
        f'"read the internal state of persistent://t/n/a"; got {shown!r}; correct adminURL: the '
        "address of the admin REST API, "
        "without /admin/v2"
    )
    assert peak < 40 * 2**20


NUMBERS = ("60000000", "-1", "1e308", "1e999", "NaN", "-Infinity", "9" * 30, "9" * 5_000, '"x"',
           "null", "[]", "{}")  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12])
async def test_absurd_partitions_are_no_brokers_answer(number: str) -> None:
    """Each call that reads a number of partitions, within memory for few."""
    metadata = f'{{"partitions": {number}, "properties": {{}}}}'

    async def answer(request: web.Request) -> web.Response:
        stats = f'{{"metadata": {metadata}, "partitions": {{}}}}'
        return web.Response(text=stats if "stats" in request.path else metadata)

    async with asyncio.timeout(30), asking(answer) as (opened, url):
        admin = Admin(opened, url, Access.bearer("x"))
        tracemalloc.start()
        try:
            for call in (
                admin.partitions(TOPIC),
                admin.metadata(TOPIC, partitioned=True),
                admin.subscriptions(TOPIC, partitioned=True),
                admin.receivers(TOPIC, partitioned=True),
                admin.usage(TOPIC, partitioned=True, subscription="s"),
            ):
                with raises(Reason.UNEXPECTED_ANSWER):
                    await call
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 10 * 2**20


async def test_compressed_answer_is_not_expanded() -> None:
    asked: list[str] = []
    body = zlib.compress(b"[" + b" " * (100 * 2**20))  # takes longer than an answer may

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept-Encoding"])
        return web.Response(body=body, headers={"Content-Encoding": "deflate"})

    async with asyncio.timeout(30), asking(answer) as (opened, url):
        with raises(Reason.UNEXPECTED_ANSWER):
            await Admin(opened, url, Access.bearer("x")).clusters()
    assert asked == ["identity"]


async def test_long_answer_is_read_in_a_thread() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b" " * (http.SHORT_ANSWER + 1) + b"[]")

    async with asyncio.timeout(30), asking(answer) as (opened, url):
        read = Call("ask", "GET", "x", read=lambda _: threading.current_thread())
        thread = await opened.send(read, Endpoint(url, Access.bearer("x"), CallSlots(1)))
    assert thread is not threading.main_thread()


async def test_slow_long_answers_of_a_namespace_delay_no_other() -> None:
    slow, release = asyncio.Semaphore(0), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        long = web.StreamResponse()
        await long.prepare(request)
        await long.write(b" " * 2**17)
        if request.headers["Authorization"] != "Bearer good":
            slow.release()
            await release.wait()
        await long.write(json.dumps(INTERNAL_STATS).encode())
        return long

    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        for number in range(10):
            hostile = Admin(opened, url, Access.bearer(str(number)), namespace="hostile")
            tasks.create_task(hostile.internal_stats(TOPIC))
        for _ in range(10):
            await slow.acquire()
        good = Admin(opened, url, Access.bearer("good"), namespace="good")
        async with asyncio.timeout(http.LONG_ANSWER_SECONDS / 2):
            assert await good.internal_stats(TOPIC) == INTERNAL_STATS
        release.set()


async def test_long_answers_are_limited_in_all_and_per_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LONG_ANSWER_SECONDS", 60.0)  # they are read in shares of the time
    now, most = Counter[str](), Counter[str]()
    full, release = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        token, long = request.headers["Authorization"], web.StreamResponse()
        await long.prepare(request)
        # More than buffers hold on the way: this comes to its end if it is read.
        await long.write(b" " * (200 * 2**16))
        now.update([token, "all"])
        for key in (token, "all"):
            most[key] = max(most[key], now[key])
        if now["all"] == LONG_ANSWERS_AT_A_TIME:
            full.set()
        await release.wait()
        now.subtract([token, "all"])
        await long.write(json.dumps(INTERNAL_STATS).encode())
        return long

    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        admins = [
            Admin(opened, url, Access.bearer(str(number)), namespace=str(number))
            for number in range(6)
        ]
        reads = [tasks.create_task(a.internal_stats(TOPIC)) for a in admins for _ in range(2)]
        await full.wait()
        release.set()
        assert await asyncio.gather(*reads) == [INTERNAL_STATS] * len(reads)
    assert most.pop("all") == LONG_ANSWERS_AT_A_TIME
    assert set(most.values()) == {1}


async def test_slow_long_answer_frees_its_slot_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "LONG_ANSWER_SECONDS", 3.0)
    trickling = asyncio.Semaphore(0)

    async def answer(request: web.Request) -> web.StreamResponse:
        long = web.StreamResponse()
        await long.prepare(request)
        await long.write(b" " * 2**17)
        while request.headers["Authorization"] != "Bearer good":
            trickling.release()
            await long.write(b" ")
            await asyncio.sleep(0.01)
        await long.write(json.dumps(INTERNAL_STATS).encode())
        return long

    async with asyncio.timeout(60), asking(answer) as (opened, url), asyncio.TaskGroup() as tasks:
        refusals = [
            tasks.create_task(_refused(Admin(opened, url, Access.bearer(str(number)))))
            for number in range(LONG_ANSWERS_AT_A_TIME)
        ]
        for _ in refusals:
            await trickling.acquire()
        assert (
            await Admin(opened, url, Access.bearer("good")).internal_stats(TOPIC) == INTERNAL_STATS
        )
        for refusal in refusals:
            assert "no whole answer of more than 64 KiB within 3 s" in await refusal


async def _refused(admin: Admin) -> str:
    with pytest.raises(BrokerUnreachableError) as caught:
        await admin.internal_stats(TOPIC)
    return str(caught.value)


AUTHORITY = trustme.CA()


def issued(name: str) -> tuple[bytes, bytes]:
    issue = AUTHORITY.issue_cert(common_name=name)
    return issue.cert_chain_pems[0].bytes(), issue.private_key_pem.bytes()


def test_handshake_uses_no_group_of_the_servers_choice() -> None:
    """With DHE, a group of 10,000 bits blocks the event loop for a second."""
    for context in (http.default_tls(), tls_context(ca=AUTHORITY.cert_pem.bytes().decode())):
        ciphers = context.get_ciphers()
        assert {cipher["kea"] for cipher in ciphers} == {"kx-any", "kx-ecdhe"}


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ({"ca": "x" * 2**20}, "1048576 bytes, more than 524288"),
        ({"certificate": b"x" * 2**20, "key": b""}, "1048576 bytes, more than 65536"),
        ({"certificate": b"", "key": b"x" * 13_000}, "13000 bytes, more than 4096"),
    ],
)
def test_tls_files_that_take_long_are_refused(files: Any, shown: str) -> None:  # noqa: ANN401
    """One event loop serves all connections, and OpenSSL blocks it."""
    with pytest.raises(ValueError, match=shown):
        tls_context(**files)


def test_tls_context_accepts_certificate_with_its_key() -> None:
    certificate, key = issued("operator")
    made = tls_context(ca=AUTHORITY.cert_pem.bytes().decode(), certificate=certificate, key=key)
    assert made.check_hostname
    assert len(made.get_ca_certs()) == 1  # no other is trusted


def test_tls_context_refuses_invalid_files_without_content() -> None:
    certificate, key = issued("operator")
    _, other = issued("another")
    protected = serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hunter2"),
    )
    for wrong in (other, b"garbage", b"", protected):
        with pytest.raises(ValueError, match=r"^[\w ]+$"):
            tls_context(certificate=certificate, key=wrong)
    for nothing in ("", "\n", "garbage"):
        with pytest.raises(ValueError, match=r"^[\w :]+$"):
            tls_context(ca=nothing)


async def test_bearer_access_hides_its_token_and_is_not_renewed() -> None:
    access = Access.bearer("hunter2")
    assert "hunter2" not in repr(access)
    assert access.held is access
    assert await access.renewed(access) is None


@pytest.mark.parametrize(
    ("pattern", "host", "named"),
    [
        ("broker-*.pulsar.svc", "broker-1.pulsar.svc", True),
        ("Broker-*.pulsar.svc", "broker-1.PULSAR.svc", True),
        ("broker-*.pulsar.svc", "broker-1.evil.pulsar.svc", False),
        ("broker-*", "broker-1.evil", False),
        ("*", "broker", True),
        ("*", "broker.evil", False),
        ("[fd00::*]", "[fd00::1]", True),
        ("*a" * 60 + "b", "a" * 253, False),
    ],
)
def test_host_wildcard_matches_no_dot(pattern: str, host: str, *, named: bool) -> None:
    access = Access(hosts=(pattern,))
    assert access.may_go_to(URL(f"http://{host}/x"), URL("http://admin")) is named


@pytest.mark.parametrize(
    ("origin", "target", "allowed"),
    [
        ("http://admin:8080", "http://ADMIN:8080/x", True),
        ("https://admin", "https://admin:443", True),
        ("https://admin", "https://admin:8443", False),
        ("https://admin", "http://admin:443", False),
        ("http://admin", "https://admin:80", False),
        ("http://admin:8080", "http://same:8080", True),
        ("http://admin:8080", "http://same", False),
        ("http://admin:8080", "http://other:81", True),
        ("http://admin:8080", "http://other:8080", False),
        ("https://admin", "http://other:81", False),
        ("http://admin", "http://[::1]:81", True),
        ("http://admin:81", "http://[::1]:80", False),
        ("http://admin", "http:///x", False),
    ],
)
def test_redirect_needs_same_scheme_and_named_port(
    origin: str, target: str, *, allowed: bool
) -> None:
    access = Access(hosts=("same", "other:81", "[::1]:81"))
    assert access.may_go_to(URL(target, encoded=True), URL(origin)) is allowed


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (401, "<html><title>Error 401 Authentication required</title>", "AuthenticationFailed"),
        (401, '{"reason":"Unauthorized to validateTopicOperation for …"}', "Forbidden"),
        (401, '{"reason":"Don\'t have permission to administrate …"}', "Forbidden"),
        (403, '{"reason":"Unauthorized to validateNamespaceOperation for …"}', "Forbidden"),
        (404, '{"reason":"Namespace does not exist"}', "NotFound"),
        (405, "", "Unsupported"),
        (409, '{"reason":"This topic already exists"}', "BrokerConflict"),
        (429, "", "BrokerFailed"),
        (500, "…", "BrokerFailed"),
        (422, "", "BrokerRefused"),
        (503, '{"reason":"The topic is being moved"}', "BrokerFailed"),
        (502, "<html><title>502 Bad Gateway</title>", "BrokerUnreachable"),
        (503, "<html><title>503 Service Temporarily Unavailable</title>", "BrokerUnreachable"),
        (504, "", "BrokerUnreachable"),
    ],
)
def test_error_reason_follows_status_and_body(status: int, answer: str, kind: str) -> None:
    assert errors.error_for("read x", status, answer).reason == kind


@pytest.mark.parametrize(
    ("answer", "reason", "remedy"),
    [
        (
            "Topic[persistent://a/b/c] doesn't support Exclusive sub type!",
            "SubscriptionTypeNotAllowed",
            "allow this type in subscriptionTypesEnabled of the topic",
        ),
        (
            "Topic reached max same address consumers limit",
            "LimitReached",
            "raise maxSameAddressConsumersPerTopic in the configuration of the brokers",
        ),
        (
            "Topic 'persistent://a/b/c' reached max same address producers limit",
            "LimitReached",
            "raise maxSameAddressProducersPerTopic in the configuration of the brokers",
        ),
        (
            "Encryption is required in persistent://a/b/c",
            "EncryptionRequired",
            "of the Pulsar namespace, or encryptionRequireOnProducer of the brokers",
        ),
    ],
)
def test_refusal_by_a_setting_names_the_setting(answer: str, reason: str, remedy: str) -> None:
    error = errors.refused_by_setting("the broker refused it", answer)
    assert error is not None
    assert error.reason == reason
    assert remedy in str(error)


def test_error_message_is_one_line_with_call_and_remedy() -> None:
    error = errors.error_for("read namespace a/b", 500, '{"reason":"\\n --- broken\\n\\n  here"}')
    assert str(error) == (
        "the broker refused to read namespace a/b; got '500 --- broken here'; "
        "the operator retries; if it persists, check the broker's log"
    )


def test_error_message_replaces_unprintable_characters() -> None:
    error = errors.error_for("read x", 500, '{"reason": "\\u001b[31mred\\u0000\u202eder"}')
    assert "got '500 \ufffd[31mred\ufffd\ufffdder'" in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        "hidden",
        "<html><title>hidden</title>",
        '{"message": "hidden"}',
        '{"kind": "Status", "reason": "hidden"}',
        '{"reason": {"hidden": 1}}',
        '["reason", "hidden"]',
    ],
)
def test_error_body_not_of_pulsar_is_not_shown(answer: str) -> None:
    for status in (400, 401, 404, 500, 503):
        error = errors.error_for("read x", status, answer)
        assert "hidden" not in str(error)
        assert f"{status} and {len(answer)} characters" in str(error)
