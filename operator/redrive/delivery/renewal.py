"""Renewal of a subscription whose consumer has lost its permits.

A broker sends as many messages as the client permits, and counts an entry as the number of messages
that its metadata states. Of an entry that it can't decompress the client returns one permit, and of
one that it can't decrypt none. So a single entry that states 60,000 messages takes the permits of a
consumer, which receives nothing from then on. Another consumer of the client has all permits again.

An entry that can't be decrypted stays unacknowledged, and comes first again. A renewed consumer is
therefore given these entries as they are. One that states more messages than clients put in a batch
is dead-lettered; the permits of the others are added to those of the consumer. With partitions it
is not given them, and such entries stop it again.

The client shows neither its permits nor the entries that it drops. So the consumer is renewed while
it receives nothing, and the topic has later messages: after a minute, and then at intervals that
double up to an hour, since other consumers of the subscription may have received those.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import pulsar

from redrive.delivery.arrivals import LARGEST_BATCH, Arrivals, Place, place_of
from redrive.messages import id_text

MAX_HELD_PERMITS = 10_000
"""Highest number of permits of entries of another key for which the consumer has others."""
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3_600.0
"""Seconds until the first renewal, and after one without effect; twice as many after each."""
_EFFECT_SECONDS = 1.5
"""A renewal had an effect if a message comes within so long."""

_log = logging.getLogger(__name__)


class Renewal:
    """Opens the subscription of a consumer of the client again. `withholds` is for any thread.

    Args:
        consumer: others refer to it, so it stays the same object.
        arrivals: those of the consumer.
        subscribe: opens the subscription with so many more permits.
        overlaps: True if it is opened again before the consumer is closed: of a subscription
            without consumers the broker forgets its delayed messages.
        takes_turns: True if one of several consumers is active. One that has received nothing may
            be inactive, and is not renewed.
        permits: of a consumer, or of each partition.

    Attributes:
        remove: called with each entry that is to be removed, and the messages that it states.
    """

    def __init__(  # noqa: PLR0913 - parts and traits of one subscription
        self,
        consumer: pulsar.Consumer,
        arrivals: Arrivals,
        subscribe: Callable[[int], pulsar.Consumer],
        *,
        overlaps: bool,
        takes_turns: bool,
        permits: int,
    ) -> None:
        self._consumer = consumer
        self._arrivals = arrivals
        self._subscribe = subscribe
        self._overlaps = overlaps
        self._takes_turns = takes_turns
        self._permits = permits
        self.remove: Callable[[pulsar.Message, int], None] = lambda *_: None
        self._held: set[Place] = set()  # entries of another key
        # Permits that these take, those added for them, and those taken since the last renewal.
        self._of_held = self._added = self._taken = 0
        self._pause, self._renewed_at = _FIRST_PAUSE, float("-inf")
        self._next = time.monotonic() + self._pause

    @property
    def is_short(self) -> bool:
        """Return True if undecryptable entries have taken most permits of a renewed consumer."""
        return self._taken > (self._permits + self._added) // 2

    def is_due(self) -> bool:
        """Return True if the consumer, which receives nothing, is to be renewed."""
        if self.is_short:
            return True
        highest = self._arrivals.highest
        if time.monotonic() < self._next or (self._takes_turns and highest[0] < 0):
            return False
        try:
            last = self._consumer.get_last_message_id()
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.PulsarException:  # not supported with partitions
            return True
        return place_of(last)[:2] > highest[:2]

    def renew(self, is_closing: Callable[[], bool], wait: Callable[[], None]) -> None:
        """Renew the consumer. One that was closed for that is opened until *is_closing*.

        Args:
            wait: called each second meanwhile.
        """
        if not self._overlaps:
            self._close()
        while not self._replace() and not self._overlaps and not is_closing():
            wait()
            time.sleep(1)
        if is_closing():  # which may have closed the one before
            self._close()

    def _replace(self) -> bool:
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        added = 2 * self._of_held  # the client sends permits once it has half of its own
        try:
            spare = self._subscribe(added)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.PulsarException as error:
            _log.warning(
                "the subscription of %s was not renewed: %s", self._consumer.topic(), error
            )
            return False
        # Others refer to the client's object for Python, which refers to the one of C++.
        mine, theirs = vars(self._consumer), vars(spare)
        mine["_consumer"], theirs["_consumer"] = theirs["_consumer"], mine["_consumer"]
        with contextlib.suppress(pulsar.PulsarException):
            spare.close()
        self._added, self._taken, self._renewed_at = added, 0, time.monotonic()
        return True

    def had_effect(self) -> bool:
        """Return True if a message that has come now did so by a renewal; then the next is soon."""
        had_effect = time.monotonic() - self._renewed_at < _EFFECT_SECONDS
        if had_effect:
            self._pause, self._next = _FIRST_PAUSE, 0.0
        return had_effect

    def _close(self) -> None:
        with contextlib.suppress(pulsar.PulsarException):
            vars(self._consumer)["_consumer"].close()

    def withholds(self, message: pulsar.Message) -> bool:
        """Return True if *message* is an entry that can't be decrypted, and hold or remove it."""
        context = message.encryption_context()
        if context is None or not context.is_decryption_failed():
            return False
        messages = context.batch_size()
        taken = max(0, messages - 1)  # the client has returned one
        place = place_of(message.message_id())
        if messages > LARGEST_BATCH:
            self._taken += taken
            self.remove(message, messages)
            return True
        if not self._held:
            _log.warning(
                "entries of %s can't be decrypted, and stay unacknowledged, first of them %s; "
                "check that crypto= has the key of their producer",
                message.topic_name(), id_text(message.message_id()),
            )  # fmt: skip
        if place not in self._held and self._of_held + taken <= MAX_HELD_PERMITS:
            self._held.add(place)
            self._of_held += taken
        if place in self._held:
            self._taken += taken
        return True


class ConnectionWatch:
    """Reports a lost connection of one topic after some time, and its return. For one thread.

    Args:
        seconds: a connection that is lost for a shorter time is not reported.
        report: called with the name of the topic, with True if it is connected again, and with the
            seconds without a connection.
    """

    def __init__(
        self, topic: str, seconds: float, report: Callable[[str, bool, float], None]
    ) -> None:
        self._topic = topic
        self._seconds = seconds
        self._report = report
        self._since: float | None = None
        self._reported = False

    def check(self, *, connected: bool) -> None:
        """Report a change, if there is one to report."""
        if self._since is None:
            self._since = None if connected else time.monotonic()
            return
        seconds = time.monotonic() - self._since
        if connected:
            if self._reported:
                self._report(self._topic, True, seconds)  # noqa: FBT003
            self._since, self._reported = None, False
        elif seconds >= self._seconds and not self._reported:
            self._reported = True
            self._report(self._topic, False, seconds)  # noqa: FBT003
