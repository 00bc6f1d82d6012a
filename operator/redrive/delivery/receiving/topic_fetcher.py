"""The messages of one subscription; called by `fetcher`.

While a topic flows, whoever takes a message gets it from the client in the same thread: handing it
over from another thread costs more than most handlers do. Once nothing comes, a thread of the
topic's waits in the client and hands over the next message, so that a taker can wait for several
topics at a time.

The client drops chunks whose message it can't put together at the moment: of more messages at a
time than it keeps, and those that came before and after a lost connection. Neither acknowledges
them nor asks for them again. So a topic that stays dry while nothing is unsettled has the broker
deliver again whatever it counts as delivered. A set of chunks that stays incomplete for one minute
the client acknowledges: its producer has ended before the last one.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pulsar

_POLL_MS = 1_000
"""How long the thread stays in the client when nothing comes, and between two checks of the
connection."""

_LOOK_EVERY_SECONDS = 0.001
"""How often `close` looks whether the takers have left the client."""


_RECOVER_AFTER_SECONDS = (15.0, 30.0, 180.0)
"""After so long without a message the broker delivers again, and then from the start. Each second
delivery has the client begin an incomplete set of chunks again or drop it, in turn; in one of two
cycles it keeps the set for the longest time, within which it acknowledges it."""


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


class TopicFetcher:
    """One subscription, whose *consumer* it owns. It flows once its thread has said so.

    Args:
        flows: called by the thread when there is a message to take, and maybe more.
        lost: called with what ended the subscription, when there will never be another message.

    Attributes:
        watch: reports a lost connection, where one is to be reported.
        may_recover: returns True if nothing that the broker has delivered is unsettled, and nothing
            is handled twice if it is delivered again.
        recovered: called with the topic once a message has come that the client had dropped.
    """

    def __init__(
        self,
        consumer: pulsar.Consumer,
        flows: Callable[[TopicFetcher], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._consumer = consumer
        self._flows = flows
        self._lost = lost
        self.watch: ConnectionWatch | None = None
        self.may_recover: Callable[[], bool] = lambda: False
        self.recovered: Callable[[str], None] = lambda _: None
        self._pauses = _pauses()
        self._recover_at = 0.0
        self.handed_over: deque[pulsar.Message] = deque()
        self._inside: list[None] = []  # an entry for each taker who is in the client
        self._closing = False
        self._dry = threading.Semaphore()
        self._thread = threading.Thread(target=self._watch, name="redrive-fetcher", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Return the name of the topic."""
        name: str = self._consumer.topic()
        return name

    @property
    def connected(self) -> bool:
        """Return True if the client has a connection for the topic, and for all its partitions."""
        return not self._closing and bool(self._consumer.is_connected())

    def take(self, timeout_ms: int) -> pulsar.Message | None:
        """Return the next message of a topic that flows, or None if it turned out to be dry."""
        if self.handed_over:
            with contextlib.suppress(IndexError):  # another taker was faster
                return self.handed_over.popleft()
        self._inside.append(None)
        try:
            return None if self._closing else self._consumer.receive(timeout_ms)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException:
            return None  # a time-out, or else what the thread will run into as well
        finally:
            self._inside.pop()

    def leave_to_thread(self) -> None:
        """Have the thread wait for the next message: no other takes until it calls *flows*."""
        self._dry.release()

    def close(self) -> None:
        """Give back to the broker whatever was not acknowledged."""
        self._closing = True
        while self._inside:  # a thread in the client when the interpreter goes away aborts it
            time.sleep(_LOOK_EVERY_SECONDS)
        # A client that was closed first has closed its consumers: the end that was wanted.
        with contextlib.suppress(pulsar.exceptions.PulsarException):  # nor one without an answer
            self._consumer.close()  # wakes the thread if it is in receive()
        self._dry.release()  # … or if it has nothing to do
        self._thread.join()

    def _watch(self) -> None:
        while True:
            while not self._dry.acquire(timeout=_POLL_MS / 1_000):
                self._check_connection()
            try:
                message = self._receive()
            except pulsar.exceptions.PulsarException as error:
                self._lost(error)
                return
            self.handed_over.append(message)
            self._flows(self)

    def _receive(self) -> pulsar.Message:
        # Never without a timeout: the client forgets a receive that begins while it closes.
        self._recover_at = max(self._recover_at, time.monotonic() + _RECOVER_AFTER_SECONDS[0])
        recovering = False
        while not self._closing:  # which takes long where the broker doesn't answer
            with contextlib.suppress(pulsar.Timeout):
                message = self._consumer.receive(_POLL_MS)
                if recovering and message.redelivery_count():
                    self._pauses, self._recover_at = _pauses(), 0.0
                    self.recovered(self.name)
                return message
            self._check_connection()
            if time.monotonic() >= self._recover_at and self.may_recover():
                self._consumer.redeliver_unacknowledged_messages()
                self._recover_at, recovering = time.monotonic() + next(self._pauses), True
        raise pulsar.AlreadyClosed

    def _check_connection(self) -> None:
        if self.watch is not None and not self._closing:
            self.watch.check(connected=self.connected)


def _pauses() -> Iterator[float]:
    """Yield how long to wait after each delivery; before the first it was the first of them."""
    first, *others = _RECOVER_AFTER_SECONDS
    return itertools.cycle([*others, first])
