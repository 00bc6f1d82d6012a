"""Retries that a broker delivers before their time, or a wrong clock makes look late.

Delayed delivery can be off for a broker, a namespace or a topic, and a tick of the broker may
deliver a retry earlier than its delay. `fetcher` keeps such a message, unacknowledged, until its
delay has passed since it was sent.

The broker delivers a retry when its own clock reaches the time of sending plus the delay. A
consumer that waits for messages gets it at that moment. So if the clock of its host is ahead of the
broker's, each retry looks late by the difference, whichever host has sent it. A broker that
delivers late, for example at a dispatch rate, is recognized by a lateness that changes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from datetime import timedelta

import pulsar

from redrive import messages
from redrive.delivery.parts import Clock
from redrive.policy.envelope import delay_of

MAX_KEPT = 1_000
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""With more, nothing is received from the retry topic; the source topic is not affected."""

_REPORTED_SECONDS = 2.0
"""No tick of a broker is longer, so delayed delivery is off, or a clock is behind."""

AHEAD_SECONDS = 10.0
"""A smaller difference is not reported: the tick of a broker and a busy host look like one."""
RETRIES_MEASURED = 5
"""So many retries in a row have to be late: a broker that was away delays only a few."""
APART_SECONDS = 10.0
"""Minimum time between two of them: a queue at the broker changes meanwhile, a clock does not."""
ALIKE_SECONDS = 3.0
"""Maximum difference between them: of the tick of a broker, and of a busy host."""
_AGAIN_SECONDS = 3_600.0

_log = logging.getLogger(__name__)


class EarlyRetries:
    """The messages of one retry topic that wait in this consumer. May be used by several threads.

    The time is that of the process that sent the retry. A clock that is behind it extends a delay,
    to twice its length at most.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By id: a copy that the broker delivers after a lost connection takes the place of the
        # original, whose acknowledgement might not count.
        self._kept: dict[bytes, pulsar.Message] = {}
        self._bytes = 0
        self._room = threading.Event()
        self._room.set()
        self._changing = threading.Lock()
        self._is_reported = False
        self._late: deque[float] = deque(maxlen=RETRIES_MEASURED)
        self._measured_at = float("-inf")
        self._ahead_reported_at = float("-inf")

    def __len__(self) -> int:
        """Return how many messages are kept."""
        return len(self._kept)

    def seconds_left(self, message: pulsar.Message) -> float:
        """Return how long it is until the delay of *message* has passed; 0 if it has."""
        delay = delay_of(messages.read_properties(message) or {})
        if delay is None:
            return 0.0
        return max(0.0, min(delay.total_seconds(), -self._lateness(message, delay)))

    def clock_ahead(self, message: pulsar.Message) -> float | None:
        """Return the seconds by which this clock is ahead of the broker's, at most once an hour.

        Args:
            message: came while the consumer waited for messages.
        """
        delay = delay_of(messages.read_properties(message) or {})
        if delay is None:
            return None
        late, now = self._lateness(message, delay), self._clock.monotonic()
        if late < AHEAD_SECONDS:
            self._late.clear()
            return None
        if now < self._measured_at + APART_SECONDS:
            return None
        self._measured_at = now
        self._late.append(late)
        ahead = min(self._late)
        are_alike = max(self._late) - ahead <= ALIKE_SECONDS
        is_due = now >= self._ahead_reported_at + _AGAIN_SECONDS
        if len(self._late) < RETRIES_MEASURED or not are_alike or not is_due:
            return None
        self._ahead_reported_at = now
        return ahead

    def _lateness(self, message: pulsar.Message, delay: timedelta) -> float:
        """Return the seconds since the *delay* of a message is over, negative before that."""
        sent_ago: float = self._clock.now().timestamp() - message.publish_timestamp() / 1_000
        return sent_ago - delay.total_seconds()

    def keep(self, message: pulsar.Message, seconds: float) -> bool:
        """Keep *message*; False if it is a copy of one that is kept."""
        if seconds > _REPORTED_SECONDS and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "the broker delivers retries before their time: %s came %.1f s early from %s; up "
                "to %d are kept in this consumer until then; enable delayed delivery there, and "
                "synchronize the clocks of all hosts",
                messages.id_text(message.message_id()), seconds, message.topic_name(), MAX_KEPT,
            )  # fmt: skip
        key = message.message_id().serialize()
        with self._changing:
            is_copy = key in self._kept
            self._kept[key] = message
            if not is_copy:
                self._bytes += messages.size(message)
                self._note_room()
        return not is_copy

    def release(self, message: pulsar.Message) -> pulsar.Message:
        """Return the message that is kept in place of *message*: the last copy, else itself."""
        with self._changing:
            kept = self._kept.pop(message.message_id().serialize(), None)
            if kept is None:
                return message
            self._bytes -= messages.size(message)
            self._note_room()
        return kept

    @property
    def has_room(self) -> bool:
        """Return True if more messages may be received."""
        return self._room.is_set()

    def wait_for_room(self, seconds: float) -> bool:
        """Return True once more messages may be received; False after so many *seconds*."""
        return self._room.wait(seconds)

    def _note_room(self) -> None:
        if len(self._kept) < MAX_KEPT and self._bytes < MAX_KEPT_BYTES:
            self._room.set()
        else:
            self._room.clear()
