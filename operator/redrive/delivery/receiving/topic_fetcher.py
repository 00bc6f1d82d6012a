"""The messages of one subscription; called by `fetcher`.

While a topic flows, whoever takes a message gets it from the client in the same thread: handing it
over from another thread costs more than most handlers do. Once nothing comes, a thread of the
topic's waits in the client and hands over the next message, so that a taker can wait for several
topics at a time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import pulsar

from redrive.delivery.bounded import in_background, within
from redrive.delivery.receiving.queue_length import LOOK_SECONDS, QueuedSubscription, QueueLength
from redrive.errors import RedriveError

_POLL_MS = 1_000
"""How long the thread stays in the client when nothing comes."""

_LOOK_EVERY_SECONDS = 0.001
"""How often it is looked whether the takers have left the client."""

_LAST_MS = 10
"""How long nothing comes from the client when nothing waits in it."""

_EXCHANGE_SECONDS = 2.0
"""How long a broker has to let another consumer in; nothing is handed out meanwhile."""

_log = logging.getLogger(__name__)


class Receiving(Protocol):
    """Where messages come from: a `QueuedSubscription`, or a reader."""

    @property
    def receive(self) -> Callable[[int], pulsar.Message]:
        """Return the next message within so many milliseconds, or raise pulsar.Timeout."""

    @property
    def close(self) -> Callable[[], None]:
        """End: what was not settled goes back to the broker."""


class TopicFetcher:
    """One subscription, whose consumer it owns. It flows once its thread has said so.

    Args:
        begin: called with each message that is taken; False if it is not to be handed out.
        flows: called by the thread when there is a message to take, and maybe more.
        lost: called with what ended the subscription, when there will never be another message.
        while_idle: makes a call while nothing of this topic is in hand, and returns what it
            returns; False if there was no such moment.
    """

    def __init__(
        self,
        subscription: Receiving,
        begin: Callable[[pulsar.Message], bool],
        flows: Callable[[TopicFetcher], None],
        lost: Callable[[Exception], None],
        while_idle: Callable[[TopicFetcher, Callable[[], bool]], bool],
    ) -> None:
        self._subscription = subscription
        self._begin = begin
        self._flows = flows
        self._lost = lost
        self._while_idle = while_idle
        self._length = QueueLength(time.monotonic())
        self._taken = 0  # nearly: several threads count
        self.handed_over: deque[pulsar.Message] = deque()
        self._inside: list[None] = []  # an entry for each taker, until its message is in hand
        self._shut = False  # for takers
        self._closing = False
        self._changing = threading.Lock()
        self._dry = threading.Semaphore()
        self._thread = threading.Thread(target=self._watch, name="redrive-fetcher", daemon=True)
        self._thread.start()

    def take(self, timeout_ms: int) -> pulsar.Message | None:
        """Return the next message of a topic that flows, or None if it turned out to be dry."""
        self._inside.append(None)  # before it looks, for `_shut_out`
        try:
            while not self._shut:
                message = self._next_handed_over() if self.handed_over else None
                message = message or self._subscription.receive(timeout_ms)
                self._taken += 1
                if self._begin(message):
                    return message
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.exceptions.PulsarException:
            pass  # a time-out, or else what the thread will run into as well
        finally:
            self._inside.pop()
        return None

    def leave_to_thread(self) -> None:
        """Have the thread wait for the next message: no other takes until it calls *flows*."""
        self._dry.release()

    @contextlib.contextmanager
    def shut_out(self) -> Iterator[None]:
        """Let no taker in, after those within have left, with a message in hand or with none."""
        self._shut_out()
        try:
            yield
        finally:
            with self._changing:
                self._shut = self._closing

    def close(self) -> None:
        """Give back to the broker whatever was not acknowledged."""
        with self._changing:
            self._closing = True
            self._shut_out()  # a thread in the client when the interpreter goes away aborts it
        # A client that was closed first has closed its consumers: the end that was wanted.
        with contextlib.suppress(pulsar.exceptions.PulsarException):  # nor one without an answer
            self._subscription.close()  # wakes the thread if it is in receive()
        self._dry.release()  # … or if it has nothing to do
        self._thread.join()

    def _shut_out(self) -> None:
        # A taker enters before it looks: it sees that this is shut, or is seen.
        self._shut = True
        while self._inside:
            time.sleep(_LOOK_EVERY_SECONDS)

    def _next_handed_over(self) -> pulsar.Message | None:
        with contextlib.suppress(IndexError):  # another taker was faster
            return self.handed_over.popleft()
        return None

    def _watch(self) -> None:
        while True:
            while not self._dry.acquire(timeout=LOOK_SECONDS):
                self._adapt(dry=False)
            self._adapt(dry=True)
            try:
                if not self.handed_over:
                    self.handed_over.append(self._receive())
            except pulsar.exceptions.PulsarException as error:
                self._lost(error)
                return
            self._flows(self)

    def _receive(self) -> pulsar.Message:
        # Never without a timeout: the client forgets a receive that begins while it closes.
        while not self._closing:  # which takes long where the broker doesn't answer
            with contextlib.suppress(pulsar.Timeout):
                return self._subscription.receive(_POLL_MS)
        raise pulsar.AlreadyClosed

    def _adapt(self, *, dry: bool) -> None:
        """Have the queue follow how fast messages are taken."""
        queue = self._subscription
        if not isinstance(queue, QueuedSubscription) or not queue.adapts:
            return
        length = self._length.look(self._taken, time.monotonic(), dry=dry)
        if length is None:
            return
        if self._while_idle(self, functools.partial(self._exchange, queue, length)):
            self._length.changed()
        else:
            self._length.kept(time.monotonic())

    def _exchange(self, queue: QueuedSubscription, length: int) -> bool:
        """Go on with another consumer; what waits in the one before goes back to the broker."""
        # A batch of which some were handled would come again as a whole.
        if not queue.adapts or any(map(_follows_in_batch, self._waiting(queue))):
            return False
        opening = functools.partial(queue.open_consumer, length)
        try:
            consumer = within(_EXCHANGE_SECONDS, opening, late=_leave)
        except (RedriveError, TimeoutError) as error:
            _log.debug("the queue keeps its length: %s", error)
            return False
        with self._changing:
            unwanted = consumer if self._closing else queue.exchange(consumer, length)
            self.handed_over.clear()
        # It tells the broker first what was acknowledged last.
        in_background(functools.partial(_leave, unwanted))
        return True

    def _waiting(self, queue: QueuedSubscription) -> Iterator[pulsar.Message]:
        """Yield all that waits in the client, which is handed over."""
        yield from list(self.handed_over)
        with contextlib.suppress(pulsar.exceptions.PulsarException):  # nothing more
            while len(self.handed_over) < queue.most_waiting:  # more may come all the time
                self.handed_over.append(queue.receive(_LAST_MS))
                yield self.handed_over[-1]


def _follows_in_batch(message: pulsar.Message) -> bool:
    index: int = message.message_id().batch_index()
    return index > 0


def _leave(consumer: pulsar.Consumer) -> None:
    with contextlib.suppress(pulsar.exceptions.PulsarException):
        consumer.close()
