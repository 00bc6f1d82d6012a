"""Sends to the target: a sender, a bounded window, a rate.

The producers of one range: what they send, and the receipts that come back.

One producer for each partition of the target. Its name is a function of the range and of the key
of the ledger: equal in each Replay, so that while one run has it no other can send messages of the
range, and unknown to others until they see a message. Its sequence ids rise with each try. A name
that others use anyway is replaced, see `NameTakenError`.

A producer has one schema. So it is opened again, under its name, where a message comes that was
written with another one.

What is on its way to the target at a time: bounded, and settled as receipts come.

A receipt settles a message; one that does not come within seconds, or says neither stored nor
refused, leaves it in doubt until it is looked for in the target.

How fast one task sends, by the clock of whoever asks. Pure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import pulsar

from redrive.errors import RedriveError
from redrive.messages import LATEST, SchemaError, SchemaRefusedError
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.positions import Try, sequence_id
from redrive.reading.ranges import Range
from redrive.reading.rows import DeadLetterRow
from redrive.replay.outcome import Key, RangeOutcome
from redrive.replay.records import Permit
from redrive.replay.transport import (
    NameTakenError,
    OpenProducer,
    OutgoingLetter,
    Outlet,
    Receipt,
    StalledError,
)

MAX_TRIES = 200
"""Tries within one lease."""


class DeduplicationOffError(RedriveError):
    """The target does not keep sequence ids: what a client sends again is stored twice."""

    reason = "DeduplicationOff"


class NotLetInError(Exception):
    """The broker takes no more messages for a topic.

    Attributes:
        topic: is over its backlog quota.
    """

    def __init__(self, topic: TopicName) -> None:
        super().__init__()
        self.topic = topic


class SentBeforeError(Exception):
    """Messages of this very lease were sent by another process.

    Attributes:
        sent_in: the try in which.
    """

    def __init__(self, sent_in: Try) -> None:
        super().__init__()
        self.sent_in = sent_in


class _HeldProducer(NamedTuple):
    """A producer, and the schema version that it was opened for."""

    producer: OpenProducer
    version: int | None


class Sender:
    """Sends messages of a range, in the order of their positions.

    Args:
        outlet: has no other use.
        target: where to; *partitions* of it, 0 if it has none.
        source: the dead-letter topic, and *of* it the range.
        sent_in: the try.
        name: returns the name of the producer for a partition, by its index.

    Attributes:
        last: of each partition that was opened, the last sequence id before this try.
        sent_to: the partitions to which any message was sent.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one range
        self,
        outlet: Outlet,
        target: tuple[TopicName, int],
        source: TopicName,
        of: Range,
        sent_in: Try,
        name: Callable[[int], str],
    ) -> None:
        self._name = name
        self._outlet = outlet
        self._target, self._partitions = target
        self._source = source
        self._range = of
        self._try = sent_in
        self._producers: dict[int, _HeldProducer] = {}
        self.last: dict[int, int] = {}
        self.sent_to: set[int] = set()

    def partition(self, letter: DeadLetterRow) -> int:
        """Return the index of the target's partition for *letter*."""
        if not self._partitions:
            return broker.UNPARTITIONED
        return letter.partition_in(self._target, self._partitions)

    def hold(self, index: int, version: int | None) -> int:
        """Open the producer for a partition, and return the last sequence id before this try.

        Until the sender is closed, no other process sends messages of the range there.

        Args:
            index: of the partition.
            version: of the source's schema, for messages that were written with it; or `LATEST`,
                of the target's own schema, which it takes in any case.

        Raises:
            SentBeforeError: there were messages of this try, or a later one; or another process
                has sent some while the producer was opened for another schema.
            NameTakenError: others have the name.
            SchemaError: there is no such schema, or the target does not take it.
            NotLetInError: its backlog is larger than it may be.
            RedriveError: it can't be opened.
        """
        if not self.holds(index, version):
            self._open(index, version)
        return self.last[index]

    def holds(self, index: int, version: int | None) -> bool:
        """Whether the producer for a partition is open for this schema."""
        held = self._producers.get(index)
        return held is not None and held.version == version

    def send(
        self, key: Key, letter: DeadLetterRow, partition: int, properties: dict[str, str]
    ) -> None:
        """Send a message; its receipt comes later, or never.

        Args:
            key: comes with the receipt.
            letter: what to send.
            partition: of the target, the one for *letter*; its producer has to be held.
            properties: what it carries.

        Raises:
            StalledError: nothing can be sent any more.
        """
        self.sent_to.add(partition)
        outgoing = OutgoingLetter(key, letter, partition)
        self._producers[partition].producer.send(outgoing, properties, self.sequence_id(letter))

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return the receipts that are there; if there are none, wait for some so long.

        Raises:
            StalledError: none will come any more.
        """
        return self._outlet.receive(seconds)

    def sequence_id(self, letter: DeadLetterRow, sent_in: Try | None = None) -> int:
        """Return the id with which this try sends *letter*, or the one given would have."""
        offset = letter.position.entry - self._range.first
        return sequence_id(sent_in or self._try, offset, letter.position.batch_index)

    def prove(self, letter: DeadLetterRow) -> None:
        """Check that the broker remembers *letter*, which it has stored.

        Raises:
            DeduplicationOffError: it does not.
            SentBeforeError: another process has sent some while the producer was opened again.
            NameTakenError: others have the name.
        """
        index, sent = self.partition(letter), self.sequence_id(letter)
        held = self._producers.pop(index)
        held.producer.close()
        producer = self._create(index, held.version)
        self._producers[index] = held._replace(producer=producer)
        last = producer.last_sequence_id
        if last < sent:
            raise DeduplicationOffError(
                f"deduplication is off on {self._target}: what a client sends again when it "
                "reconnects would be stored twice",
                got=f"sequence id {last} after {sent} was stored",
                remedy="switch it on for this topic, or make another Replay with guarantee: "
                "AtLeastOnce",
            )
        if last > sent:
            self._check_name(last)
            raise SentBeforeError(Try.of(last))

    def close(self) -> None:
        """Stop all sending: messages without a receipt get one that says so."""
        while self._producers:
            self._producers.popitem()[1].producer.close()
        self._outlet.close()

    def _open(self, index: int, version: int | None) -> None:
        if index in self._producers:
            self._producers.pop(index).producer.close()
        producer = self._create(index, version)
        last = producer.last_sequence_id
        known = self.last.get(index)
        # While it is opened again the name is free, for a process that was stopped and wakes.
        own = known is not None and (last == known or Try.of(last) == self._try)
        if not own and (known is not None or Try.of(last) >= self._try):
            producer.close()
            self._check_name(last)
            raise SentBeforeError(max(Try.of(last), self._try))
        self.last.setdefault(index, last)
        self._producers[index] = _HeldProducer(producer, version)

    def _check_name(self, last: int) -> None:
        """Check that a process of this policy may have sent with a sequence id.

        Raises:
            NameTakenError: none has a lease with such a generation, or tries so often.
        """
        generation, attempt = Try.of(last)
        latest = self._try.generation
        if generation > latest or (generation == latest and attempt >= MAX_TRIES - 1):
            raise NameTakenError

    def _create(self, index: int, version: int | None) -> OpenProducer:
        topic = broker.partition_of(self._target, index)
        schema = None
        if version is not None:
            schema = self._target if version == LATEST else self._source, version
        try:
            return self._outlet.open(topic, self._name(index), schema)
        except broker.ReplayRoleRefusedError as error:
            if isinstance(error.__cause__, pulsar.IncompatibleSchema):
                raise _schema_refused(self._source, version, topic) from error
            if isinstance(error.__cause__, broker.OVER_QUOTA):
                raise NotLetInError(topic) from error
            raise


def _schema_refused(
    source: TopicName, version: int | None, target: TopicName
) -> SchemaRefusedError:
    return SchemaRefusedError(
        f"{target} does not take the schema that a dead letter was written with",
        got=f"no schema, from {source}" if version is None else f"version {version} of {source}",
        remedy="have that topic take it, or delete its schema; what was refused stays till then",
    )


MESSAGES = 2_000
BYTES = 32 * 2**20
STALL_SECONDS = 15.0
ALONE_SECONDS = 15.0
ALONE_TRIES = 2
LEASE_SECONDS = 0.5
CONFIRM_SECONDS = 1.0
"""The time between two looks at the subscriptions of the target, while messages are sent: so much
may be stored while there is none, and is acknowledged in no case."""
_OVER_QUOTA = (
    pulsar.Result.ProducerBlockedQuotaExceededError,
    pulsar.Result.ProducerBlockedQuotaExceededException,
)


class DrainedError(Exception):
    """The run wants no more to be sent."""


class UnsubscribedError(Exception):
    """The target has no subscription that keeps what is stored there."""


class Window:
    """Sends messages of one range.

    A message that is stored is settled once the target was seen, after its receipt, to have the
    subscriptions that keep it: else it is in no subscription's backlog, and no consumer gets it.

    Args:
        sender: of one try.
        outcome: takes in what becomes of each.
        check_lease: passes while sending is allowed, and returns how.
        acknowledge: called with a message of each entry once all of it is stored.
        first: the first entry of the range, which offsets count from.
        is_subscribed: tells whether the target keeps messages.
        is_acknowledged: tells of an entry, by its offset, whether others have acknowledged it: it
            is not sent.

    Attributes:
        unconfirmed: what is stored, and not settled yet.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one range
        self,
        sender: Sender,
        outcome: RangeOutcome,
        check_lease: Callable[[], Permit],
        acknowledge: Callable[[DeadLetterRow], None],
        first: int,
        is_subscribed: Callable[[], bool],
        is_acknowledged: Callable[[int], bool],
    ) -> None:
        self._sender = sender
        self._outcome = outcome
        self._check_lease = check_lease
        self._acknowledge = acknowledge
        self._first = first
        self._checked = -math.inf
        self._permit = Permit()
        self._pace = Pace()
        self._is_subscribed, self._is_acknowledged = is_subscribed, is_acknowledged
        self._confirmed = time.monotonic()
        self.unconfirmed: dict[Key, DeadLetterRow] = {}
        self._unconfirmed_bytes = 0
        self._on_the_way: set[Key] = set()
        self._bytes = 0

    def send(self, key: Key, letter: DeadLetterRow, properties: dict[str, str]) -> None:
        """Send a message, unless it is refused already.

        Args:
            key: how *letter* is called, see `key`.
            letter: what to send.
            properties: what it carries.

        Raises:
            StalledError: the broker has not answered for seconds.
            DrainedError: nothing more is to be sent.
            UnsubscribedError: as for `confirm`.
        """
        outcome = self._outcome
        if letter.size >= outcome.too_big:
            outcome.refuse(key, "TooBig")
        elif key in outcome.alone:
            self._send_alone(key, letter, properties)
        else:
            self._send(key, letter, properties)
            if len(self._on_the_way) >= MESSAGES or self._bytes >= BYTES:
                self._settle(MESSAGES // 2, BYTES // 2, STALL_SECONDS)
        if not outcome.proven:
            self.drain()
            self.confirm()
            if outcome.is_sent(key):
                self._sender.prove(letter)
                outcome.proven = True

    def drain(self) -> None:
        """Wait for all that is on its way.

        Raises:
            StalledError: as for `send`.
        """
        self._settle(0, 0, STALL_SECONDS)

    def confirm(self) -> None:
        """Settle what is stored, once the target is seen to keep it.

        Raises:
            UnsubscribedError: it does not.
        """
        if not self.unconfirmed:
            return
        if not self._is_subscribed():
            raise UnsubscribedError
        for key, letter in self.unconfirmed.items():
            if self._outcome.store(key, letter.batch_size):
                self._acknowledge(letter)
        self.unconfirmed.clear()
        self._unconfirmed_bytes, self._confirmed = 0, time.monotonic()

    def give_up(self) -> None:
        """Leave all that is on its way in doubt, once nothing more is sent."""
        with suppress(StalledError):
            self._take_in()
        self._sender.close()
        self._outcome.doubts |= self._on_the_way

    def key(self, letter: DeadLetterRow) -> Key:
        """Return how *letter* is called within its range."""
        return letter.position.entry - self._first, letter.position.batch_index

    def _send_alone(self, key: Key, letter: DeadLetterRow, properties: dict[str, str]) -> None:
        """Send what may be the message that the broker refuses; one refused twice is refused.

        A broker does not say which message it refuses, and the client sends it again for ever.
        """
        outcome = self._outcome
        self.drain()
        if outcome.alone[key] >= ALONE_TRIES:
            if letter.size > outcome.largest:
                outcome.too_big = min(outcome.too_big, letter.size)
            outcome.refuse(key, "NotAccepted")
            return
        outcome.alone[key] += 1
        self._send(key, letter, properties)
        self._settle(0, 0, ALONE_SECONDS)

    def _send(self, key: Key, letter: DeadLetterRow, properties: dict[str, str]) -> None:
        partition = self._sender.partition(letter)
        if not self._sender.holds(partition, letter.schema_version):
            # Of a producer that is closed no receipts come.
            self.drain()
            try:
                self._sender.hold(partition, letter.schema_version)
            except SchemaError as error:
                self._outcome.refuse(key, error.reason)
                return
        self._wait_for_permission()
        if self._is_acknowledged(key[0]):
            return
        # Before: what can't be sent may have left in part, or whole.
        self._on_the_way.add(key)
        self._bytes += letter.size
        self._sender.send(key, letter, partition, properties)

    def _wait_for_permission(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._checked > LEASE_SECONDS:
                self._permit, self._checked = self._check_lease(), now
                self._take_in()
            if now - self._confirmed > CONFIRM_SECONDS or self._unconfirmed_bytes > BYTES:
                self.confirm()
            if self._permit.drain:
                raise DrainedError
            wait = self._pace.due_in(now, self._permit.rate)
            if not wait:
                break
            time.sleep(min(wait, LEASE_SECONDS))
        self._pace.sent(now, self._permit.rate)

    def _take_in(self) -> None:
        """Take in what receipts there are: at a low rate the window is full only after minutes."""
        for receipt in self._sender.receive(0.0):
            self._receive(receipt)

    def _settle(self, messages: int, size: int, seconds: float) -> None:
        """Take in receipts until so many messages, of so many bytes, are on their way at most."""
        while len(self._on_the_way) > messages or self._bytes > size:
            receipts = self._sender.receive(seconds)
            if not receipts:
                raise StalledError
            for receipt in receipts:
                self._receive(receipt)

    def _receive(self, receipt: Receipt) -> None:
        (key, letter, partition), result, stored = receipt
        outcome = self._outcome
        self._on_the_way.discard(key)
        self._bytes -= letter.size
        if stored:
            outcome.stored_in.add(partition)
            outcome.largest = max(outcome.largest, letter.size)
            self.unconfirmed[key] = letter
            self._unconfirmed_bytes += letter.size
        elif result == pulsar.Result.MessageTooBig:
            outcome.refuse(key, "TooBig")
        else:
            outcome.doubts.add(key)
            if result in _OVER_QUOTA:  # what follows would overtake it
                raise StalledError


CATCH_UP_SECONDS = 1.0
"""So much of a delay is made up for: what the broker took longer for, or the sleep itself."""


class Pace:
    """Spreads messages over time.

    From the first one on no more are sent than the rate gives.
    """

    def __init__(self) -> None:
        self._due: float | None = None

    def due_in(self, now: float, rate: float | None) -> float:
        """Return in how many seconds the next message may be sent; 0 for now.

        Args:
            now: in seconds, of a clock that never goes back.
            rate: messages a second; None for no limit.
        """
        if rate is None or self._due is None:
            return 0.0
        # A rate that has risen ends a wait that was reckoned by the old one.
        return max(0.0, min(self._due - now, 1 / rate))

    def sent(self, now: float, rate: float | None) -> None:
        """Take note that a message is sent."""
        if rate is not None:
            begin = now if self._due is None else max(self._due, now - CATCH_UP_SECONDS)
            self._due = begin + 1 / rate
