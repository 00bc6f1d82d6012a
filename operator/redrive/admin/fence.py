"""Whether this process may still write: checked right before each write is sent.

Where several operators run, one of them holds a Lease (see `leader_election`). One that
was stopped for longer than its lease, by a debugger, a full machine or a frozen virtual one, has
no sign that another has taken over, and would continue. The fence stops it: it is open until a
moment that only a renewed lease moves on, and that lies before another may take over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import aiohttp

from redrive.errors import RedriveError


class FenceClosedError(RedriveError):
    """This operator may no longer hold the Lease, so it must not write."""

    reason = "LeaseNotRenewed"


def elapsed() -> float:
    """Read the seconds since the machine started, those it slept through included where known."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Fence:
    """Open until a moment, then closed; both for `clock`.

    Args:
        clock: seconds that only ever rise, also while this process is stopped.
    """

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._until = float("-inf")

    def open_until(self, moment: float) -> None:
        """Let writes pass until *moment*."""
        self._until = moment

    def is_open(self) -> bool:
        """Whether a write would pass now."""
        return self._clock() < self._until

    def check(self) -> None:
        """Let a write pass.

        Raises:
            FenceClosedError: it must not be made.
        """
        if not self.is_open():
            raise FenceClosedError(
                "nothing is written, for the lease was not renewed in time",
                got=f"{self._clock() - self._until:.1f} s too late",
                remedy="it is tried again once the lease is renewed; if another operator has "
                "taken it, this one ends",
            )


def guarding(fence: Fence) -> aiohttp.TraceConfig:
    """Return what has an HTTP session check *fence* before each request that is not a GET.

    It is checked when the request has its connection, with only the sending left to do, and again
    for the body, which goes out with the headers.
    """

    async def check(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        sent: aiohttp.TraceRequestHeadersSentParams | aiohttp.TraceRequestChunkSentParams,
    ) -> None:
        if sent.method != "GET":
            fence.check()

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(check)
    trace.on_request_chunk_sent.append(check)
    return trace
