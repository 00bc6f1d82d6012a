"""Several subscriptions as one stream of messages; called by `consumer`.

The topics that flow are served in turn, so that neither a busy source topic nor a flood of retries
keeps the other waiting for longer than one message.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

import pulsar

from redrive.delivery.bounded import Deadline, all_within
from redrive.delivery.closing import CLOSE_TIMEOUT
from redrive.delivery.forking import OwnerProcess
from redrive.delivery.receiving.topic_fetcher import ConnectionWatch, TopicFetcher
from redrive.delivery.signal_safe_event import SignalSafeEvent
from redrive.errors import RedriveError

_LINGER_MS = 20
"""How long a taker waits in the only topic that flows before it leaves that to its thread."""


class ConsumerStoppedError(RedriveError):
    """The consumer was stopped or closed: it hands out no further message."""

    reason = "ConsumerStopped"


class SubscriptionLostError(RedriveError):
    """The client ended a subscription by itself, for example because the client was closed."""

    reason = "SubscriptionLost"


class Fetcher:
    """The messages of all *consumers*, each in the order in which its subscription delivers them.

    It owns the consumers: `close` closes them.

    Attributes:
        arrivals: how often messages came while none waited here.
    """

    def __init__(self, consumers: Sequence[pulsar.Consumer]) -> None:
        # Wakes a taker, which wakes the next if there may be more. A signal handler may put one in
        # at any moment, even into this queue's own methods.
        self._wakings: SimpleQueue[None] = SimpleQueue()
        self._changing = threading.Lock()
        self._flowing: list[TopicFetcher] = []
        self.arrivals = 0
        self._turns: Iterator[Sequence[TopicFetcher]] = itertools.repeat(())
        self._linger_ms = 0
        self._again: list[tuple[float, int, pulsar.Message]] = []
        self._numbers = itertools.count()
        self._holders: set[object] = set()  # while there are any, nothing new is handed out
        self._stopping = False
        self._stopped = SignalSafeEvent()
        self._lost: Exception | None = None
        self._pause: SignalSafeEvent | None = None  # closed while nothing is handed out
        self._owner = OwnerProcess("consumer")
        self._topics = [TopicFetcher(consumer, self._flows, self._lose) for consumer in consumers]
        atexit.register(self._close_at_exit)

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message, or None if none came within *timeout* seconds.

        Raises:
            ConsumerStoppedError: `stop` was called.
            SubscriptionLostError: the client ended a subscription.
        """
        if not (self._stopping or self._pause or self._again or self._lost or self._holders):
            message = self._next()
            if message is not None:
                return message
        end = None if timeout is None else time.monotonic() + timeout
        message = self._wait(end)
        # The taker may have been woken for more than it takes, or have kept the time of another.
        if self._flowing or self._again:
            self._wake()
        return message

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for each topic; False once it is closed.

        Raises:
            InheritedError: this process was forked from the consumer's.
        """
        self._owner.check()
        return bool(self._topics) and all(topic.connected for topic in self._topics)

    def watch(self, seconds: float, report: Callable[[str, bool, float], None]) -> None:
        """Report each connection that is lost for so many *seconds*, and its return.

        Args:
            report: see `ConnectionWatch`; called by threads of this fetcher.
        """
        for topic in self._topics:
            topic.watch = ConnectionWatch(topic.name, seconds, report)

    def recover(self, may: Callable[[], bool], recovered: Callable[[str], None]) -> None:
        """Have what the client has dropped delivered again; see `TopicFetcher`.

        Args:
            may: see `TopicFetcher.may_recover`; called by threads of this fetcher.
            recovered: likewise.
        """
        for topic in self._topics:
            topic.may_recover, topic.recovered = may, recovered

    def again(self, message: pulsar.Message, seconds: float) -> None:
        """Hand *message* out once more after so many *seconds*; it stays unacknowledged."""
        with self._changing:
            entry = (time.monotonic() + seconds, next(self._numbers), message)
            heapq.heappush(self._again, entry)
        self._wake()

    def hold_new(self, holder: object, *, held: bool) -> None:
        """Hand out only what is handed out again, while it is *held* by any *holder*."""
        if held:
            self._holders.add(holder)
        elif holder in self._holders:
            self._holders.discard(holder)
            self._wake()

    def pause(self) -> None:
        """Hand out nothing until `resume`."""
        if self._pause is None:
            self._pause = SignalSafeEvent()

    def resume(self) -> None:
        """Go on after `pause`."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.set()

    def sleep(self, seconds: float) -> None:
        """Wait for *seconds*.

        Raises:
            ConsumerStoppedError: `stop` was called meanwhile.
        """
        if self._stopped.wait(seconds):
            self._check_running()

    def stop(self) -> None:
        """Hand out nothing more; may be called from a signal handler."""
        self._stopping = True
        self._stopped.set()
        self._wakings.put(None)
        self.resume()

    def close(self, deadline: Deadline) -> None:
        """Stop, and give back to the broker whatever was not acknowledged; once is enough."""
        self.stop()
        atexit.unregister(self._close_at_exit)
        with self._changing:
            topics, self._topics = self._topics, []
        all_within(deadline, [topic.close for topic in topics])

    def _next(self) -> pulsar.Message | None:
        for topic in next(self._turns):
            message = topic.take(self._linger_ms)
            if message is None:
                self._dried(topic)
            elif self._pause or self._stopping:  # since this thread went to the client
                self.again(message, 0)
                return None
            else:
                return message
        return None

    def _wait(self, end: float | None) -> pulsar.Message | None:
        while True:
            self._check_running()
            left = None if end is None else max(0.0, end - time.monotonic())
            pause = self._pause
            if pause is not None:
                if not pause.wait(left):
                    return None
                continue
            message = self._due() or (None if self._holders else self._next())
            if message is not None:
                return message
            wait = self._until_due(left)
            try:
                self._wakings.get(timeout=wait)
            except Empty:
                if wait == left:
                    return None

    def _until_due(self, left: float | None) -> float | None:
        """Return how long to wait at most: until a message is due, but no longer than *left*."""
        with self._changing:
            due = self._again[0][0] if self._again else None
        if due is None:
            return left
        wait = max(0.0, due - time.monotonic())
        return wait if left is None else min(left, wait)

    def _due(self) -> pulsar.Message | None:
        with self._changing:
            if not self._again or self._again[0][0] > time.monotonic():
                return None
            _, _, message = heapq.heappop(self._again)
        return message

    def _flows(self, topic: TopicFetcher) -> None:
        with self._changing:
            self.arrivals += not self._flowing
            self._flowing.append(topic)
            self._arrange()
        self._wake()

    def _dried(self, topic: TopicFetcher) -> None:
        with self._changing:
            # Another taker has seen it too; and the thread may have brought something since.
            if topic not in self._flowing or topic.handed_over:
                return
            self._flowing.remove(topic)
            self._arrange()
        topic.leave_to_thread()

    def _arrange(self) -> None:
        flowing = self._flowing
        orders = [flowing[n:] + flowing[:n] for n in range(len(flowing))]
        # Several threads may go to the next turn at a time.
        self._turns = itertools.cycle(orders or [[]])
        self._linger_ms = _LINGER_MS if len(flowing) == 1 else 0

    def _lose(self, error: Exception) -> None:
        self._lost = error
        self._wake()

    def _wake(self) -> None:
        if self._wakings.empty():
            self._wakings.put(None)

    def _close_at_exit(self) -> None:
        if self._owner.is_parent:
            return
        self.close(Deadline(CLOSE_TIMEOUT))

    def _check_running(self) -> None:
        if self._stopping:
            self._wakings.put(None)  # wakes the next of several takers
            raise ConsumerStoppedError(
                "this consumer was stopped", remedy="make a new one to go on consuming"
            )
        if self._lost is not None:
            self._wakings.put(None)
            raise SubscriptionLostError(
                "the client ended a subscription of this consumer",
                got=str(self._lost),
                remedy="keep the client open for as long as its consumers; make a new consumer",
            ) from self._lost
