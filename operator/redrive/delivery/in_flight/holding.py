"""Messages while the application holds them; called by `receiver`.

What is handed out passes `poison_guard`, if there is a crash log, and `ack_timeouts`, if there is
an ack time-out; what is settled leaves both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pulsar

from redrive.delivery.in_flight.ack_timeouts import AckTimeouts
from redrive.delivery.in_flight.crash_log import CrashLog
from redrive.delivery.in_flight.expiry import fail_each
from redrive.delivery.in_flight.timer import AnyTimer
from redrive.delivery.parts import Parts
from redrive.delivery.receiving.origin import SubscriptionsByTopic
from redrive.delivery.retrying.retry_handler import RetryHandler
from redrive.policy.failure import FailureRules

if TYPE_CHECKING:
    from redrive.delivery.in_flight.poison_guard import PoisonGuard

Take = Callable[[float | None], pulsar.Message | None]
MakeTimer = Callable[[Callable[[], float | None], Callable[[], None]], AnyTimer]


class Holding:
    """What was handed out and not settled yet.

    Attributes:
        take: returns the next message to hand out, as `Incoming.take` does.
    """

    def __init__(
        self, take: Take, parts: Parts, subscriptions: SubscriptionsByTopic, failures: RetryHandler
    ) -> None:
        self.take = take
        self._parts = parts
        self._subscriptions = subscriptions
        self._retry_handler = failures
        self._ack_timeouts: AckTimeouts | None = None
        self._poison_guard: PoisonGuard | None = None
        self._closed = False
        self._closing = contextlib.ExitStack()

    def guard_against_poison(self, crash_log: CrashLog) -> None:
        """Record what is in hand, and dead-letter poison messages, which have killed processes.

        Raises:
            InvalidSpecError: the crash log can't be written.
        """
        # What writes the crash log takes long to import, and most consumers have none.
        from redrive.delivery.in_flight import poison_guard  # noqa: PLC0415

        self._poison_guard = poison_guard.PoisonGuard(
            self.take, self._parts, crash_log, self._retry_handler.policy(), self._dead_letter
        )
        self._closing.callback(self._poison_guard.close)
        self.take = self._poison_guard.take

    def limit(self, ack_timeout: timedelta, make_timer: MakeTimer) -> None:
        """Have messages fail that are not settled within *ack_timeout*.

        Raises:
            InvalidSpecError: that is no positive time.
        """
        ack_timeouts = self._ack_timeouts = AckTimeouts(ack_timeout, self._parts.clock)
        timer = make_timer(ack_timeouts.next_end, functools.partial(self._expire, ack_timeouts))
        self._closing.callback(timer.close)
        take = self.take

        def take_with_timeout(timeout: float | None = None) -> pulsar.Message | None:
            message = take(timeout)
            if message is not None:
                ack_timeouts.begin(message)
                timer.look()
            return message

        self.take = take_with_timeout

    def settles(self, message: pulsar.Message) -> bool:
        """Take *message* back from its holder; tell whether the holder may still settle it."""
        if self._ack_timeouts is not None and not self._ack_timeouts.settle(message):
            return False
        if self._poison_guard is not None:
            self._poison_guard.end(message)
        return True

    def hand_back(self, message: pulsar.Message) -> None:
        """Hand *message* out again, unless it is out of time: then that has been seen to."""
        if self._ack_timeouts is not None and not self._ack_timeouts.settle(message):
            return
        if self._poison_guard is not None:
            self._poison_guard.let_go(message)
        self._parts.incoming.again(message, 0)

    def close(self) -> None:
        """Fail nothing more, once a hop that has begun is made, and leave the notes to the next."""
        self._closed = True
        self._closing.close()

    def _dead_letter(self, message: pulsar.Message, error: Exception) -> bool:
        return self._retry_handler.crashed(
            message, self._subscriptions[message.topic_name()], error
        )

    def _expire(self, ack_timeouts: AckTimeouts) -> None:
        def fail(message: pulsar.Message) -> None:
            if self._poison_guard is not None:
                self._poison_guard.end(message)
            subscription = self._subscriptions[message.topic_name()]
            self._retry_handler.raised(message, subscription, ack_timeouts.error(), FailureRules())

        fail_each(ack_timeouts.expired(), fail, self._parts.incoming, lambda: self._closed)
