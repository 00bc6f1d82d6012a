"""Connections to brokers: lookups of hosts and the reading of answers, fair among namespaces.

*Lookups.* A lookup by the C library can't be cancelled, and may wait for a name server for a
minute. In the threads that the whole process shares, hosts of one connection whose name server
never answers would delay the calls of all connections. A cache that namespaces share would do so,
too: a call would wait for the lookup of another namespace, which waits for that namespace's
threads.

*Reading.* The HTTP library parses all that a socket has, before anything else runs. A server that
sends chunks of one byte, or informational responses without end, would keep the event loop busy.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler

from redrive.admin.fair_slots import FairSlots

LOOKUPS = 64
"""Maximum threads."""
LOOKUPS_OF_NAMESPACE = 4
"""Maximum threads of one namespace, so that others find a free one."""
CACHE_SECONDS = 10.0
READ_BYTES = 2**12
"""Maximum bytes that are parsed at once: 680 chunks of one byte."""
READING_SHARE = 0.25
"""Share of the processor time that a namespace may use for parsing. A thousand answers of brokers
in a second take less."""
BURST_SECONDS = 0.1
"""Time whose share a namespace may use at once."""
TURN_SECONDS = 0.005
"""Time in which a connection that may read again parses what it has."""
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_Key = tuple[str, str, int, socket.AddressFamily]
_Addresses = list[ResolveResult]

namespace_of_call: ContextVar[str] = ContextVar("namespace_of_call", default="")
"""Namespace of the connection that the current task sends a call for."""


def connector() -> aiohttp.TCPConnector:
    """Return the connections of a session."""
    made = aiohttp.TCPConnector(limit=0, use_dns_cache=False, resolver=FairResolver())
    factory: Any = functools.partial(FairHandler, ReadingShares())
    made._factory = factory  # noqa: SLF001  the library has no parameter for it
    return made


class ReadingShares:
    """Time that namespaces have used for parsing, and connections that wait for their share.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        self._waiting = defaultdict[str, deque[Callable[[], None]]](deque)

    def use(self, namespace: str, seconds: float) -> None:
        """Record the processor time of a parse."""
        began = max(self._until.get(namespace, 0.0), self._clock() - BURST_SECONDS)
        self._until[namespace] = began + seconds / READING_SHARE

    def pause_of(self, namespace: str) -> float:
        """Return the seconds for which a namespace may not read; 0 if it may."""
        return max(0.0, self._until.get(namespace, 0.0) - self._clock())

    def wait(self, namespace: str, resume: Callable[[], None]) -> None:
        """Call *resume* once the namespace may read, after others that wait."""
        self._waiting[namespace].append(resume)
        if len(self._waiting[namespace]) == 1:
            self._continue_in(self.pause_of(namespace), namespace)

    def _continue_in(self, seconds: float, namespace: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._continue, namespace)

    def _continue(self, namespace: str) -> None:
        waiting, pause = self._waiting[namespace], self.pause_of(namespace)
        if not pause:
            waiting.popleft()()
        if waiting:  # all at once would block the event loop
            self._continue_in(max(pause, TURN_SECONDS), namespace)


class FairHandler(ResponseHandler):
    """Parser of the answers of one connection, which pauses with its namespace."""

    def __init__(self, shares: ReadingShares) -> None:
        super().__init__(asyncio.get_running_loop())
        self._shares = shares
        self._namespace = namespace_of_call.get()
        self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read, or to pause."""
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports
        super().connection_made(transport)
        self._pause()

    def set_response_params(self, **parameters: Any) -> None:  # noqa: ANN401  as the library's
        """Begin to read an answer, for the namespace of the call: connections are used again."""
        super().set_response_params(**parameters)
        namespace = namespace_of_call.get()
        if namespace != self._namespace:
            self._namespace = namespace
            self._continue()
            self._pause()

    def data_received(self, data: bytes) -> None:
        """Parse *data*; pause if the namespace has used its share."""
        began = time.thread_time()
        super().data_received(data)
        self._shares.use(self._namespace, time.thread_time() - began)
        self._pause()

    def _pause(self) -> None:
        if not self._waits and self._shares.pause_of(self._namespace):
            self._waits = True
            self._pause_transport_reading()
            self._shares.wait(self._namespace, self._continue)

    def _continue(self) -> None:
        self._waits = False
        if not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        if not self._waits:
            super()._resume_transport_reading()


class FairResolver(AbstractResolver):
    """Resolver of the HTTP library; it caches addresses for each namespace."""

    def __init__(self) -> None:
        self._slots = FairSlots(LOOKUPS, LOOKUPS_OF_NAMESPACE)
        self._lookups: dict[_Key, asyncio.Future[_Addresses]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> _Addresses:
        """Return the addresses of *host*.

        Raises:
            OSError: it is unknown.
        """
        key = namespace_of_call.get(), host, port, family
        if key not in self._lookups:
            await self._slots.acquire(key[0])
            if key in self._lookups:  # begun by another call meanwhile
                self._slots.release(key[0])
            else:
                self._begin(key)
        return await asyncio.shield(self._lookups[key])

    async def close(self) -> None:
        """Do nothing: threads end on their own, and no process waits for them."""

    def _begin(self, key: _Key) -> None:
        def end(lookup: asyncio.Future[_Addresses]) -> None:
            self._slots.release(key[0])
            if lookup.cancelled() or lookup.exception() is not None:
                del self._lookups[key]
            else:
                loop.call_later(CACHE_SECONDS, self._lookups.pop, key)

        loop, result = asyncio.get_running_loop(), Future[_Addresses]()
        result.set_running_or_notify_cancel()
        self._lookups[key] = asyncio.wrap_future(result)
        self._lookups[key].add_done_callback(end)
        threading.Thread(target=_look_up, args=(key, result), name="lookup", daemon=True).start()


def _look_up(key: _Key, result: Future[_Addresses]) -> None:
    try:
        result.set_result(_addresses(*key[1:]))
    except Exception as error:  # noqa: BLE001  the call raises it
        result.set_exception(error)


def _addresses(host: str, port: int, family: socket.AddressFamily) -> _Addresses:
    infos = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [
        ResolveResult(
            hostname=host,
            host=socket.getnameinfo(address, _NUMERIC)[0],
            port=port,
            family=kind,
            proto=proto,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, proto, _, address in infos
    ]
