"""Messages of one key, one after the other; for ordered policies; called by `receiver`.

A message goes when those before it with its key are settled, a retry of one of them included: then
it is the others that wait. They wait in this consumer, unacknowledged.
"""

from __future__ import annotations

import threading

import pulsar

from redrive.delivery.parts import Clock, Incoming
from redrive.delivery.receiving import reading
from redrive.delivery.receiving.reading import id_text

MAX_HELD = 1_000
"""With so many messages in hand or waiting, nothing new is taken from the broker."""

_LOOK_EVERY_SECONDS = 0.2
"""How often a taker who waits for room checks for it."""


class KeyOrdering:
    """Hands out what *incoming* has, at most one message of a key at a time.

    May be used by several threads.
    """

    def __init__(self, incoming: Incoming, clock: Clock) -> None:
        self._incoming = incoming
        self._clock = clock
        self._queues: dict[str, dict[str, pulsar.Message]] = {}  # by key and id; the first one goes
        self._held = 0
        self._taking = threading.Lock()
        self._changing = threading.Lock()

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message whose turn it is, as `Incoming.take` does."""
        end = None if timeout is None else self._clock.monotonic() + timeout
        # One at a time: what another thread took later must not get into its queue earlier.
        if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
            return None
        try:
            return self._take(end)
        finally:
            self._taking.release()

    def _take(self, end: float | None) -> pulsar.Message | None:
        while True:
            left = None if end is None else max(0.0, end - self._clock.monotonic())
            full = self._held >= MAX_HELD
            wait = left
            if full and (left is None or left > _LOOK_EVERY_SECONDS):
                wait = _LOOK_EVERY_SECONDS
            message = self._incoming.take(wait, only_again=full)
            if message is not None and self._may_go(message):
                return message
            if message is None and wait == left:
                return None

    def free(self, message: pulsar.Message) -> None:
        """Let the next message of its key go: *message* is settled, or back at the broker."""
        key, message_id = _queue_of(message)
        with self._changing:
            queue = self._queues.get(key, {})
            if queue.pop(message_id, None) is None:
                return
            self._held -= 1
            if not queue:
                del self._queues[key]
                return
            following = next(iter(queue.values()))
        self._incoming.again(following, 0)

    def _may_go(self, message: pulsar.Message) -> bool:
        key, message_id = _queue_of(message)
        with self._changing:
            queue = self._queues.setdefault(key, {})
            if message_id not in queue:
                queue[message_id] = message
                self._held += 1
                return len(queue) == 1
            # Handed out again by us, or else a copy: a broker that lost the connection sends all
            # again, and to acknowledge the one acknowledges the other.
            return next(iter(queue.values())) is message


def _queue_of(message: pulsar.Message) -> tuple[str, str]:
    message_id = id_text(message.message_id())
    # What has no key has no order.
    key = reading.ordering_key(message) or reading.partition_key(message)
    return key or message_id, message_id
