"""The messages of one subscription; called by `fetcher`.

While a topic flows, whoever takes a message gets it from the client in the same thread: handing it
over from another thread costs more than most handlers do. Once nothing comes, a thread of the
topic's waits in the client and hands over the next message, so that a taker can wait for several
topics at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

import pulsar

_POLL_MS = 1_000
"""How long the thread stays in the client when nothing comes."""

_LOOK_EVERY_SECONDS = 0.001
"""How often `close` looks whether the takers have left the client."""


class TopicFetcher:
    """One subscription, whose *consumer* it owns. It flows once its thread has said so.

    Args:
        flows: called by the thread when there is a message to take, and maybe more.
        lost: called with what ended the subscription, when there will never be another message.
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
        self.handed_over: deque[pulsar.Message] = deque()
        self._inside: list[None] = []  # an entry for each taker who is in the client
        self._closing = False
        self._dry = threading.Semaphore()
        self._thread = threading.Thread(target=self._watch, name="redrive-fetcher", daemon=True)
        self._thread.start()

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
            self._dry.acquire()
            try:
                message = self._receive()
            except pulsar.exceptions.PulsarException as error:
                self._lost(error)
                return
            self.handed_over.append(message)
            self._flows(self)

    def _receive(self) -> pulsar.Message:
        # Never without a timeout: the client forgets a receive that begins while it closes.
        while not self._closing:  # which takes long where the broker doesn't answer
            with contextlib.suppress(pulsar.Timeout):
                return self._consumer.receive(_POLL_MS)
        raise pulsar.AlreadyClosed
