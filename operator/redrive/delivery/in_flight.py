"""In-flight messages, recently settled ids, and origins.

After a lost connection, or a move of the topic, the broker redelivers every unacknowledged message,
also to a consumer that is still handling it. The consumer drops such a copy: the result of the
in-flight message applies to both.

A copy may also arrive after its message was settled: within some seconds, after the next
connection, or after it waited in the client. The client drops acknowledgements while it has no
connection. The queue of a topic with partitions outlives their connections, and appends redelivered
messages to those that it contains.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import pulsar

from redrive import messages
from redrive.delivery.arrivals import REMEMBERED_SECONDS, Burst, SettledRuns
from redrive.delivery.parts import Clock, Incoming, Subscription
from redrive.errors import InvalidSpecError
from redrive.policy.naming import TopicName

_Held = weakref.ref[pulsar.Message]

_RESUME = 0.9
"""Share of `max_bytes` below which receiving resumes."""

_MAX_OPEN = 32
"""Open bursts, whose contents are not counted: 8 MiB at most."""
_MIN_BYTES_OPEN = 64 * 1024 * 1024
"""With a smaller limit of bytes the contents of all messages are counted."""
_OPEN_SECONDS = 1.0


class InFlightMessages:
    """Messages that were taken and not settled. It refers to them weakly.

    A message that an application drops without settling it is no longer in-flight. May be used by
    several threads.

    Reading the id of a message takes as long as all other work here, so the ids of an open burst
    are not read. A burst is open from its first message until one of these events: all its messages
    are settled; a message arrives that may be a copy; a later burst opens after more than 1 s.

    Args:
        settled: remembers messages that are no longer in-flight.
        acknowledge: tells the broker that a message is settled.
        hold: called with True to suspend receiving, when in-flight contents exceed *max_bytes*;
            with False to resume it.
        max_bytes: limit of the contents, without those of open bursts.
    """

    def __init__(
        self,
        settled: Settled,
        acknowledge: Callable[[pulsar.Message], object],
        hold: Callable[[bool], object],
        *,
        max_bytes: int,
    ) -> None:
        self._settled = settled
        self._acknowledge = acknowledge
        self._new: dict[int, _Held] = {}  # by address, those of open bursts
        self._open: list[Burst] = []
        self._known: dict[int, tuple[bytes, _Held, int]] = {}
        self._hold_new = hold
        self._max_bytes = max_bytes
        self._bytes = 0
        self._full = False
        self._by_id: dict[bytes, _Held] = {}
        # By id, the last copy of each. The client acknowledges a batch once all its messages of one
        # delivery are acknowledged. An acknowledged original counts only for its own delivery.
        self._copies: dict[bytes, pulsar.Message] = {}
        self._look_at = 1_000
        self._dropped = 0  # by an application that has not settled them
        self._changing = threading.Lock()

    def begin(self, message: pulsar.Message) -> bool:
        """Note that *message* is in-flight; return False if it is a copy, not to be handed out."""
        burst: Burst | None = getattr(message, "redrive", None)
        if burst is not None and (burst.open or (burst.runs and self._opened(burst))):
            address = id(message)
            before = self._new.get(address)
            if before is not None and before() is not message:
                self._dropped += 1
            self._new[address] = weakref.ref(message)
            return True
        key = _id_of(message)
        with self._changing:
            return self._begin_known(message, key, burst)

    def end(self, message: pulsar.Message, *, moved: bool = False) -> None:
        """Note that *message* is settled, and remember its id for some seconds.

        The id of a *moved* message is always remembered: a copy would be moved, too.
        """
        if not moved and self._new.pop(id(message), None) is not None:
            burst: Burst = message.redrive
            burst.settled.append((self._settled.clock.monotonic(), message))
            if len(burst.settled) == burst.size or not burst.open:
                with self._changing:
                    self._close(burst)
            return
        with self._changing:
            held = self._known.get(id(message))
            # Before it leaves the in-flight messages: `begin` first reads without the lock.
            if moved or held is not None:
                self._settled.add(_id_of(message) if held is None else held[0])
            _, copy = self._forget(id(message))
            self._new.pop(id(message), None)
        if copy is not None:
            self._acknowledge(copy)

    def end_all(self, messages: Sequence[pulsar.Message]) -> None:
        """Note that each of *messages* is settled as handled; see `end`."""
        new, now = self._new, self._settled.clock.monotonic()
        for message in messages:
            if new.pop(id(message), None) is None:
                self.end(message)
                continue
            burst: Burst = message.redrive
            burst.settled.append((now, message))
            if len(burst.settled) == burst.size or not burst.open:
                with self._changing:
                    self._close(burst)

    def let_go(self, message: pulsar.Message) -> None:
        """Forget *message*, so that its redelivery by the broker is handled."""
        self._new.pop(id(message), None)
        with self._changing:
            self._forget(id(message))

    def may_redeliver(self) -> bool:
        """Return True if nothing is unsettled, so that the broker may deliver again.

        In-flight messages are unsettled, and those that an application has dropped.
        """
        with self._changing:
            self._forget_dropped()
            return not (self._known or self._dropped)

    def __len__(self) -> int:
        """Return the number of in-flight messages."""
        with self._changing:
            self._forget_dropped()
            return len(self._known)

    def _begin_known(self, message: pulsar.Message, key: bytes, burst: Burst | None) -> bool:
        new = burst is not None and burst.alone
        if len(self._known) > self._look_at:
            self._forget_dropped()
        if self._full:
            self._forget_dropped()
            self._hold_new(self._full)
        if not new and (self._open or self._new):
            self._learn()
        entry = self._known.get(id(message))
        if entry is not None:
            if entry[1]() is message:
                return True
            self._forget(id(message))  # as in `_learn`
            self._dropped += 1
        if new:
            self._hold(message, key)
            return True
        settled = self._settled.take(key, message, burst.delivered_after if burst else None)
        original = self._by_id.get(key)
        if original is not None and original() is not None:
            self._copies[key] = message
            return False
        if settled:
            self._acknowledge(message)
            return False
        self._hold(message, key)
        return True

    def _opened(self, burst: Burst) -> bool:
        """Open *burst* at its first message; return True unless it was closed before."""
        with self._changing:
            if burst.runs and not burst.open:
                now = self._settled.clock.monotonic()
                if self._max_bytes < _MIN_BYTES_OPEN:
                    burst.runs = None
                    return False
                if len(self._open) == _MAX_OPEN or (
                    self._open and now - self._open[0].since > _OPEN_SECONDS
                ):
                    self._learn()
                burst.open, burst.since = True, now
                self._open.append(burst)
            return burst.open

    def _close(self, burst: Burst) -> None:
        if burst in self._open:
            self._open.remove(burst)
        self._settled.add_burst(burst)
        burst.open, burst.runs = False, None

    def _learn(self) -> None:
        """Close all bursts, and read the ids of their in-flight messages."""
        for burst in self._open[:]:
            self._close(burst)
        for address in list(self._new):
            held = self._new.pop(address, None)
            if held is None:  # settled meanwhile: `end` first looks without the lock
                continue
            message = held()
            if message is None:
                self._dropped += 1
            else:
                self._forget(address)  # of a message dropped before, at the same address
                self._hold(message, _id_of(message))

    def _hold(self, message: pulsar.Message, key: bytes) -> None:
        address, size = id(message), messages.size(message)
        held = weakref.ref(message, lambda _: self._let_in(address))
        self._known[address] = (key, held, size)
        self._by_id[key] = held
        self._bytes += size
        self._bound()

    def _forget(self, address: int) -> tuple[bytes | None, pulsar.Message | None]:
        """Return the id of a message that is no longer in-flight, and a copy of it that came."""
        entry = self._known.pop(address, None)
        if entry is None:
            return None, None
        key, held, size = entry
        self._bytes -= size
        self._bound()
        if self._by_id.get(key) is not held:
            return key, None
        del self._by_id[key]
        return key, self._copies.pop(key, None) if self._copies else None

    def _bound(self) -> None:
        full = self._bytes >= (self._max_bytes * _RESUME if self._full else self._max_bytes)
        if full != self._full:
            self._full = full
            self._hold_new(full)

    def _let_in(self, address: int) -> None:
        """Resume receiving after a message was dropped unsettled; the next one counts the bytes.

        May be called in any thread, with or without the lock.
        """
        if self._full and address in self._known:
            self._hold_new(False)  # noqa: FBT003

    def _forget_dropped(self) -> None:
        self._learn()
        for address, (_, held, _) in list(self._known.items()):
            if held() is None:
                self._forget(address)
                self._dropped += 1
        self._look_at = 2 * len(self._known) + 1_000


def _id_of(message: pulsar.Message) -> bytes:
    serialized: bytes = message.message_id().serialize()
    return serialized


MAX_REMEMBERED = 50_000
"""Ids that were read one by one, of about 300 bytes each."""

_LOOK_EVERY = 64
"""Number of messages between two removals of expired ids. One at each message would take as long
as all other work here."""

_Moment = tuple[float, int]
"""Settlement of a message: its time, and the number of messages received before it."""


class Settled(OrderedDict[bytes, _Moment]):
    """Ids of recently settled messages, in the order of their settlement, and of settled bursts.

    Not for several threads.

    Args:
        behind: maximum number of messages before a copy that waits in the client; see `Parts`.
    """

    def __init__(self, incoming: Incoming, clock: Clock, behind: int) -> None:
        super().__init__()  # a plain dict gets slow where its first entries are deleted
        self._incoming = incoming
        self.clock = clock
        self._runs = SettledRuns()
        self._behind = behind
        self._most = max(MAX_REMEMBERED, behind)
        self._taken = 0

    def add(self, key: bytes, at: float | None = None) -> None:
        """Remember a message that is settled now, or was settled *at* an earlier moment."""
        now = self.clock.monotonic() if at is None else at
        self[key] = (now, self._incoming.received if self._behind else 0)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)
        elif not len(self) % _LOOK_EVERY:
            self._expire()

    def add_burst(self, burst: Burst) -> None:
        """Remember settled messages of *burst*, as one if all were settled within a second."""
        now = self.clock.monotonic()
        if (
            burst.runs is not None
            and len(burst.settled) == burst.size
            and now - burst.since <= _OPEN_SECONDS
        ):
            self._runs.add(burst.runs, now, self._incoming.received if self._behind else 0)
            burst.settled.clear()
            self._expire()
        since = self._incoming.disconnected_since - REMEMBERED_SECONDS
        while burst.settled:
            at, message = burst.settled.popleft()
            if self._behind or at > since:
                self.add(_id_of(message), at)

    def take(self, key: bytes, message: pulsar.Message, delivered_after: float | None) -> bool:
        """Note that a message was taken; return True if it is a copy of a settled one.

        Args:
            delivered_after: see `Burst`. The broker redelivers a message that was settled long
                before this only if the subscription was moved back.
        """
        self._taken += 1
        if not self._taken % _LOOK_EVERY:
            self._expire()
        since = self.clock.monotonic() if delivered_after is None else delivered_after
        since -= REMEMBERED_SECONDS
        at, _ = self.get(key, _NEVER)
        if at <= since and not (self._runs.blocks and self._runs.contains(message, since)):
            return False
        if self._behind:  # the next copy would wait behind this one
            self.add(key)
        return True

    def _expire(self) -> None:
        since = self._incoming.disconnected_since - REMEMBERED_SECONDS
        # Without messages that wait behind others, all count as received long ago.
        received = self._incoming.received - self._behind if self._behind else 1
        self._runs.forget(since, received)
        while self:
            at, then = next(iter(self.values()))
            if at >= since or then >= received:
                return
            self.popitem(last=False)


_NEVER: _Moment = (float("-inf"), 0)


class SubscriptionsByTopic(dict[str, Subscription]):
    """Subscriptions by the name of their topic or of one of its partitions.

    Raises:
        InvalidSpecError: the consumer has no subscription of the topic.
    """

    def __init__(self, of_topics: Mapping[TopicName, Subscription]) -> None:
        super().__init__()
        self._of_topics = of_topics

    def __missing__(self, name: str) -> Subscription:
        """Find the subscription once: each message is looked up here."""
        topic = _whole(name)
        if topic not in self._of_topics:
            raise InvalidSpecError(
                "message belongs to another consumer",
                got=str(topic),
                remedy="settle it by the consumer that received it; this one consumes "
                + " and ".join(map(str, self._of_topics)),
            )
        self[name] = self._of_topics[topic]
        return self[name]


def check_message(message: object) -> None:
    """Pass if *message* is one that a consumer can have received.

    Raises:
        InvalidSpecError: it is another object.
    """
    if not hasattr(message, "topic_name") or not hasattr(message, "message_id"):
        raise InvalidSpecError(
            "only a message can be settled",
            got=message if message is None else type(message).__name__,
            remedy="give the message that the consumer has received, not its id or content; "
            "receive returns None after its time-out",
        )


def topic_of(message: pulsar.Message) -> TopicName:
    """Return the topic that *message* was consumed from, without partition."""
    # Set by the client from its subscription: no producer can forge it.
    return _whole(message.topic_name())


@functools.lru_cache
def _whole(name: str) -> TopicName:
    return TopicName.parse(name).without_partition()


Call = tuple[object, int, float, Sequence[pulsar.Message]]
"""Call of a handler: its `Run`, the worker, the start time, and the messages."""

_numbers = itertools.count()  # of all calls of handlers


class AtWork:
    """Unfinished calls of handlers, and those of their messages that are already settled.

    Attributes:
        calls: calls by number. The thread that removes a call, in one step, settles its messages.
        settled: by the same number, messages that were settled while their handler still runs:
            the time-out of the handler, or of a message, has expired.
    """

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.settled: dict[int, list[pulsar.Message]] = {}
        self._noting = threading.Lock()  # not for handlers that end: see `end`

    def begin(self, call: Call) -> int:
        """Note that a handler is called, and return the number of the call."""
        number = next(_numbers)
        self.calls[number] = call
        return number

    def end(self, number: int) -> bool:
        """Note that a handler has ended; return True if its messages are to be settled."""
        call = self.calls.pop(number, None)
        if self.settled:
            self.settled.pop(number, None)
        return call is not None

    def claim(self, number: int) -> bool:
        """Return True if the messages of an unfinished call are to be settled by the caller."""
        with self._noting:
            call = self.calls.get(number)
            if call is None:
                return False
            self.settled[number] = [*call[3]]  # before the handler can end without a claim
            if self.calls.pop(number, None) is None:
                self.settled.pop(number, None)
                return False
            return True

    def contains(self, message: pulsar.Message) -> bool:
        """Return True if a handler is at work on *message*, which is not settled."""
        return any(True for _ in self._calls_of(message))

    def note_settlement(self, message: pulsar.Message) -> None:
        """Note that the settlement of *message* begins, before it can come again."""
        if not self.calls:
            return
        with self._noting:
            for number in self._calls_of(message):
                self.settled.setdefault(number, []).append(message)
                if number not in self.calls:  # the handler has ended meanwhile
                    self.settled.pop(number, None)

    def _calls_of(self, message: pulsar.Message) -> Iterator[int]:
        for number in list(self.calls):  # a copy, made in one step
            call = self.calls.get(number)
            if call is not None and any(taken is message for taken in call[3]):
                yield number
