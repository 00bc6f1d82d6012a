"""Servers in a thread before others: an admin API whose chosen calls fail, and a relay of bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

START_SECONDS = 30


@contextmanager
def in_thread(
    serving: Callable[[], AbstractAsyncContextManager[None]], name: str
) -> Iterator[None]:
    """Serve while the block runs.

    The event loop ends like that of a program: tasks are cancelled and awaited, and transports
    get the iteration of the loop in which they close their sockets.
    """
    began, loop, enough = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving():
            began.set()
            await enough.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        assert began.wait(START_SECONDS), f"{name} did not start"
        yield
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(enough.set)
        thread.join()


async def stop_accepting(listener: socket.socket) -> None:
    """Accept no more connections, and wait until each accepted one can be closed.

    The event loop accepts a connection in one iteration, and creates its transport in a later one.
    If the server is closed in between, the socket of that connection stays open.
    """
    asyncio.get_running_loop().remove_reader(listener)
    for _ in range(5):
        await asyncio.sleep(0)


class Relay:
    """Passes bytes on to a port of this machine, in a thread.

    Attributes:
        port: of the relay.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    @contextmanager
    def before(cls, target: int) -> Iterator[Relay]:
        """Relay until the block ends."""
        relay = cls(target)
        with in_thread(relay._serving, name="relay"):
            yield relay

    def cut(self) -> None:
        """Cut all connections, and refuse new ones until `accept`."""
        self._open = False
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(30)

    def accept(self) -> None:
        """Accept connections again."""
        self._open = True

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        server = await asyncio.start_server(self._relay, sock=listener)
        self.port = listener.getsockname()[1]
        try:
            yield
        finally:
            await stop_accepting(listener)
            server.close()
            await self._cut()

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        answers, back = await asyncio.open_connection("127.0.0.1", self._target)
        task, mine = asyncio.current_task(), {writer, back}
        assert task is not None
        self._relays.add(task)
        self._writers |= mine
        try:
            await asyncio.gather(_pump(reader, back), _pump(answers, writer))
        finally:
            self._writers -= mine
            self._relays.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


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
