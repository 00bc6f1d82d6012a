"""Conditions for sending a call: fencing by the lease, and a circuit breaker.

`Fence` is checked before each write. Of several operators one holds a Lease (see
`leader_election`). An operator that was stopped for longer than its lease, by a debugger, an
overloaded machine or a frozen virtual machine, does not notice that another has taken over. Its
fence is open until a time that only a renewal extends, and that precedes any takeover.

`Breaker` suspends the calls of a connection to a broker that does not answer. With a thousand
policies, each retrying separately, a broker that restarts would get all their calls at once.
Without the breaker, every reconcile, including deletions, would also wait for a time-out. After
`FAILURES` unanswered calls in a row, further calls fail immediately. Only the *probe* of the
connection's reconciler is sent, with back-off.

So while a broker is down, for ten minutes as well, it gets single probes, up to 15 s apart: 10 s
for an answer and a pause of 5 s.

- The connection and its policies show `BrokerUnreachable` once the breaker is open, with one write
  for each object.
- Topics and rights stay as they are. A deleted policy waits for its cleanup, at most
  `finalize.CLEANUP_DEADLINE`, ten minutes. Then it is deleted, and its topics are retained.
- After an answered probe all policies of the connection are reconciled.

Consumers and replay jobs have connections of their own, see `delivery.processor` and
`replay.job.run`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp

from redrive.admin.errors import BrokerDownError, BrokerUnreachableError
from redrive.reasons import Reason


def elapsed() -> float:
    """Return the seconds since the start of the machine, including sleep if possible."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Fence:
    """Allows writes until a time by `clock`.

    Args:
        clock: monotonic seconds that continue while this process is stopped.
    """

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._until = float("-inf")

    def open_until(self, moment: float) -> None:
        """Allow writes until *moment*."""
        self._until = moment

    def is_open(self) -> bool:
        """Return True if a write is allowed now."""
        return self._clock() < self._until

    def check(self) -> None:
        """Check that a write is allowed.

        Raises:
            RedriveError: it is not.
        """
        if not self.is_open():
            raise Reason.LEASE_NOT_RENEWED.error(
                "write refused: the lease of this operator expired",
                got=f"{self._clock() - self._until:.1f} s too late",
                remedy="No action needed: writes resume when the lease is renewed; if another "
                "operator holds it, this one exits",
            )


def guarding(fence: Fence) -> aiohttp.TraceConfig:
    """Return a trace that checks *fence* before each request of a session that is not a GET.

    It checks when the connection is established, immediately before the headers are sent, and again
    before the body.
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
"""Consecutive calls without an answer that open a breaker."""
PROBE_PAUSE = timedelta(seconds=5)
"""Longest pause between probes of a broker that does not answer."""
_NEVER = datetime.min.replace(tzinfo=UTC)


class Breaker:
    """Allows calls to one broker while it answers, with any answer.

    Args:
        admin_url: URL of the broker's admin API.
        clock: for the time of the last answer.
        changed: called when the breaker has opened or closed.
    """

    def __init__(
        self, admin_url: str, clock: Callable[[], datetime], changed: Callable[[], None]
    ) -> None:
        self._admin_url = admin_url
        self._clock = clock
        self._changed = changed
        self._failures = 0
        self._silent_since: datetime | None = None
        self._probed_at = _NEVER

    @property
    def is_open(self) -> bool:
        """Return True if only probes are sent."""
        return self._failures >= FAILURES

    async def guard(self, call: Callable[[], Awaitable[Any]], probe: timedelta | None) -> Any:  # noqa: ANN401
        """Return the answer of *call* if it may be sent.

        Args:
            call: sends the call.
            probe: minimum interval since the last probe; a probe is sent even if the breaker is
                open. None: not a probe.

        Raises:
            BrokerDownError: the breaker is open, and *call* was not sent or not answered.
            AdminError: as *call* raises.
        """
        if self.is_open and (probe is None or self._clock() - self._probed_at < probe):
            raise self._down()
        if probe is not None:
            self._probed_at = self._clock()
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
        # A constant text while it lasts: each change of a condition is a write and an Event.
        since = f"{self._silent_since:%Y-%m-%dT%H:%M:%SZ}"
        return BrokerDownError(
            f"the broker's admin API at {self._admin_url} has not answered since {since}",
            remedy="check adminURL, and that the broker runs and can be reached from here; calls "
            "resume automatically once it answers",
        )
