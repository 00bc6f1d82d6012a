"""Messages while the application holds them; called by `receiver`.

What is handed out passes `suspects`, if there are crash notes, and `custody`, if there is an ack
time-out; what is settled leaves both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pulsar

from redrive.delivery.alarm import Rings
from redrive.delivery.crash_notes import CrashNotes
from redrive.delivery.custody import Custody
from redrive.delivery.expiry import fail_each
from redrive.delivery.failures import Failures
from redrive.delivery.origin import Subscriptions
from redrive.delivery.parts import Parts
from redrive.policy.failure import FailureRules

if TYPE_CHECKING:
    from redrive.delivery.suspects import Suspects

Take = Callable[[float | None], pulsar.Message | None]
MakeAlarm = Callable[[Callable[[], float | None], Callable[[], None]], Rings]


class Holding:
    """What was handed out and not settled yet.

    Attributes:
        take: returns the next message to hand out, as `Incoming.take` does.
    """

    def __init__(
        self, take: Take, parts: Parts, subscriptions: Subscriptions, failures: Failures
    ) -> None:
        self.take = take
        self._parts = parts
        self._subscriptions = subscriptions
        self._failures = failures
        self._custody: Custody | None = None
        self._suspects: Suspects | None = None
        self._closed = False
        self._closing = contextlib.ExitStack()

    def beware(self, crash_notes: CrashNotes) -> None:
        """Note what is in hand, and bury what has killed processes.

        Raises:
            InvalidSpecError: the notes can't be kept.
        """
        # What keeps notes in files takes long to import, and most consumers have none.
        from redrive.delivery import suspects  # noqa: PLC0415

        self._suspects = suspects.Suspects(
            self.take, self._parts, crash_notes, self._failures.policy(), self._bury
        )
        self._closing.callback(self._suspects.close)
        self.take = self._suspects.take

    def limit(self, ack_timeout: timedelta, make_alarm: MakeAlarm) -> None:
        """Have messages fail that are not settled within *ack_timeout*.

        Raises:
            InvalidSpecError: that is no positive time.
        """
        custody = self._custody = Custody(ack_timeout, self._parts.clock)
        alarm = make_alarm(custody.next_end, functools.partial(self._expire, custody))
        self._closing.callback(alarm.close)
        take = self.take

        def take_into_custody(timeout: float | None = None) -> pulsar.Message | None:
            message = take(timeout)
            if message is not None:
                custody.begin(message)
                alarm.look()
            return message

        self.take = take_into_custody

    def settles(self, message: pulsar.Message) -> bool:
        """Take *message* back from its holder; tell whether it is still his to settle."""
        if self._custody is not None and not self._custody.settle(message):
            return False
        if self._suspects is not None:
            self._suspects.end(message)
        return True

    def hand_back(self, message: pulsar.Message) -> None:
        """Hand *message* out again, unless it is out of time: then that has been seen to."""
        if self._custody is not None and not self._custody.settle(message):
            return
        if self._suspects is not None:
            self._suspects.let_go(message)
        self._parts.incoming.again(message, 0)

    def close(self) -> None:
        """Fail nothing more, once a hop that has begun is made, and leave the notes to the next."""
        self._closed = True
        self._closing.close()

    def _bury(self, message: pulsar.Message, error: Exception) -> bool:
        return self._failures.crashed(message, self._subscriptions[message.topic_name()], error)

    def _expire(self, custody: Custody) -> None:
        def fail(message: pulsar.Message) -> None:
            if self._suspects is not None:
                self._suspects.end(message)
            subscription = self._subscriptions[message.topic_name()]
            self._failures.raised(message, subscription, custody.error(), FailureRules())

        fail_each(custody.expired(), fail, self._parts.incoming, lambda: self._closed)
