"""Several subscriptions as one stream of messages; called by `consumer`.

A thread per subscription blocks in the client's `receive` and hands over what comes. The taker
serves the subscriptions in turn, so that neither a busy source topic nor a flood of retries keeps
the other waiting for longer than one message.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

import pulsar

from redrive.delivery.latch import Latch
from redrive.errors import RedriveError

_LOOK_EVERY_SECONDS = 1.0
"""How late a message that is handed out again may be, for a taker who waits all the while."""

_WINDOW = 100
"""Messages of one subscription between its thread and the taker: enough to seldom switch threads.

None of them is acknowledged, so none is lost when the process ends.
"""


_PATIENCE_MS = 1_000
"""How long a thread stays in the client when nothing comes."""


class ConsumerStoppedError(RedriveError):
    """The consumer was stopped or closed: it hands out no further message."""

    reason = "ConsumerStopped"


class SubscriptionLostError(RedriveError):
    """The client ended a subscription by itself, for example because the client was closed."""

    reason = "SubscriptionLost"


class Inbox:
    """The messages of all *consumers*, each in the order in which its subscription delivers them.

    The inbox owns the consumers: `close` closes them.
    """

    def __init__(self, consumers: Sequence[pulsar.Consumer]) -> None:
        # One entry for each waiting message, and one to wake the taker at the end. A signal
        # handler may put one in at any moment, even into this queue's own methods.
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        self._lines = deque(_Line(consumer, self._arrivals) for consumer in consumers)
        self._turn = threading.Lock()
        self._again: list[tuple[float, int, pulsar.Message]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._stopped = Latch()
        self._pause: Latch | None = None  # closed while nothing is handed out
        # A thread that is inside the client when the interpreter goes away aborts the process.
        atexit.register(self.close)

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        """Return the next message, or None if none came within *timeout* seconds.

        Raises:
            ConsumerStoppedError: `stop` was called.
            SubscriptionLostError: the client ended a subscription.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._check_running()
            left = None if end is None else max(0.0, end - time.monotonic())
            pause = self._pause
            if pause is not None:
                if not pause.wait(left):
                    return None
                continue
            due = self._due() if self._again else None
            if due is not None:
                return due
            wait = _LOOK_EVERY_SECONDS if left is None else min(left, _LOOK_EVERY_SECONDS)
            try:
                self._arrivals.get(timeout=wait)
            except Empty:
                if wait == left:
                    return None
                continue
            if self._pause is None:
                return self._next()
            self._arrivals.put(None)  # paused while this thread waited

    def again(self, message: pulsar.Message, seconds: float) -> None:
        """Hand *message* out once more after so many *seconds*; it stays unacknowledged."""
        with self._turn:
            entry = (time.monotonic() + seconds, next(self._numbers), message)
            heapq.heappush(self._again, entry)

    def pause(self) -> None:
        """Hand out nothing until `resume`."""
        if self._pause is None:
            self._pause = Latch()

    def resume(self) -> None:
        """Go on after `pause`."""
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.open()

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
        self._stopped.open()
        self._arrivals.put(None)
        self.resume()

    def close(self) -> None:
        """Stop, and give back to the broker whatever was not acknowledged; once is enough."""
        self.stop()
        atexit.unregister(self.close)
        with self._turn:
            lines, self._lines = self._lines, deque()
        with contextlib.ExitStack() as closing:
            for line in lines:
                closing.callback(line.close)

    def _due(self) -> pulsar.Message | None:
        with self._turn:
            if not self._again or self._again[0][0] > time.monotonic():
                return None
            _, _, message = heapq.heappop(self._again)
        return message

    def _next(self) -> pulsar.Message:
        with self._turn:
            self._check_running()
            self._lines.rotate()
            line = next(line for line in self._lines if line.waiting)
            message = line.waiting.popleft()
        line.room.release()
        return message

    def _check_running(self) -> None:
        if self._stopping:
            self._arrivals.put(None)  # wakes the next of several takers
            raise ConsumerStoppedError(
                "this consumer was stopped", remedy="make a new one to go on consuming"
            )
        lost = next((line.lost for line in self._lines if line.lost), None)
        if lost is not None:
            self._arrivals.put(None)
            raise SubscriptionLostError(
                "the client ended a subscription of this consumer",
                got=str(lost),
                remedy="keep the client open for as long as its consumers; make a new consumer",
            ) from lost


class _Line:
    """The messages of one subscription that wait to be taken, and the thread that brings them."""

    def __init__(self, consumer: pulsar.Consumer, arrivals: SimpleQueue[None]) -> None:
        self.waiting: deque[pulsar.Message] = deque()
        self.room = threading.Semaphore(_WINDOW)
        self.lost: Exception | None = None
        self._consumer = consumer
        self._arrivals = arrivals
        self._thread = threading.Thread(target=self._feed, name="redrive-inbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # A client that was closed first has closed its consumers: the end that was wanted.
        with contextlib.suppress(pulsar.AlreadyClosed):
            self._consumer.close()  # wakes the thread if it is in receive()
        self.room.release()  # … or if it waits for room
        self._thread.join()

    def _feed(self) -> None:
        while True:
            self.room.acquire()
            try:
                message = self._receive()
            except pulsar.exceptions.PulsarException as error:
                self.lost = error
                self._arrivals.put(None)
                return
            self.waiting.append(message)
            self._arrivals.put(None)

    def _receive(self) -> pulsar.Message:
        # Never without a timeout: the client forgets a receive that begins while it closes.
        while True:
            with contextlib.suppress(pulsar.Timeout):
                return self._consumer.receive(_PATIENCE_MS)
