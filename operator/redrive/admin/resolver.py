"""Addresses of hosts, looked up in threads of which each namespace has few.

A lookup by the C library can't be cancelled, and may wait for a name server for a minute. In the
threads that the whole process shares, hosts of one connection whose name server never answers would
delay the calls of all connections. A cache that namespaces share would do so, too: a call would
wait for the lookup of another namespace, which waits for that namespace's threads.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import Future
from contextvars import ContextVar

from aiohttp.abc import AbstractResolver, ResolveResult

from redrive.admin.fair_slots import FairSlots

LOOKUPS = 64
"""Maximum threads."""
LOOKUPS_OF_NAMESPACE = 4
"""Maximum threads of one namespace, so that others find a free one."""
CACHE_SECONDS = 10.0
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_Key = tuple[str, str, int, socket.AddressFamily]
_Addresses = list[ResolveResult]

namespace_of_call: ContextVar[str] = ContextVar("namespace_of_call", default="")
"""Namespace of the connection that the current task sends a call for."""


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
