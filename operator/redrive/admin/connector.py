"""Connections to brokers: lookups of hosts and the reading of answers, fair among namespaces.

*Lookups.* A lookup by the C library can't be cancelled, and may wait for a name server for a
minute. In the threads that the whole process shares, hosts of one connection whose name server
never answers would delay the calls of all connections. A cache that namespaces share would do so,
too: a call would wait for the lookup of another namespace, which waits for that namespace's
threads.

*Reading.* The HTTP library parses all that a socket has, before anything else runs. A server that
sends chunks of one byte, or informational responses without end, would keep the event loop busy.
See `shares`, which contain TLS, too.

*Other protocols.* A `Dialer` connects streams with the same bounds.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_proto import ResponseHandler

from redrive.admin.fair_slots import FairSlots
from redrive.admin.shares import FairTls, Shares, namespace_of_call, shares_of_call

LOOKUPS = 64
"""Maximum threads."""
LOOKUPS_OF_NAMESPACE = 4
"""Maximum threads of one namespace, so that others find a free one."""
CACHE_SECONDS = 10.0
READ_BYTES = 2**12
"""Maximum bytes that are parsed at once: 680 chunks of one byte."""
SOCKETS_OF_NAMESPACE = 500
"""Sockets of a namespace from which on none stays open after its call."""
SESSIONS_OF_NAMESPACE = 100
"""Maximum sessions of a namespace that are not over HTTP."""
SESSIONS_OF_CONNECTION = 10
"""Maximum of these of one connection: one that is down delays no other of its namespace."""
MAX_ADDRESSES = 4
"""Addresses of a host that are tried."""
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_Key = tuple[str, str, int, socket.AddressFamily]
_Addresses = list[ResolveResult]


def connector(shares: Shares) -> aiohttp.TCPConnector:
    """Return the connections of a session."""
    made = aiohttp.TCPConnector(limit=0, use_dns_cache=False, resolver=FairResolver())
    factory: Any = functools.partial(FairHandler, shares)
    made._factory = factory  # noqa: SLF001  the library has no parameter for it
    return made


def taking_turns(shares: Shares) -> aiohttp.TraceConfig:
    """Return a trace that lets a namespace connect in its share only."""

    async def begin(*_: object) -> None:
        shares_of_call.set(shares)
        await shares.turn(namespace_of_call.get())

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_start.append(begin)
    return trace


class FairHandler(ResponseHandler):
    """Parser of the answers of one connection, which pauses with its namespace."""

    def __init__(self, shares: Shares) -> None:
        super().__init__(asyncio.get_running_loop())
        self._shares = shares
        self._tls: FairTls | None = None
        self._namespace = namespace_of_call.get()
        self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read, or to pause."""
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports
        self._tls = transport.get_extra_info("ssl_object")
        if self._tls is not None:
            self._tls.stop = self._pause
        self._shares.sockets[self._namespace] += 1
        super().connection_made(transport)
        self._pause()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count the socket no longer."""
        self._shares.sockets[self._namespace] -= 1
        super().connection_lost(exc)

    @property
    def should_close(self) -> bool:
        """True if the socket is not used again: its namespace has many, or the library says so."""
        many = self._shares.sockets[self._namespace] > SOCKETS_OF_NAMESPACE
        return many or super().should_close

    def set_response_params(self, **parameters: Any) -> None:  # noqa: ANN401  as the library's
        """Begin to read an answer, for the namespace of the call: connections are used again."""
        super().set_response_params(**parameters)
        namespace = namespace_of_call.get()
        if namespace != self._namespace:
            self._shares.sockets.update({self._namespace: -1, namespace: 1})
            self._namespace = namespace
            if self._tls is not None:
                self._tls.namespace = namespace
            self._continue()
            self._pause()

    def data_received(self, data: bytes) -> None:
        """Parse *data*; pause if the namespace has used its share."""
        with self._shares.using(self._namespace):
            super().data_received(data)
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


class Dialer:
    """Connects streams to brokers that speak no HTTP, in the shares of their namespaces.

    Attributes:
        shares: in which TLS counts, and the parsing of answers has to.
    """

    def __init__(self) -> None:
        self.shares = Shares()
        self._of_namespace = FairSlots(sys.maxsize, SESSIONS_OF_NAMESPACE)
        self._of_connection = FairSlots(sys.maxsize, SESSIONS_OF_CONNECTION)
        self._resolver = FairResolver()

    @asynccontextmanager
    async def slot(self, namespace: str, connection: str) -> AsyncIterator[None]:
        """Hold a slot for a session while the block runs."""
        async with (
            self._of_connection.slot(f"{namespace}/{connection}"),
            self._of_namespace.slot(namespace),
        ):
            yield

    async def open(
        self, address: str, tls: ssl.SSLContext | None, namespace: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to *address*, written as `host:port`, for a connection of *namespace*.

        Raises:
            OSError: no address of its host accepts the connection, or it is not valid.
        """
        namespace_of_call.set(namespace)
        shares_of_call.set(self.shares)
        name, _, port = address.rpartition(":")
        host, failure = name.strip("[]"), OSError("the host has no address")
        try:
            targets = await self._resolver.resolve(host, int(port), socket.AF_UNSPEC)
            for target in targets[:MAX_ADDRESSES]:
                await self.shares.turn(namespace)
                try:
                    streams = await asyncio.open_connection(
                        target["host"], int(port), ssl=tls, server_hostname=host if tls else None
                    )
                except ssl.SSLError:
                    raise
                except OSError as error:
                    failure = error
                else:
                    self._pause_with(namespace, *streams)
                    return streams
        except (UnicodeError, OverflowError) as error:  # a label or a port that is too long
            raise socket.gaierror("no valid address") from error
        raise failure

    def _pause_with(
        self, namespace: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Stop the reading of TLS records while the namespace has used its share."""
        tls: FairTls | None = writer.get_extra_info("ssl_object")
        if tls is None:
            return
        transport: Any = writer.transport
        waits = False

        def stop() -> None:
            nonlocal waits
            transport.pause_reading()
            if not waits:
                waits = True
                self.shares.wait(namespace, resume)

        def resume() -> None:
            nonlocal waits
            waits = False
            if not reader._paused:  # type: ignore[attr-defined]  # noqa: SLF001  it is full
                transport.resume_reading()

        tls.stop = stop


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
