"""Acknowledgement time-outs: a message that is not settled in time has failed.

`AckTimeouts` measures the time, for `AckDeadline` and for simple consumers; `fail_each` fails the
expired messages.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta

import pulsar

from redrive.delivery.concurrency import ends_thread, log_of, to_seconds
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
from redrive.policy.verdict import Done, is_a


class AckTimeoutError(RedriveError, TimeoutError):
    """A message was not settled within the consumer's ack time-out."""

    reason = "AckTimeout"


class AckTimeouts:
    """Unsettled messages that were delivered to the application, each for *timeout*.

    May be used by several threads: only one of them can settle a message.

    Raises:
        InvalidSpecError: *timeout* is no positive time.
    """

    def __init__(self, timeout: timedelta, clock: Clock) -> None:
        if timeout <= timedelta():
            raise InvalidSpecError(
                "an acknowledgement time-out must be positive",
                got=str(timeout),
                remedy="set the longest time that handling may take, or omit it",
            )
        self._timeout = timeout
        self._clock = clock
        self._held: dict[int, tuple[float, pulsar.Message]] = {}  # in the order of their ends
        # Expired messages, until the application drops them: distinguishes "too late" from "twice".
        self._over: weakref.WeakValueDictionary[int, pulsar.Message] = weakref.WeakValueDictionary()
        self._changing = threading.Lock()

    def begin(self, message: pulsar.Message) -> None:
        """Start, or restart, the acknowledgement time-out of *message*."""
        with self._changing:
            self._over.pop(id(message), None)
            end = self._clock.monotonic() + to_seconds(self._timeout)
            self._held.pop(id(message), None)  # otherwise it would keep its place in the order
            self._held[id(message)] = (end, message)

    def settle(self, message: pulsar.Message) -> bool:
        """Stop the time-out of *message*; return True if the application may settle it.

        An expired message stays expired until it is delivered to the application again.
        """
        with self._changing:
            self._held.pop(id(message), None)
            return id(message) not in self._over

    def next_end(self) -> float | None:
        """Return the time at which the next message expires; None without messages."""
        with self._changing:
            return next((end for end, _ in self._held.values()), None)

    def expired(self) -> list[pulsar.Message]:
        """Remove and return the expired messages."""
        with self._changing:
            now = self._clock.monotonic()
            over = [message for end, message in self._held.values() if end <= now]
            for message in over:
                del self._held[id(message)]
                self._over[id(message)] = message
        return over

    def error(self) -> AckTimeoutError:
        """Return the error of an expired message."""
        return AckTimeoutError(
            "the message was not settled in time",
            got=f"more than {self._timeout.total_seconds():g} s",
            remedy="settle it earlier, or give it more time with ack_timeout=",
        )


class AckDeadline(Middleware):
    """Fails messages that are not settled in time, and ignores their later settlements.

    Args:
        fail: settles a message as failed.
        late: reports a message that was handled after its time-out.

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
        self._timer = parts.timer(self._ack_timeouts.next_end, self._expire)

    def receive(self, receive: Receive) -> Receive:
        """Start the time-out of each message that is delivered to the application."""

        def receive_timed(timeout: float | None) -> pulsar.Message | None:
            message = receive(timeout)
            if message is not None:
                self._ack_timeouts.begin(message)
                self._timer.reschedule()
            return message

        return receive_timed

    def settle(self, settle: Settle) -> Settle:
        """Settle messages in time, and those that fail because of their time-out."""

        def settle_timed(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, failure = settlement
            if self._ack_timeouts.settle(message) or (
                failure is not None and is_a(failure.error, AckTimeoutError)
            ):
                return settle(settlement)
            if isinstance(verdict, Done):
                self._late(message)
            return None

        return settle_timed

    def close(self) -> None:
        """Stop failing messages; wait for a hop in progress."""
        self._timer.close()

    def _expire(self) -> None:
        def fail(message: pulsar.Message) -> None:
            self._fail(message, self._ack_timeouts.error())

        fail_each(self._ack_timeouts.expired(), fail, self._incoming, lambda: self._timer.closing)


_log = log_of(__name__)


def fail_each(
    over: Iterable[pulsar.Message],
    fail: Callable[[pulsar.Message], None],
    incoming: Incoming,
    closing: Callable[[], bool],
) -> None:
    """Call *fail* for each message; deliver a message again, and log it, if *fail* raises.

    While *closing* returns True, the remaining messages stay unacknowledged, because each could
    take seconds. The broker redelivers them.
    """
    for message in over:
        if closing():
            return
        try:
            fail(message)
        except BaseException as error:  # otherwise no message would be settled
            if ends_thread(error):
                raise
            _log.exception("message %s is handed out again", id_text(message.message_id()))
            incoming.again(message, HANDLE_AGAIN_AFTER.total_seconds())
