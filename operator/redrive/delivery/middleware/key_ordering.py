"""Messages of one key, one after the other; for ordered policies.

A message goes when those before it with its key are settled, a retry of one of them included: then
it is the others that wait, as they do for a handler that is out of time. They wait in this
consumer, unacknowledged.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pulsar

from redrive.copying import reading
from redrive.copying.reading import id_text
from redrive.delivery.middleware.chain import (
    Handle,
    Middleware,
    Outcome,
    Receive,
    Settle,
    receive_accepted,
)
from redrive.delivery.middleware.settlement import HandBack, RetryInPlace, Settlement
from redrive.delivery.parts import Clock, Incoming
from redrive.delivery.receiving.origin import topic_of
from redrive.policy.verdict import Retry

MAX_HELD = 1_000
"""With so many messages in hand or waiting, nothing new is taken from the broker."""

_OUT_OF_TIME = ""
"""In the place of its id: a message that is settled, while its handler is still at work."""


class KeyOrdering(Middleware):
    """Hands out at most one message of a key at a time, and keeps retries in this consumer.

    May be used by several threads.

    Args:
        incoming: where the messages come from.
        by_topic: whether the topics have an order each: dead letters that come back must not wait
            for messages that are to follow them.
    """

    def __init__(self, incoming: Incoming, clock: Clock, *, by_topic: bool) -> None:
        self._incoming = incoming
        self._by_topic = by_topic
        self._clock = clock
        self._queues: dict[str, dict[str, pulsar.Message]] = {}  # by key and id; the first one goes
        self._held = 0
        self._at_work: dict[int, str | None] = {}  # by message, its key if it was settled meanwhile
        self._taking = threading.Lock()
        self._changing = threading.Lock()

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message whose turn it is."""

        def receive_in_turn(timeout: float | None) -> pulsar.Message | None:
            end = None if timeout is None else self._clock.monotonic() + timeout
            # One at a time: what another thread took later must not get into its queue earlier.
            if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
                return None
            try:
                left = None if end is None else max(0.0, end - self._clock.monotonic())
                return receive_accepted(receive, self._may_go, self._clock.monotonic, left)
            finally:
                self._taking.release()

        return receive_in_turn

    def handle(self, handle: Handle) -> Handle:
        """Let none of a key go beside a handler whose message was settled: it is out of time."""

        def handle_in_turn(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            with self._changing:
                self._at_work.update((id(message), None) for message in messages)
            try:
                return handle(messages)
            finally:
                with self._changing:
                    keys = [self._at_work.pop(id(message)) for message in messages]
                for key in keys:
                    if key is not None:
                        self._leave(key, _OUT_OF_TIME)

        return handle_in_turn

    def settle(self, settle: Settle) -> Settle:
        """Retry in place, and let the next message of the key go once one is settled."""

        def settle_in_turn(settlement: Settlement) -> pulsar.MessageId | None:
            match settlement.verdict:
                case Retry(delay=delay, reconsume_times=times):
                    return settle(settlement._replace(verdict=RetryInPlace(delay, times)))
                case HandBack():
                    return settle(settlement)
            receipt = settle(settlement)
            self._free(settlement.message)
            return receipt

        return settle_in_turn

    def _free(self, message: pulsar.Message) -> None:
        key, message_id = self._queue_of(message)
        with self._changing:
            queue = self._queues.get(key, {})
            if id(message) in self._at_work and message_id in queue:
                del queue[message_id]  # it may be delivered again
                self._queues[key] = {_OUT_OF_TIME: message, **queue}
                self._at_work[id(message)] = key
                return
        self._leave(key, message_id)

    def _leave(self, key: str, message_id: str) -> None:
        with self._changing:
            queue = self._queues.get(key, {})
            if queue.pop(message_id, None) is None:
                return
            self._count(-1)
            if not queue:
                del self._queues[key]
                return
            following = next(iter(queue.values()))
        self._incoming.again(following, 0)

    def _count(self, more: int) -> None:
        self._held += more
        self._incoming.hold_new(self, held=self._held >= MAX_HELD)

    def _may_go(self, message: pulsar.Message) -> bool:
        key, message_id = self._queue_of(message)
        with self._changing:
            queue = self._queues.setdefault(key, {})
            if message_id not in queue:
                queue[message_id] = message
                self._count(+1)
                return len(queue) == 1
            # Handed out again by us, or else a copy: a broker that lost the connection sends all
            # again, and to acknowledge the one acknowledges the other.
            return next(iter(queue.values())) is message

    def _queue_of(self, message: pulsar.Message) -> tuple[str, str]:
        message_id = id_text(message.message_id())
        # What has no key has no order.
        key = reading.sequence_key(message) or message_id
        return f"{topic_of(message)}/{key}" if self._by_topic else key, message_id
