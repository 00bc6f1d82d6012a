"""How watches are kept: asked for anew every half minute, each time a sign of life.

A watch that shows nothing may be a quiet one or a dead one. So the API server is asked to end each
after `ROUND_SECONDS`, and it goes on where it was; one that does not come back has stalled. While
the API server is away it is asked again every few seconds, for as long as that takes: to be without
it is no stall.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from types import SimpleNamespace

import aiohttp

from redrive.kube.liveness import Liveness

ROUND_SECONDS = 30
"""After how long a watch is begun anew, where it was; whole seconds."""
SILENCE_SECONDS = 45.0
"""A connection that brings nothing for longer, not even the end of the round, is given up."""


class BackOffs:
    """How long to wait between the attempts to reach the API server, without end, in seconds."""

    def __iter__(self) -> Iterator[float]:
        """Begin anew for each request."""
        return chain((0.5, 1.0, 2.0), repeat(5.0))


def session(
    health: Liveness, *, tls: ssl.SSLContext, headers: Mapping[str, str], proxy: str | None
) -> aiohttp.ClientSession:
    """Return HTTP connections to the API server whose watches give signs of life to *health*."""

    async def begun(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        request: aiohttp.TraceRequestStartParams,
    ) -> None:
        if request.url.query.get("watch") == "true":
            health.beat(f"watch of {request.url.path}")

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begun)
    connector = aiohttp.TCPConnector(limit=0, ssl=tls)
    return aiohttp.ClientSession(
        connector=connector, headers=headers, proxy=proxy, trace_configs=[trace]
    )
