"""A proxy before a broker's admin API that makes chosen calls fail."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from tests.chaos.threads import in_thread, stop_accepting

Do = Callable[[], Awaitable[web.Response]]
Fault = Callable[[web.Request, Do], Awaitable[web.StreamResponse]]
"""A fault of one call."""

SHOWN = frozenset({"Content-Type", "Location"})


@dataclass
class Trap:
    """Waits for a call, and applies a fault to it.

    Attributes:
        about: a text in the call's method, path and body, joined by spaces; empty matches any.
        number: of the matching call that fails, counted from 1; 0 for none.
        fault: the fault.
        count: the number of matching calls.
        sprung: set after the fault.
    """

    about: str
    number: int
    fault: Fault
    count: int = 0
    sprung: threading.Event = field(default_factory=threading.Event)

    def comes(self) -> bool:
        """Count a matching call; return True if it is the one that fails."""
        self.count += 1
        if self.count == self.number:
            self.sprung.set()
        return self.count == self.number


class Proxy:
    """Passes calls on to *target*. Periodic reads of statistics match no trap.

    Attributes:
        url: of the proxy.
        traps: compared with every call.
        witness: called with the connection of a write before it is passed on.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.url = ""
        self.traps: list[Trap] = []
        self.witness: Callable[[asyncio.BaseTransport], None] = _ignore

    @classmethod
    @contextmanager
    def before(cls, target: str) -> Iterator[Proxy]:
        """Serve in a thread until the block ends."""
        proxy = cls(target)
        with in_thread(proxy._serving, name="proxy"):
            yield proxy

    @contextmanager
    def trap(self, about: str, number: int, fault: Fault) -> Iterator[Trap]:
        """Set a trap until the block ends."""
        trap = Trap(about, number, fault)
        self.traps.append(trap)
        try:
            yield trap
        finally:
            self.traps.remove(trap)

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        async with aiohttp.ClientSession() as self._session:
            await runner.setup()
            try:
                listener = socket.create_server(("127.0.0.1", 0))
                await web.SockSite(runner, listener).start()
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                yield
                await stop_accepting(listener)
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method != "GET" and request.transport is not None:
            self.witness(request.transport)

        async def do() -> web.Response:
            return await self._do(request, body)

        if "stats" in request.path:
            return await do()
        text = f"{request.method} {request.path} {body.decode()}"
        due = [trap for trap in list(self.traps) if trap.about in text and trap.comes()]
        if due:  # a call may match several traps, and fails once
            return await due[0].fault(request, do)
        return await do()

    async def _do(self, request: web.Request, body: bytes) -> web.Response:
        url = URL(f"{self._target}{request.raw_path}", encoded=True)
        headers = {
            k: v for k, v in request.headers.items() if k in {"Authorization", "Content-Type"}
        }
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k in SHOWN}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
        except aiohttp.ClientError:
            _cut(request)  # like the broker
            return web.Response(status=502)


def answering(status: int) -> Fault:
    """Return a fault that refuses with *status*."""

    async def refuse(_: web.Request, __: Do) -> web.Response:
        return web.json_response({"reason": f"injected {status}"}, status=status)

    return refuse


async def passing(_: web.Request, do: Do) -> web.StreamResponse:
    """Pass the call on, to count it."""
    return await do()


async def hanging(_: web.Request, do: Do) -> web.StreamResponse:
    """Neither execute nor answer the call for longer than any time-out."""
    await asyncio.sleep(120)
    return await do()


async def done_but_not_told(request: web.Request, do: Do) -> web.StreamResponse:
    """Execute the call, and cut the connection instead of answering."""
    answer = await do()
    _cut(request)
    return answer


def done_then(act: Callable[[], None]) -> Fault:
    """Return a fault that executes the call and then *act*, before the answer."""

    async def fault(_: web.Request, do: Do) -> web.StreamResponse:
        answer = await do()
        act()
        return answer

    return fault


def _ignore(_: asyncio.BaseTransport) -> None:
    """Ignore a write."""


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.close()
