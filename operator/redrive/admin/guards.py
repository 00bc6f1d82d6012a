"""Conditions for sending a call: the fence of the lease, and a circuit breaker.

Whether this process may still write: checked right before each write is sent.

Where several operators run, one of them holds a Lease (see `leader_election`). One that
was stopped for longer than its lease, by a debugger, a full machine or a frozen virtual one, has
no sign that another has taken over, and would continue. The fence stops it: it is open until a
moment that only a renewed lease moves on, and that lies before another may take over.

A circuit breaker for each connection: a broker that does not answer gets no calls until it does.

With a thousand policies, each retrying on its own, a broker that comes back would get the calls of
all of them at once, and until then every reconcile would wait for a time-out, deletions behind it.
So after a few calls in a row without an answer the breaker opens: calls fail at once, except the
*probe*, by which the reconciler of the connection finds, with back-off, that the broker is back.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import aiohttp

from redrive.admin.errors import BrokerDownError, BrokerUnreachableError
from redrive.errors import RedriveError
from redrive.reasons import Reason


class FenceClosedError(RedriveError):
    """This operator may no longer hold the Lease, so it must not write."""

    reason = Reason.LEASE_NOT_RENEWED


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


FAILURES = 3
"""So many calls in a row without an answer open a breaker."""


class Breaker:
    """Lets calls to one broker pass while it answers, whatever it answers.

    Args:
        admin_url: where the broker should answer.
        clock: for since when it has not answered.
        changed: called when it has opened, and when it has closed.
    """

    def __init__(
        self, admin_url: str, clock: Callable[[], datetime], changed: Callable[[], None]
    ) -> None:
        self._admin_url = admin_url
        self._clock = clock
        self._changed = changed
        self._failures = 0
        self._silent_since: datetime | None = None

    @property
    def is_open(self) -> bool:
        """Whether nothing but probes goes out."""
        return self._failures >= FAILURES

    async def guard(self, call: Callable[[], Awaitable[Any]], *, probe: bool) -> Any:  # noqa: ANN401
        """Return what *call* answers, if it may go out.

        Args:
            call: makes the call.
            probe: whether it may go out in any case.

        Raises:
            BrokerDownError: the breaker is open, and *call* was not made, or not answered either.
            AdminError: as *call* raises.
        """
        if self.is_open and not probe:
            raise self._down()
        try:
            answer = await call()
        except BrokerUnreachableError as error:
            self._failed()
            if self.is_open:
                raise self._down() from error
            raise
        except Exception:
            self._answered()
            raise
        self._answered()
        return answer

    def _failed(self) -> None:
        if self._silent_since is None:
            self._silent_since = self._clock()
        self._failures += 1
        if self._failures == FAILURES:
            self._changed()

    def _answered(self) -> None:
        was_open = self.is_open
        self._failures, self._silent_since = 0, None
        if was_open:
            self._changed()

    def _down(self) -> BrokerDownError:
        # The same text for as long as it lasts: each change of a condition is a write and an Event.
        since = f"{self._silent_since:%Y-%m-%dT%H:%M:%SZ}"
        return BrokerDownError(
            f"the broker's admin API at {self._admin_url} has not answered since {since}",
            remedy="check adminURL, and that the broker runs and can be reached from here; once it "
            "answers, all resumes automatically",
        )
