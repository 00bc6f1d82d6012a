"""Rate limit, one attempt at a time, and the order of keys.

`RateLimiter` spaces the work of a consumer evenly. `OneAttempt` delays the next attempt at a
message while a handler is at work on it after its time-out. `KeyOrdering` handles messages of one
key one after the other, for ordered policies: a message waits in this consumer, unacknowledged,
until all messages of its key before it are settled, including their retries.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta

import pulsar

from redrive.delivery.decisions import Attempts
from redrive.delivery.in_flight import AtWork, topic_of
from redrive.delivery.middleware.chain import (
    HandBack,
    Handle,
    Middleware,
    Outcome,
    Receive,
    RetryInPlace,
    Settle,
    Settlement,
    Take,
    receive_accepted,
)
from redrive.delivery.parts import Clock, Incoming, Parts
from redrive.errors import InvalidSpecError
from redrive.messages import id_text, sequence_key
from redrive.policy.model import BLOCKED_KEYS, MAX_BLOCKED_KEYS, Policy
from redrive.policy.verdict import Retry


class RateLimiter(Middleware):
    """Starts at most *rate* messages per second; unused capacity is not saved.

    May be used by several threads, one at a time.

    Args:
        rate: None for no limit.
        sleep: waits, or raises the exception that ends the wait.

    Raises:
        InvalidSpecError: *rate* is not positive.
    """

    def __init__(self, rate: float | None, clock: Clock, sleep: Callable[[float], None]) -> None:
        is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if rate is not None and not (is_number and rate > 0):  # also NaN
            raise InvalidSpecError(
                "max_rate must be a positive number of messages per second",
                got=rate,
                remedy="use pause() to stop handling for a while",
            )
        self._seconds_per_message = None if rate is None else 1 / rate
        self._clock = clock
        self._sleep = sleep
        self._free = float("-inf")
        self._turn = threading.Lock()

    def take(self, take: Take) -> Take:
        """Wait for capacity before messages are taken.

        The time-out of a message may run from the moment at which it is taken.
        """
        interval = self._seconds_per_message
        if interval is None:
            return take

        def take_in_time() -> list[pulsar.Message]:
            with self._turn:
                seconds = self._free - self._clock.monotonic()
                if seconds > 0:
                    self._sleep(seconds)
                messages = take()
                self._free = self._clock.monotonic() + len(messages) * interval
            return messages

        return take_in_time


_LOOK_AGAIN_SECONDS = 1.0

_running_here: ContextVar[OneAttempt | None] = ContextVar("redrive_running_here", default=None)


class OneAttempt(Middleware):
    """Keeps a message in this consumer while a handler is at work on an earlier attempt.

    A handler cannot be interrupted after its time-out. Its message has failed and is delivered
    again, so two attempts would run at the same time. Redelivery to another consumer cannot be
    prevented. Only messages with the same first id wait, and only for a handler whose message was
    settled: messages of the same origin are different messages. May be used by several threads.

    Attributes:
        at_work: the calls of all runs of the consumer.
    """

    def __init__(self, incoming: Incoming, attempts: Attempts) -> None:
        self._incoming = incoming
        self._attempts = attempts
        self.at_work = AtWork()

    def take(self, take: Take) -> Take:
        """Take messages on which no handler is at work."""
        calls, settled = self.at_work.calls, self.at_work.settled

        def take_apart() -> list[pulsar.Message]:
            while True:
                messages = take()
                if not calls and not settled:
                    return messages
                free = [message for message in messages if not self._put_off(message)]
                if free:
                    return free

        return take_apart

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Note that the caller handles messages, until the block ends."""
        before = _running_here.set(self)
        try:
            yield
        finally:
            _running_here.reset(before)

    def runs_here(self) -> bool:
        """Return True if the caller is `run` or a handler, in any thread or task."""
        return _running_here.get() is self

    def _put_off(self, message: pulsar.Message) -> bool:
        if not self._is_at_work(message):
            return False
        self._incoming.again(message, _LOOK_AGAIN_SECONDS)
        return True

    def _is_at_work(self, message: pulsar.Message) -> bool:
        settled = [other for messages in list(self.at_work.settled.values()) for other in messages]
        if self.at_work.contains(message) or any(other is message for other in settled):
            return True
        if not settled or not self._attempts.was_retried(message):
            return False
        first_id = self._attempts.of(message).first_id
        return any(self._attempts.of(other).first_id == first_id for other in settled)


MAX_HELD = 1_000
"""Highest number of in-flight and waiting messages; at this number no new ones are taken."""

_OUT_OF_TIME = ""
"""Replaces the id of a settled message whose handler is at work."""

BLOCKED_AFTER_SECONDS = 10.0
"""A key is published as blocked once it has waited this long, or at once if its next attempt is
later than that. Publications are as far apart."""
REQUESTS_READ_EVERY_SECONDS = 60.0
"""Time between readings of the requests to dead-letter a message, while a key is blocked."""
_MAX_CAUSE = 64


@dataclass
class _BlockedKey:
    """A key that waits for the retry of a message.

    Attributes:
        since: time of the first failure of the message in this consumer.
        began: the same in seconds of the monotonic clock.
        due: time from which the key is published, of the same clock.
    """

    message: pulsar.Message
    since: datetime
    began: float
    due: float
    origin: str
    cause: str
    failures: int


class BlockedKeys:
    """Keys that wait for the retry of a message, published for the operator.

    A key is published as a hash with a random key of this process: a status is readable for more
    people than messages are. A timer publishes, so that no key has to wait for another message.
    A request to dead-letter the failed message ends its wait: its next attempt begins at once.

    Args:
        policy: returns the policy in force, which has the requests.
        waiting: returns the number of messages of a key that the consumer has.
    """

    def __init__(
        self, parts: Parts, policy: Callable[[], Policy], waiting: Callable[[str], int]
    ) -> None:
        self._clock = parts.clock
        self._incoming = parts.incoming
        self._policy = policy
        self._reporter = parts.outage_reporter
        self._waiting = waiting
        self._secret = os.urandom(16)
        self._keys: dict[str, _BlockedKey] = {}
        self._published: set[str] = set()
        self._has_changed = False  # one of the published keys
        self._next = self._clock.monotonic()
        self._awaited: float | None = None  # moment of the next publication
        self._read_requests_at = self._next
        self._changing = threading.Lock()
        self._timer = parts.timer(self._next_due, self._fire)

    def block(self, key: str, settlement: Settlement, delay: timedelta) -> None:
        """Note that a key waits *delay* for the retry of a failed message."""
        failure, now = settlement.failed(), self._clock.monotonic()
        cause = "" if failure.cause is None else failure.cause.type[:_MAX_CAUSE]
        with self._changing:
            before = self._keys.get(key)
            began = now if before is None else before.began
            is_long = now + delay.total_seconds() >= began + BLOCKED_AFTER_SECONDS
            self._keys[key] = _BlockedKey(
                message=settlement.message,
                since=self._clock.now() if before is None else before.since,
                began=began,
                due=now if is_long else began + BLOCKED_AFTER_SECONDS,
                origin=failure.attempt.origin,
                cause=cause,
                failures=failure.attempt.number,
            )
        self.change(key)

    def free(self, key: str) -> None:
        """Note that a key waits no longer."""
        with self._changing:
            self._keys.pop(key, None)
        self.change(key)

    def change(self, key: str) -> None:
        """Publish a blocked key again: it, or the number of its messages, has changed."""
        if key not in self._keys and key not in self._published:
            return
        with self._changing:
            due = self._next
            if key in self._published:
                self._has_changed = True
            elif key in self._keys:
                due = max(due, self._keys[key].due)
            is_sooner = self._awaited is None or due < self._awaited
        if is_sooner:
            self._timer.reschedule()

    def close(self) -> None:
        """Publish nothing any more."""
        self._timer.close()

    def _next_due(self) -> float | None:
        with self._changing:
            dues = [self._next] if self._has_changed else []
            if len(self._published) < MAX_BLOCKED_KEYS:
                keys = self._keys.items()
                dues += [key.due for name, key in keys if name not in self._published]
            self._awaited = max(self._next, min(dues)) if dues else None
            moments = [self._awaited, self._read_requests_at if self._keys else None]
            return min((moment for moment in moments if moment is not None), default=None)

    def _fire(self) -> None:
        now = self._clock.monotonic()
        if self._awaited is not None and self._awaited <= now:
            self._publish(now)
        if self._read_requests_at <= now:
            self._read_requests_at = now + REQUESTS_READ_EVERY_SECONDS
            requested = self._policy().dead_letter_now
            with self._changing:
                keys = [key for key in self._keys.values() if key.origin in requested]
            for key in keys:
                self._incoming.hasten(key.message)

    def _publish(self, now: float) -> None:
        import json  # noqa: PLC0415 - most consumers have no order, or no blocked key

        with self._changing:
            due = [(name, key) for name, key in self._keys.items() if key.due <= now]
            shown = due[:MAX_BLOCKED_KEYS]
            self._published = {name for name, _ in shown}
            self._has_changed = False
            self._next = now + BLOCKED_AFTER_SECONDS
            items = [self._item(name, key) for name, key in shown]
        self._reporter.show(BLOCKED_KEYS, json.dumps(items) if items else "")

    def _item(self, key: str, blocked: _BlockedKey) -> dict[str, object]:
        import hashlib  # noqa: PLC0415 - loads OpenSSL

        digest = hashlib.blake2b(key.encode(), digest_size=6, key=self._secret)
        return {
            "keyHash": digest.hexdigest(),
            "sinceTime": blocked.since.isoformat(timespec="seconds"),
            "messageID": blocked.origin,
            "cause": blocked.cause,
            "failures": blocked.failures,
            "behind": max(0, self._waiting(key) - 1),
        }


class KeyOrdering(Middleware):
    """Delivers at most one message of a key at a time, and keeps retries in this consumer.

    May be used by several threads.

    Args:
        parts: source of the messages, and publication of the keys that wait for a retry.
        policy: returns the policy in force.
        by_topic: True if each topic has an order of its own: replayed dead letters must not wait
            for messages that follow them.
    """

    def __init__(self, parts: Parts, policy: Callable[[], Policy], *, by_topic: bool) -> None:
        self._incoming = parts.incoming
        self._by_topic = by_topic
        self._clock = parts.clock
        # By key and id; the first message is in-flight.
        self._queues: dict[str, dict[str, pulsar.Message]] = {}
        self._blocked = BlockedKeys(parts, policy, lambda key: len(self._queues.get(key, ())))
        self._held = 0
        self._at_work: dict[int, str | None] = {}  # by message: its key if it is settled
        self._taking = threading.Lock()
        self._changing = threading.Lock()

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that is first of its key."""

        def receive_in_turn(timeout: float | None) -> pulsar.Message | None:
            end = None if timeout is None else self._clock.monotonic() + timeout
            # One thread at a time: messages must enter their queues in the order of receipt.
            if not self._taking.acquire(timeout=-1 if timeout is None else timeout):
                return None
            try:
                remaining = None if end is None else max(0.0, end - self._clock.monotonic())
                return receive_accepted(receive, self._may_go, self._clock.monotonic, remaining)
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
        """Retry in place, and release the next message of the key after a settlement."""

        def settle_in_turn(settlement: Settlement) -> pulsar.MessageId | None:
            match settlement.verdict:
                case Retry(delay=delay, reconsume_times=times):
                    if sequence_key(settlement.message):
                        key, _ = self._queue_of(settlement.message)
                        self._blocked.block(key, settlement, delay)
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
            following = next(iter(queue.values()), None)
            if following is None:
                del self._queues[key]
            # Before another message of the key can fail.
            self._blocked.free(key)
        if following is not None:
            self._incoming.again(following, 0)

    def _count(self, more: int) -> None:
        self._held += more
        self._incoming.hold_new(self, held=self._held >= MAX_HELD)

    def _may_go(self, message: pulsar.Message) -> bool:
        key, message_id = self._queue_of(message)
        with self._changing:
            queue = self._queues.setdefault(key, {})
            if message_id in queue:
                # Returned by this consumer, or a copy that the broker redelivered after a lost
                # connection: acknowledging one of them acknowledges both.
                return next(iter(queue.values())) is message
            queue[message_id] = message
            self._count(+1)
            # Later, a settlement may have made it first, and returned it.
            is_first = len(queue) == 1
        if not is_first:
            self._blocked.change(key)
        return is_first

    def close(self) -> None:
        """Publish no blocked keys any more."""
        self._blocked.close()

    def _queue_of(self, message: pulsar.Message) -> tuple[str, str]:
        message_id = id_text(message.message_id())
        # A message without a key has no order.
        key = sequence_key(message) or message_id
        return f"{topic_of(message)}/{key}" if self._by_topic else key, message_id
