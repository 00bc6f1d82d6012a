"""A circuit breaker for each connection: a broker that does not answer gets no calls until it does.

With a thousand policies, each retrying on its own, a broker that comes back would get the calls of
all of them at once, and until then every reconcile would wait for a time-out, deletions behind it.
So after a few calls in a row without an answer the breaker opens: calls fail at once, except the
*probe*, by which the reconciler of the connection finds, with back-off, that the broker is back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from redrive.admin.errors import BrokerDownError, BrokerUnreachableError

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
            remedy="check adminUrl, and that the broker runs and can be reached from here; once it "
            "answers, all goes on by itself",
        )
