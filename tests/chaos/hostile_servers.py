"""Servers with random answers: an admin API of an attacker, and a relay before an API server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

from tests.chaos.proxy import in_thread, stop_accepting
from tests.unit.admin.test_answers import HOSTILE, INTERNAL, PARTS, POLICIES, SETTINGS

_SHAPES = tuple(map(json.dumps, (PARTS, INTERNAL, POLICIES, SETTINGS, {"partitions": 1}, [])))
"""Answers of the form of a broker's."""
_BODIES = (*HOSTILE, *_SHAPES, "", "<html>no</html>", "{", '{"a":' * 50_000, "\u2028" * 9)
_STATUSES = (200, 200, 204, 401, 403, 404, 409, 412, 429, 500, 503, 599)
_DRIP_SECONDS = 0.5


class HostileBroker:
    """An admin API that answers at random, whatever the request is.

    Attributes:
        url: of the API.
        credentials: the values of `Authorization` that it was sent.
        answers: the number of its answers.
    """

    def __init__(self, chosen: random.Random, elsewhere: str) -> None:
        self._chosen = chosen
        self._elsewhere = elsewhere
        self.url = ""
        self.credentials: set[str] = set()
        self.answers = 0
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @classmethod
    @contextmanager
    def serving(cls, chosen: random.Random, elsewhere: str) -> Iterator[Self]:
        """Serve in a thread until the block ends; some answers redirect to *elsewhere*."""
        broker = cls(chosen, elsewhere)
        with in_thread(broker._serving, name="hostile broker"):
            yield broker

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        listener = socket.create_server(("127.0.0.1", 0))
        server = await asyncio.start_server(self._connected, sock=listener)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield
        finally:
            await stop_accepting(listener)
            server.close()
            for writer in self._open.values():
                writer.transport.abort()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = writer
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await self._answer(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        del self._open[task]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
        for line in head.splitlines():
            if line.lower().startswith("authorization:"):
                self.credentials.add(line.partition(":")[2].strip())
        self.answers += 1
        for part in self._parts():
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(_DRIP_SECONDS if len(part) == 1 else 0)

    def _parts(self) -> Iterator[bytes]:
        """Yield an answer; its parts of one byte are sent slowly."""
        kind, body = self._chosen.randrange(8), self._chosen.choice(_BODIES).encode()
        if kind == 0:
            yield from self._chosen.choice([(b"SSH-2.0-x\r\n",), (b"\0" * 9_000,), ()])
        elif kind == 1:
            port = self._chosen.randrange(1, 2**16)
            targets = (self._elsewhere, f"http://127.0.0.1:{port}", "//169.254.169.254", "/", "x:")
            location = f"Location: {self._chosen.choice(targets)}/admin/v2/clusters\r\n"
            yield _head(self._chosen.choice([301, 302, 307, 308]), 0, location)
        elif kind == 2:
            yield _head(200, 2**40)
            yield b"[" * 2_000_000
        elif kind == 3:
            yield _head(200, 20)
            yield from (b"7" for _ in range(20))
        else:
            yield _head(self._chosen.choice(_STATUSES), len(body))
            yield body


def _head(status: int, length: int, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} x\r\nContent-Length: {length}\r\n{more}\r\n".encode()


_REFUSALS = (400, 401, 403, 409, 422, 429, 500, 502, 503, 504)
_WRONG = (*HOSTILE, "", "<html>no</html>", "{", '{"metadata": 7}', '{"message": []}', "[" * 50_000)
_PASSED = ("Authorization", "Content-Type", "Accept")


class FaultyApiServer:
    """A relay before an API server that answers a share of the requests wrongly.

    It refuses a request without passing it on, or passes it on and replaces the answer, or cuts the
    connection. It passes watches and lists on; `tests/unit/cli/test_operator_faults.py` has those.

    Attributes:
        port: of the relay.
        share: of the requests that are answered wrongly.
        faults: the number of wrong answers.
    """

    def __init__(self, target: int, certificate: ssl.SSLContext, chosen: random.Random) -> None:
        self._target = target
        self._certificate = certificate
        self._chosen = chosen
        self.port = 0
        self.share = 0.0
        self.faults = 0

    @classmethod
    @contextmanager
    def before(cls, target: int, identity: Path, chosen: random.Random) -> Iterator[Self]:
        """Serve in a thread until the block ends, with the certificate in *identity*."""
        certificate = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate.load_cert_chain(identity / "server.crt", identity / "server.key")
        relay = cls(target, certificate, chosen)
        with in_thread(relay._serving, name="faulty API server"):
            yield relay

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        connector = aiohttp.TCPConnector(ssl=False)
        forever = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=forever) as self._session:
            await runner.setup()
            try:
                listener = socket.create_server(("127.0.0.1", 0))
                await web.SockSite(runner, listener, ssl_context=self._certificate).start()
                self.port = listener.getsockname()[1]
                yield
                await stop_accepting(listener)
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        is_listed = "watch" in request.query or "limit" in request.query
        if is_listed or self._chosen.random() >= self.share:
            return await self._relayed(request)
        self.faults += 1
        wrong = web.Response(text=self._chosen.choice(_WRONG), content_type="application/json")
        if self._chosen.random() < 1 / 3:
            wrong.set_status(self._chosen.choice(_REFUSALS))
            return wrong
        if self._chosen.random() < 1 / 2:
            await self._asked(request)
        if self._chosen.random() < 1 / 2 and request.transport is not None:
            request.transport.close()
        return wrong

    async def _relayed(self, request: web.Request) -> web.StreamResponse:
        """Relay the answer in parts, as those of a watch come."""
        async with await self._request(request) as answer:
            relayed = web.StreamResponse(status=answer.status)
            relayed.content_type = answer.content_type
            await relayed.prepare(request)
            with suppress(OSError):
                async for part in answer.content.iter_any():
                    await relayed.write(part)
            return relayed

    async def _asked(self, request: web.Request) -> None:
        async with await self._request(request) as answer:
            await answer.read()

    async def _request(self, request: web.Request) -> aiohttp.ClientResponse:
        url = URL(f"https://127.0.0.1:{self._target}{request.raw_path}", encoded=True)
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        body = await request.read()
        return await self._session.request(request.method, url, data=body or None, headers=headers)
