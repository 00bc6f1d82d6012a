"""How many messages of a subscription wait in the client: many, or few where they are taken slowly.

Called by `topic_fetcher`. A queue keeps its length for as long as its consumer lives, so to change
it is to open another consumer, and to close the one before.
"""

from __future__ import annotations

from collections.abc import Callable

import pulsar

LONG = 1_000
SHORT = 16
"""Shared with all who join. While a round trip takes less than handling these costs nothing."""

LOOK_SECONDS = 0.2
_FAST = 200.0  # a second: what waits in a long queue is handled within 5 s
_SLOW = 100.0
_SLOW_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 600.0


class QueuedSubscription:
    """A subscription of the client; its consumer can be replaced by one with another queue.

    Attributes:
        adapts: whether the length of its queue may change.

    Args:
        open_consumer: subscribes with a queue of that length.
        length: of the first one's queue.
        least: a queue has no less, however short it is meant to be.
    """

    def __init__(
        self,
        open_consumer: Callable[[int], pulsar.Consumer],
        length: int,
        *,
        least: int,
        adapts: bool,
    ) -> None:
        self.open_consumer = open_consumer
        self.adapts = adapts
        self._least = least
        self._use(open_consumer(length), length)

    @property
    def most_waiting(self) -> int:
        """Return how many messages may wait, if none are of batches.

        The client has a queue of each partition, and one of all.
        """
        return 2 * max(self._length, self._least)

    def exchange(self, consumer: pulsar.Consumer, length: int) -> pulsar.Consumer:
        """Receive and settle by *consumer* from now on; return the one before, to be closed."""
        before = self._consumer
        self._use(consumer, length)
        return before

    def _use(self, consumer: pulsar.Consumer, length: int) -> None:
        self._consumer = consumer
        self._length = length
        # As attributes: they are called for each message.
        self.receive: Callable[[int], pulsar.Message] = consumer.receive
        self.acknowledge: Callable[[pulsar.Message], None] = consumer.acknowledge
        self.close: Callable[[], None] = consumer.close

    def negative_acknowledge(self, message: pulsar.Message) -> None:
        """Have *message* delivered again, after the delay of the consumer that it came to."""
        # Closed earlier it would come at once, and uncounted.
        self.adapts = False
        self._consumer.negative_acknowledge(message)


class QueueLength:
    """Says when a long queue should be short, or long again, by how fast its messages are taken."""

    def __init__(self, now: float) -> None:
        self._is_long = True
        self._looked, self._taken = now, 0
        self._slow_since: float | None = None
        self._not_before = now
        self._pause = _FIRST_PAUSE

    def look(self, taken: int, now: float, *, dry: bool) -> int | None:
        """Return the length that the queue should have, if that is another one.

        Args:
            taken: how many messages have been taken so far.
            dry: whether nothing waits in the queue, so that its length is all the same.
        """
        if dry:
            self._slow_since = None
        seconds, count = now - self._looked, taken - self._taken
        if seconds < LOOK_SECONDS:
            return None
        self._looked, self._taken = now, taken
        if count >= _SLOW * seconds:
            self._slow_since = None
        elif self._slow_since is None and not dry:
            self._slow_since = now
        if now < self._not_before:
            return None
        if not self._is_long:
            return LONG if count >= _FAST * seconds else None
        slow = self._slow_since is not None and now - self._slow_since >= _SLOW_SECONDS
        return SHORT if slow else None

    def changed(self) -> None:
        """Note that the queue has the length that it should have."""
        self._is_long = not self._is_long
        self._slow_since = None
        self._pause = _FIRST_PAUSE

    def kept(self, now: float) -> None:
        """Note that it could not be changed; that is tried again later, and ever more seldom."""
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
