"""Acknowledgement time-outs of messages.

Ack time-outs: messages that are not settled in time have failed.

Fails messages whose time is over; called by `ack_timeouts` and `simple`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import pulsar

from redrive.delivery.concurrency import ends_thread, to_seconds
from redrive.delivery.middleware.chain import (
    HANDLE_AGAIN_AFTER,
    Middleware,
    Receive,
    Settle,
    Settlement,
)
from redrive.delivery.parts import Clock, Incoming, Parts
from redrive.errors import InvalidSpecError, RedriveError
from redrive.messages import id_text
from redrive.policy.verdict import Done


class AckTimeoutError(RedriveError, TimeoutError):
    """A message was not settled within the consumer's ack time-out."""

    reason = "AckTimeout"


class AckTimeouts:
    """What was handed out and not settled yet, each for *timeout*.

    May be used by several threads: of those who want a message's end, one gets it.

    Raises:
        InvalidSpecError: *timeout* is no positive time.
    """

    def __init__(self, timeout: timedelta, clock: Clock) -> None:
        if timeout <= timedelta():
            raise InvalidSpecError(
                "an ack time-out is a positive time",
                got=str(timeout),
                remedy="give the longest time that handling may take, or leave it out",
            )
        self._timeout = timeout
        self._clock = clock
        self._held: dict[int, tuple[float, pulsar.Message]] = {}  # in the order of their ends
        # Until the application has let go of them: settled twice is another thing than too late.
        self._over: weakref.WeakValueDictionary[int, pulsar.Message] = weakref.WeakValueDictionary()
        self._changing = threading.Lock()

    def begin(self, message: pulsar.Message) -> None:
        """Start the ack time-out of *message*, which is handed out, also once more."""
        with self._changing:
            self._over.pop(id(message), None)
            end = self._clock.monotonic() + to_seconds(self._timeout)
            self._held.pop(id(message), None)  # else it would keep its place among the ends
            self._held[id(message)] = (end, message)

    def settle(self, message: pulsar.Message) -> bool:
        """Take *message* back; tell whether its holder may settle it, or its time is over.

        Over it stays, however often that is asked, until the message is handed out once more.
        """
        with self._changing:
            self._held.pop(id(message), None)
            return id(message) not in self._over

    def next_end(self) -> float | None:
        """Return the moment at which the next message is out of time; None if none will be."""
        with self._changing:
            return next((end for end, _ in self._held.values()), None)

    def expired(self) -> list[pulsar.Message]:
        """Take back what is out of time."""
        with self._changing:
            now = self._clock.monotonic()
            over = [message for end, message in self._held.values() if end <= now]
            for message in over:
                del self._held[id(message)]
                self._over[id(message)] = message
        return over

    def error(self) -> AckTimeoutError:
        """Return why a message has failed that is out of time."""
        return AckTimeoutError(
            "the message was not settled in time",
            got=f"more than {self._timeout.total_seconds():g} s",
            remedy="settle it earlier, or give it more time with ack_timeout=",
        )


class AckDeadline(Middleware):
    """Fails messages that are not settled in time, and ignores whatever is asked for them later.

    Args:
        fail: settles a message as failed.
        late: reports a message that was handled after its time.

    Raises:
        InvalidSpecError: *timeout* is no positive time.
    """

    def __init__(
        self,
        timeout: timedelta,
        parts: Parts,
        fail: Callable[[pulsar.Message, AckTimeoutError], object],
        late: Callable[[pulsar.Message], None],
    ) -> None:
        self._ack_timeouts = AckTimeouts(timeout, parts.clock)
        self._incoming = parts.incoming
        self._fail = fail
        self._late = late
        self._closed = False
        self._timer = parts.timer(self._ack_timeouts.next_end, self._expire)

    def receive(self, receive: Receive) -> Receive:
        """Start the time of each message that is handed out."""

        def receive_timed(timeout: float | None) -> pulsar.Message | None:
            message = receive(timeout)
            if message is not None:
                self._ack_timeouts.begin(message)
                self._timer.look()
            return message

        return receive_timed

    def settle(self, settle: Settle) -> Settle:
        """Settle what is in time, or fails because it is not."""

        def settle_timed(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, failure = settlement
            if self._ack_timeouts.settle(message) or (
                failure is not None and isinstance(failure.error, AckTimeoutError)
            ):
                return settle(settlement)
            if isinstance(verdict, Done):
                self._late(message)
            return None

        return settle_timed

    def close(self) -> None:
        """Fail nothing more, once a hop that has begun is made."""
        self._closed = True
        self._timer.close()

    def _expire(self) -> None:
        def fail(message: pulsar.Message) -> None:
            self._fail(message, self._ack_timeouts.error())

        fail_each(self._ack_timeouts.expired(), fail, self._incoming, lambda: self._closed)


_log = logging.getLogger(__name__)


def fail_each(
    over: Iterable[pulsar.Message],
    fail: Callable[[pulsar.Message], None],
    incoming: Incoming,
    closing: Callable[[], bool],
) -> None:
    """Have each message *fail*; one with which that goes wrong is handed out again, and logged.

    Once *closing* says so the rest stay unacknowledged: whoever closes would wait for each, which
    can take seconds, and the broker delivers them again.
    """
    for message in over:
        if closing():
            return
        try:
            fail(message)
        except BaseException as error:  # else it and the others would never be settled
            if ends_thread(error):
                raise
            _log.exception("message %s is handed out again", id_text(message.message_id()))
            incoming.again(message, HANDLE_AGAIN_AFTER.total_seconds())
