"""Arrivals: messages as the client hands them over.

They come in bursts, in one call with all ids in a few numbers. To read the id of a message takes as
long as all else that is done for it. The ids of a burst ascend, so that those of two messages of
one batch show all between them. A burst above all that came before contains no redelivered message.

Early retries: delayed delivery can be off for a broker, a namespace or a topic, and a tick of the
broker may deliver a retry earlier than its delay. `fetcher` keeps such a message, unacknowledged,
until its delay has passed since it was sent.

Late retries: the broker delivers a retry when its own clock reaches the time of sending plus the
delay. A consumer that waits for messages gets it at that moment. So if the clock of its host is
ahead of the broker's, each retry looks late by the difference, whichever host has sent it. A broker
that delivers late, for example at a dispatch rate, is recognized by a lateness that changes.

`ConnectionWatch` reports a topic from which nothing arrives, because its connection is lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import pulsar

from redrive import messages
from redrive.delivery.concurrency import log_of
from redrive.delivery.parts import Clock
from redrive.policy.envelope import delay_of

BURST = 256
"""Messages in a burst at most: each costs a hand-over between two threads of the client."""

BURST_BYTES = 256 * 1024
"""Bytes of payload in a burst of several messages at most."""

_BLOCK = 1_024

LARGEST_BATCH = 1_000
"""Default maximum number of messages of an entry. An entry is delivered whole, even if fewer may
wait."""

REMEMBERED_SECONDS = 3.0
"""Time for which the broker may lack an acknowledgement: the client keeps it for up to 0.1 s, and
a broker that is killed forgets the last second. No longer, for an admin may have moved the
subscription back, and wants these messages once more. Time without a connection does not count:
the client drops acknowledgements then."""

REDELIVERED_SECONDS = 10.0
"""Time after a connection within which a broker, however busy, delivers again."""

_MARKS_A_QUEUE = 8
_MAX_LEDGERS = 1_000

MAX_KEPT = 1_000
MAX_KEPT_BYTES = 32 * 1024 * 1024
"""With more, nothing is received from the retry topic; the source topic is not affected."""

_REPORTED_SECONDS = 2.0
"""No tick of a broker is longer, so delayed delivery is off, or a clock is behind."""

AHEAD_SECONDS = 10.0
"""A smaller difference is not reported: the tick of a broker and a busy host look like one."""
RETRIES_MEASURED = 5
"""So many retries in a row have to be late: a broker that was away delays only a few."""
APART_SECONDS = 10.0
"""Minimum time between two of them: a queue at the broker changes meanwhile, a clock does not."""
ALIKE_SECONDS = 3.0
"""Maximum difference between them: of the tick of a broker, and of a busy host."""
_AGAIN_SECONDS = 3_600.0

_log = log_of(__name__)

Place = tuple[int, int, int]
"""The id of a message: ledger, entry, and the index in a batch or -1."""

_NONE: Place = (-1, -1, -1)

Run = tuple[tuple[int, int], int]
"""Settled messages of an entry, or of a block of entries without batches, as bits of a number."""


class Burst:
    """Messages of one topic that came in one call.

    Attributes:
        topic: name of the topic, without partition.
        alone: True for the burst that stands for messages received one by one, each with an id
            above all earlier ones: none of them is a copy.
        runs: ids of all messages; None if one may be a copy, or once the burst is closed.
        delivered_after: earliest time at which the connection that delivered possible copies may
            have begun, or the loss of the connection before it if that is recent. None means now:
            without partitions no message waits for longer than its connection.
        open: True while the ids of its in-flight messages are not read one by one.
        settled: settled messages, each with the time of its settlement, while the burst is open.
        since: time at which it was opened.
    """

    __slots__ = (
        "alone", "delivered_after", "open", "runs", "settled", "since", "size", "topic",
    )  # fmt: skip

    def __init__(
        self, topic: str, size: int, runs: list[Run] | None, delivered_after: float | None = None
    ) -> None:
        self.topic = topic
        self.size = size
        self.runs = runs
        self.delivered_after = delivered_after
        self.alone = False
        self.open = False
        self.settled: deque[tuple[float, pulsar.Message]] = deque()
        self.since = 0.0


class Arrivals:
    """Messages of one topic as they arrive: finds those whose id is above all before.

    The others may be copies. Those of a topic with partitions have waited in the queue of the
    client, which outlives the connections of the partitions: so it is bounded when the connection
    that delivered them began. A subscription that was moved back delivers messages again that were
    settled long before.

    Args:
        queue: messages of one partition that may wait in the client; 0 without partitions.
        in_bursts: receive messages in bursts while they come fast.
        early: keeps messages that arrive before their time; None if the topic has no delays.

    Attributes:
        received: number of messages.
    """

    def __init__(
        self,
        topic: str,
        queue: int = 0,
        *,
        in_bursts: bool = False,
        early: EarlyRetries | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topic = topic
        self.queue = queue
        self.in_bursts = in_bursts
        self.early = early
        self.received = 0
        self._monotonic = monotonic
        self._alone = Burst(topic, 1, None)
        self._alone.alone = True
        self._noting = threading.Lock()  # several workers may receive at a time
        self._partitions: dict[int, _Partition] = {}
        self._by_ledger: dict[int, _Partition] = {}
        self._empty_at = monotonic()
        self._is_lost = False
        self._lost_since = self._lost_until = float("-inf")

    @property
    def disconnected_since(self) -> float:
        """Return the moment at which the topic lost its connection; now if it has one.

        For some seconds after that it is the same moment: what is delivered then may be a copy.
        """
        return self._connected_before(self._monotonic())

    @property
    def highest(self) -> Place:
        """Return the highest id of a topic without partitions."""
        partition = self._partitions.get(-1)
        return _NONE if partition is None else partition.highest

    def note_connection(self, *, connected: bool) -> None:
        """Note whether the topic has a connection; called about each second."""
        if connected != self._is_lost:
            return
        if self._is_lost:
            self._lost_until = self._monotonic()
        else:
            self._lost_since = self._connected_before(self._monotonic())
        self._is_lost = not connected

    def _connected_before(self, moment: float) -> float:
        is_recent = self._is_lost or moment <= self._lost_until + REDELIVERED_SECONDS
        return min(moment, self._lost_since) if is_recent else moment

    def _delivered_after(self, moment: float) -> float | None:
        """Return the value for a `Burst` of a connection that is not older than *moment*."""
        connected = self._connected_before(moment)
        return connected if self.queue or connected < moment else None

    def one(self, message: pulsar.Message) -> None:
        """Note a message that was received alone."""
        message_id = message.message_id()
        place = place_of(message_id)
        partition = self._by_ledger.get(place[0]) or self._partition(place[0], message_id)
        if self._is_new(partition, place, place, 1):
            message.redrive = self._alone
            return
        moment = partition.delivered_after if self.queue else self._monotonic()
        delivered_after = self._delivered_after(moment)
        if delivered_after is not None:
            message.redrive = Burst(self._topic, 1, None, delivered_after)

    def burst(self, messages: Sequence[pulsar.Message]) -> None:
        """Join *messages*, which arrived together, to a burst: each gets it as `redrive`."""
        runs: dict[tuple[int, int], int] = {}
        are_new, delivered_after = len(messages) > 1, self._monotonic()
        for first, last, message_id in stretches(messages):
            count = last[1] - first[1] + last[2] - first[2] + 1
            partition = self._by_ledger.get(first[0]) or self._partition(first[0], message_id)
            if self._is_new(partition, first, last, count):
                key, bit = _bit_of(first)
                runs[key] = runs.get(key, 0) | ((1 << count) - 1) << bit
            else:
                are_new = False
                if self.queue:
                    delivered_after = min(delivered_after, partition.delivered_after)
        burst = Burst(
            self._topic, len(messages), list(runs.items()) if are_new else None,
            self._delivered_after(delivered_after),
        )  # fmt: skip
        for message in messages:
            message.redrive = burst

    def was_empty(self, at: float) -> None:
        """Note that no message waited in the client *at* a moment."""
        self._empty_at = at

    def _is_new(self, partition: _Partition, first: Place, last: Place, count: int) -> bool:
        with self._noting:
            if self.queue and first <= partition.last:
                waited = self.queue + (LARGEST_BATCH if partition.batched else 0)
                partition.delivered_after = max(self._empty_at, partition.moment_before(waited))
            self.received += count
            partition.received += count
            if self.queue and partition.received >= partition.next_mark:
                partition.mark(self._monotonic(), self.queue)
            partition.batched = partition.batched or last[2] >= 0
            partition.last = last
            is_new = first > partition.highest
            partition.highest = max(partition.highest, last)
            return is_new

    def _partition(self, ledger: int, message_id: pulsar.MessageId) -> _Partition:
        """Return the partition of a *ledger*, whose number no other topic has."""
        if len(self._by_ledger) > _MAX_LEDGERS:
            self._by_ledger.clear()
        partition = self._partitions.setdefault(message_id.partition(), _Partition())
        self._by_ledger[ledger] = partition
        return partition


class _Partition:
    """The messages that have arrived from one partition, or from a topic without partitions.

    Attributes:
        highest: the highest id, and *last* that of the last message.
        delivered_after: see `Burst`, as of the last id that was not above the one before it: a new
            connection begins with the first message that is not acknowledged.
        batched: True once a message of a batch has come.
    """

    __slots__ = (
        "_marks", "batched", "delivered_after", "highest", "last", "next_mark", "received",
    )  # fmt: skip

    def __init__(self) -> None:
        self.highest = self.last = _NONE
        self.received = 0
        self.next_mark = 0
        self.delivered_after = 0.0
        self.batched = False
        self._marks: deque[tuple[int, float]] = deque()

    def mark(self, now: float, queue: int) -> None:
        """Note when so many messages had been received."""
        self._marks.append((self.received, now))
        self.next_mark = self.received + queue // _MARKS_A_QUEUE + 1
        while len(self._marks) > 1 and self._marks[1][0] <= self.received - queue - LARGEST_BATCH:
            self._marks.popleft()

    def moment_before(self, messages: int) -> float:
        """Return a moment at which the last *messages* were not yet received; 0 if unknown."""
        moments = [at for received, at in self._marks if received <= self.received - messages]
        return max(moments, default=0.0)


def place_of(message_id: pulsar.MessageId) -> Place:
    """Return the parts of *message_id* that order the messages of a topic."""
    return message_id.ledger_id(), message_id.entry_id(), message_id.batch_index()


def stretches(
    messages: Sequence[pulsar.Message],
) -> Iterator[tuple[Place, Place, pulsar.MessageId]]:
    """Yield the first and last id of each stretch without gaps, and an id of it.

    A stretch is of one batch, or of entries without batches in one block. In a batch, ids that
    differ by as much as their positions have no gap between them, so not all are read. Between two
    entries without batches there can be a batch, so all of these are.
    """
    places: dict[int, Place] = {}

    def place(position: int) -> Place:
        if position not in places:
            places[position] = place_of(messages[position].message_id())
        return places[position]

    start = 0
    while start < len(messages):
        message_id = messages[start].message_id()
        ledger, entry, index = first = places.get(start) or place_of(message_id)
        if index < 0:
            end = start
            while (
                end + 1 < len(messages)
                and (entry + 1) % _BLOCK
                and place(end + 1) == (ledger, entry + 1, -1)
            ):
                end, entry = end + 1, entry + 1
            yield first, (ledger, entry, -1), message_id
            start = end + 1
            continue
        end, beyond = start, len(messages)
        probe = beyond - 1
        while beyond - end > 1:
            if place(probe) == (ledger, entry, index + probe - start):
                end = probe
            else:
                beyond = probe
            probe = (end + beyond) // 2
        yield first, (ledger, entry, index + end - start), message_id
        start = end + 1


def _bit_of(place: Place) -> tuple[tuple[int, int], int]:
    ledger, entry, index = place
    return (
        ((ledger, entry), index) if index >= 0 else ((ledger, ~(entry // _BLOCK)), entry % _BLOCK)
    )


_SLICE_SECONDS = 0.5
_MAX_BLOCKS = 50_000
"""Blocks take about 400 bytes each."""


class SettledRuns:
    """The ids of bursts that were settled as a whole. Not for several threads.

    Attributes:
        blocks: how many batches, and blocks of entries without batches, are remembered.
    """

    def __init__(self) -> None:
        # With the number of messages that had been received at the last change.
        self._slices: deque[tuple[float, list[int], dict[tuple[int, int], int]]] = deque()
        self.blocks = 0

    def add(self, runs: Sequence[Run], now: float, received: int = 0) -> None:
        """Remember *runs*, which are settled *now*."""
        if not self._slices or now - self._slices[-1][0] >= _SLICE_SECONDS:
            self._slices.append((now, [received], {}))
        _, last, settled = self._slices[-1]
        last[0] = received
        before = len(settled)
        for key, bits in runs:
            settled[key] = settled.get(key, 0) | bits
        self.blocks += len(settled) - before
        while self.blocks > _MAX_BLOCKS and len(self._slices) > 1:
            self._drop()

    def contains(self, message: pulsar.Message, since: float) -> bool:
        """Return True if *message* was settled after *since*."""
        key, bit = _bit_of(place_of(message.message_id()))
        return any(settled.get(key, 0) >> bit & 1 for at, _, settled in self._slices if at >= since)

    def forget(self, since: float, received: int) -> None:
        """Forget bursts settled before *since*, with fewer messages *received* than that."""
        while self._slices and self._slices[0][0] < since and self._slices[0][1][0] < received:
            self._drop()

    def _drop(self) -> None:
        self.blocks -= len(self._slices.popleft()[2])


class EarlyRetries:
    """The messages of one retry topic that wait in this consumer. May be used by several threads.

    The time is that of the process that sent the retry. A clock that is behind it extends a delay,
    to twice its length at most.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By id: a copy that the broker delivers after a lost connection takes the place of the
        # original, whose acknowledgement might not count.
        self._kept: dict[bytes, tuple[pulsar.Message, int]] = {}  # with their sizes
        self._bytes = 0
        self._room = threading.Event()
        self._room.set()
        self._changing = threading.Lock()
        self._is_reported = False
        self._late: deque[float] = deque(maxlen=RETRIES_MEASURED)
        self._measured_at = float("-inf")
        self._ahead_reported_at = float("-inf")

    def __len__(self) -> int:
        """Return how many messages are kept."""
        return len(self._kept)

    def seconds_left(self, message: pulsar.Message) -> float:
        """Return how long it is until the delay of *message* has passed; 0 if it has."""
        delay = delay_of(messages.read_properties(message) or {})
        if delay is None:
            return 0.0
        return max(0.0, min(delay.total_seconds(), -self._lateness(message, delay)))

    def clock_ahead(self, message: pulsar.Message) -> float | None:
        """Return the seconds by which this clock is ahead of the broker's, at most once an hour.

        Args:
            message: came while the consumer waited for messages.
        """
        delay = delay_of(messages.read_properties(message) or {})
        if delay is None:
            return None
        late, now = self._lateness(message, delay), self._clock.monotonic()
        if late < AHEAD_SECONDS:
            self._late.clear()
            return None
        if now < self._measured_at + APART_SECONDS:
            return None
        self._measured_at = now
        self._late.append(late)
        ahead = min(self._late)
        are_alike = max(self._late) - ahead <= ALIKE_SECONDS
        is_due = now >= self._ahead_reported_at + _AGAIN_SECONDS
        if len(self._late) < RETRIES_MEASURED or not are_alike or not is_due:
            return None
        self._ahead_reported_at = now
        return ahead

    def _lateness(self, message: pulsar.Message, delay: timedelta) -> float:
        """Return the seconds since the *delay* of a message is over, negative before that."""
        sent_ago: float = self._clock.now().timestamp() - message.publish_timestamp() / 1_000
        return sent_ago - delay.total_seconds()

    def keep(self, message: pulsar.Message, seconds: float) -> bool:
        """Keep *message*; False if it is a copy of one that is kept."""
        if seconds > _REPORTED_SECONDS and not self._is_reported:
            self._is_reported = True
            _log.warning(
                "the broker delivers retries before their time: %s came %.1f s early from %s; up "
                "to %d are kept in this consumer until then; enable delayed delivery there, and "
                "synchronize the clocks of all hosts",
                messages.id_text(message.message_id()), seconds, message.topic_name(), MAX_KEPT,
            )  # fmt: skip
        key = message.message_id().serialize()
        with self._changing:
            kept = self._kept.get(key)
            size = messages.size(message) if kept is None else kept[1]
            self._kept[key] = message, size
            if kept is None:
                self._bytes += size
                self._note_room()
        return kept is None

    def release(self, message: pulsar.Message) -> pulsar.Message:
        """Return the message that is kept in place of *message*: the last copy, else itself."""
        with self._changing:
            kept = self._kept.pop(message.message_id().serialize(), None)
            if kept is None:
                return message
            copy, size = kept
            self._bytes -= size
            self._note_room()
        return copy

    @property
    def has_room(self) -> bool:
        """Return True if more messages may be received."""
        return self._room.is_set()

    def wait_for_room(self, seconds: float) -> bool:
        """Return True once more messages may be received; False after so many *seconds*."""
        return self._room.wait(seconds)

    def _note_room(self) -> None:
        if len(self._kept) < MAX_KEPT and self._bytes < MAX_KEPT_BYTES:
            self._room.set()
        else:
            self._room.clear()


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
