"""Sending to the target: producers of one range, a bounded window of in-flight messages, a rate.

A range has one producer for each partition of the target. Its name is derived from the range and
the key of the ledger. It is equal in all Replays, so while one run uses it, no other run can send
messages of the range. Other clients cannot compute it. If they use it anyway, it is replaced, see
`NameTakenError`. Sequence ids rise with each attempt.

A producer has one schema. It is opened again, with the same name, for a message with another
schema.

A receipt settles a message. Without a receipt within seconds, or after an error, the message is in
doubt until the target is searched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import NamedTuple

import pulsar

from redrive.errors import RedriveError
from redrive.messages import LATEST, SchemaError
from redrive.policy.naming import TopicName
from redrive.reading import broker, reader
from redrive.reading.positions import SendAttempt, sequence_id
from redrive.reading.ranges import Partition, Range
from redrive.reading.reader import MessagesByRange, ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import ReadMessage
from redrive.replay import lookup
from redrive.replay.ledger import Lease, mounted_key
from redrive.replay.outcome import Key, RangeOutcome
from redrive.replay.records import Permit
from redrive.replay.task import RangeTask
from redrive.replay.transport import (
    NameTakenError,
    OpenProducer,
    OutgoingDeadLetter,
    Pace,
    ProtocolTransport,
    Receipt,
    StalledError,
    Transport,
)

MAX_ATTEMPTS = 200
"""Maximum attempts within one lease."""


class TopicFullError(Exception):
    """A topic is over its backlog quota, so the broker refuses messages.

    Attributes:
        topic: the topic.
    """

    def __init__(self, topic: TopicName) -> None:
        super().__init__()
        self.topic = topic


class SentBeforeError(Exception):
    """Another process has sent messages of the same lease.

    Attributes:
        sent_in: its attempt.
    """

    def __init__(self, sent_in: SendAttempt) -> None:
        super().__init__()
        self.sent_in = sent_in


class _HeldProducer(NamedTuple):
    """A producer, and the schema version for which it was opened."""

    producer: OpenProducer
    version: int | None


class Sender:
    """Sends messages of a range, in the order of their positions.

    Args:
        transport: transport of this sender alone.
        target: target topic and its number of partitions; 0 if it is not partitioned.
        source: dead-letter topic.
        source_range: the range.
        sent_in: the attempt.
        name: function that returns the name of the producer for a partition.

    Attributes:
        last: last sequence id before this attempt, for each opened partition.
        sent_to: partitions to which messages were sent.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one range
        self,
        transport: Transport,
        target: tuple[TopicName, int],
        source: TopicName,
        source_range: Range,
        sent_in: SendAttempt,
        name: Callable[[int], str],
    ) -> None:
        self._name = name
        self._transport = transport
        self._target, self._partitions = target
        self._source = source
        self._range = source_range
        self._attempt = sent_in
        self._producers: dict[int, _HeldProducer] = {}
        self.last: dict[int, int] = {}
        self.sent_to: set[int] = set()

    def partition(self, row: DeadLetterRow) -> int:
        """Return the index of the target partition for *row*."""
        if not self._partitions:
            return broker.UNPARTITIONED
        return row.partition_in(self._target, self._partitions)

    def hold(self, index: int, version: int | None) -> int:
        """Open the producer for a partition, and return the last sequence id before this attempt.

        Until the sender is closed, no other process can send messages of the range there.

        Args:
            index: index of the partition.
            version: version of the schema in the source topic; or `LATEST` for the schema of the
                target, which it always accepts.

        Raises:
            SentBeforeError: messages of this attempt or a later one are stored; or another process
                sent messages while the producer was opened for another schema.
            NameTakenError: another client uses the name.
            SchemaError: the schema does not exist, or the target refuses it.
            TopicFullError: the target is over its backlog quota.
            RedriveError: the producer cannot be opened.
        """
        if not self.holds(index, version):
            self._open(index, version)
        return self.last[index]

    def hold_any(self, index: int, version: int | None) -> int:
        """Open the producer for a partition with any accepted schema, to exclude other processes.

        Arguments, result and errors are those of `hold`.
        """
        for candidate in dict.fromkeys((version, None)):
            with suppress(SchemaError):
                return self.hold(index, candidate)
        return self.hold(index, LATEST)

    def holds(self, index: int, version: int | None) -> bool:
        """Return True if the producer for a partition is open for this schema."""
        held = self._producers.get(index)
        return held is not None and held.version == version

    def send(
        self, key: Key, row: DeadLetterRow, partition: int, properties: dict[str, str]
    ) -> None:
        """Send a message. The receipt comes later or never.

        Args:
            key: key that the receipt contains.
            row: the message.
            partition: target partition for *row*, whose producer is open.
            properties: properties of the sent message.

        Raises:
            StalledError: no message can be sent.
        """
        self.sent_to.add(partition)
        outgoing = OutgoingDeadLetter(key, row, partition)
        self._producers[partition].producer.send(outgoing, properties, self.sequence_id(row))

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return available receipts; without any, wait for *seconds*.

        Raises:
            StalledError: no more receipts will come.
        """
        return self._transport.receive(seconds)

    def sequence_id(self, row: DeadLetterRow, sent_in: SendAttempt | None = None) -> int:
        """Return the sequence id of *row* in this attempt, or in *sent_in*."""
        offset = row.position.entry - self._range.first
        return sequence_id(sent_in or self._attempt, offset, row.position.batch_index)

    def prove(self, row: DeadLetterRow) -> None:
        """Check that the broker remembers the sequence id of a stored message.

        Raises:
            RedriveError: it does not.
            SentBeforeError: another process sent messages while the producer was opened again.
            NameTakenError: another client uses the name.
        """
        index, sent = self.partition(row), self.sequence_id(row)
        held = self._producers.pop(index)
        held.producer.close()
        producer = self._create(index, held.version)
        self._producers[index] = held._replace(producer=producer)
        last = producer.last_sequence_id
        if last < sent:
            raise RedriveError(
                f"deduplication is off on {self._target}: messages that a client repeats when it "
                "reconnects would be stored twice",
                got=f"sequence id {last} after {sent} was stored",
                remedy="enable it for this topic, or create another Replay with guarantee: "
                "AtLeastOnce",
                reason="DeduplicationOff",
            )
        if last > sent:
            self._check_name(last)
            raise SentBeforeError(SendAttempt.of(last))

    def close(self) -> None:
        """Close all producers. Messages without a receipt get one with an error."""
        while self._producers:
            self._producers.popitem()[1].producer.close()
        self._transport.close()

    def _open(self, index: int, version: int | None) -> None:
        if index in self._producers:
            self._producers.pop(index).producer.close()
        producer = self._create(index, version)
        last = producer.last_sequence_id
        last_before = self.last.get(index)
        # A process that was stopped may take the name while it is opened again.
        own = last_before is not None and (
            last == last_before or SendAttempt.of(last) == self._attempt
        )
        if not own and (last_before is not None or SendAttempt.of(last) >= self._attempt):
            producer.close()
            self._check_name(last)
            raise SentBeforeError(max(SendAttempt.of(last), self._attempt))
        self.last.setdefault(index, last)
        self._producers[index] = _HeldProducer(producer, version)

    def _check_name(self, last: int) -> None:
        """Check that a task of this policy can have used a sequence id.

        Raises:
            NameTakenError: no lease has such a generation or attempt.
        """
        generation, attempt = SendAttempt.of(last)
        latest = self._attempt.generation
        if generation > latest or (generation == latest and attempt >= MAX_ATTEMPTS - 1):
            raise NameTakenError

    def _create(self, index: int, version: int | None) -> OpenProducer:
        topic = broker.partition_of(self._target, index)
        schema = None
        if version is not None:
            schema = self._target if version == LATEST else self._source, version
        try:
            return self._transport.open(topic, self._name(index), schema)
        except broker.ReplayRoleRefusedError as error:
            if isinstance(error.__cause__, pulsar.IncompatibleSchema):
                raise _schema_refused(self._source, version, topic) from error
            if isinstance(error.__cause__, broker.OVER_QUOTA):
                raise TopicFullError(topic) from error
            raise


def _schema_refused(source: TopicName, version: int | None, target: TopicName) -> SchemaError:
    return SchemaError(
        f"{target} refuses the schema of a dead letter",
        got=f"no schema, from {source}" if version is None else f"version {version} of {source}",
        remedy="make the schemas of both topics compatible, or delete the schema of the target; "
        "refused messages stay until another Replay",
        reason="SchemaRefused",
    )


MESSAGES = 2_000
BYTES = 32 * 2**20
STALL_SECONDS = 15.0
ALONE_SECONDS = 15.0
ALONE_ATTEMPTS = 2
LEASE_CHECK_SECONDS = 0.5
"""Interval of checks of the lease. A later lease that searches holds the producers for longer. So a
task that gets its producer only after that search checks the lease before it sends."""
CONFIRM_SECONDS = 1.0
"""Interval of checks of the subscriptions of the target. Messages stored since the last check are
acknowledged only after the next one."""
_OVER_QUOTA = (
    pulsar.Result.ProducerBlockedQuotaExceededError,
    pulsar.Result.ProducerBlockedQuotaExceededException,
)


class DrainedError(Exception):
    """The run asks the task to end."""


class UnsubscribedError(Exception):
    """The target has no subscription that retains messages."""


class Window:
    """Bounded window of in-flight messages of one range. A receipt releases capacity.

    A stored message is settled once a check after its receipt shows the subscriptions of the
    target. Without a subscription no consumer receives it.

    Args:
        sender: sender of one attempt.
        outcome: outcome of the range, to which results are added.
        check_lease: function that checks the lease and returns the permit.
        checked: permit of the last check, and the time at which that began.
        acknowledge: function that is called with a message of each completely stored entry.
        first: first entry of the range, from which offsets count.
        is_subscribed: function that returns True if the target retains messages.
        is_acknowledged: function that returns True if others have acknowledged the entry at an
            offset, which is not sent then.
        pace: pace of the messages, which may follow those of other ranges.

    Attributes:
        unconfirmed: stored messages that are not settled yet.
    """

    def __init__(  # noqa: PLR0913, PLR0917  one range
        self,
        sender: Sender,
        outcome: RangeOutcome,
        check_lease: Callable[[], Permit],
        checked: tuple[Permit, float],
        acknowledge: Callable[[DeadLetterRow], None],
        first: int,
        is_subscribed: Callable[[], bool],
        is_acknowledged: Callable[[int], bool],
        pace: Pace,
    ) -> None:
        self._sender = sender
        self._outcome = outcome
        self._check_lease = check_lease
        self._acknowledge = acknowledge
        self._first = first
        self._permit, self._checked = checked
        self._pace = pace
        self._is_subscribed, self._is_acknowledged = is_subscribed, is_acknowledged
        self._confirmed = time.monotonic()
        self.unconfirmed: dict[Key, DeadLetterRow] = {}
        self._unconfirmed_bytes = 0
        self._in_flight: set[Key] = set()
        self._bytes = 0

    def send(self, key: Key, row: DeadLetterRow, properties: dict[str, str]) -> None:
        """Send a message, unless it is refused already.

        Args:
            key: key of *row*, see `key`.
            row: the message.
            properties: properties of the sent message.

        Raises:
            StalledError: no receipts came for `STALL_SECONDS`.
            DrainedError: the run asks the task to end.
            UnsubscribedError: as for `confirm`.
        """
        outcome, is_sent = self._outcome, False
        if row.size >= outcome.too_big:
            outcome.refuse(key, "TooBig")
        elif key in outcome.alone:
            is_sent = self._send_alone(key, row, properties)
        else:
            is_sent = self._send(key, row, properties)
            if len(self._in_flight) >= MESSAGES or self._bytes >= BYTES:
                self._settle(MESSAGES // 2, BYTES // 2, STALL_SECONDS)
        if is_sent and not outcome.proven:
            self.drain()
            self.confirm()
            if outcome.is_sent(key):
                self._sender.prove(row)
                outcome.proven = True

    def drain(self) -> None:
        """Wait for the receipts of all in-flight messages.

        Raises:
            StalledError: as for `send`.
        """
        self._settle(0, 0, STALL_SECONDS)

    def confirm(self) -> None:
        """Settle stored messages if the target retains them.

        Raises:
            UnsubscribedError: the target has no subscription.
        """
        if not self.unconfirmed:
            return
        if not self._is_subscribed():
            raise UnsubscribedError
        for key, row in self.unconfirmed.items():
            if self._outcome.store(key, row.batch_size):
                self._acknowledge(row)
        self.unconfirmed.clear()
        self._unconfirmed_bytes, self._confirmed = 0, time.monotonic()

    def give_up(self) -> None:
        """Close the sender, and record in-flight messages as in doubt."""
        with suppress(StalledError):
            self._process_receipts()
        self._sender.close()
        self._outcome.doubts |= self._in_flight

    def key(self, row: DeadLetterRow) -> Key:
        """Return the key of *row* within its range."""
        return row.position.entry - self._first, row.position.batch_index

    def _send_alone(self, key: Key, row: DeadLetterRow, properties: dict[str, str]) -> bool:
        """Send a message alone that the broker may refuse. Refuse it after `ALONE_ATTEMPTS`.

        Return True if it was sent.

        A broker does not report which message it refuses, and the client repeats it permanently.
        """
        outcome = self._outcome
        self.drain()
        if outcome.alone[key] >= ALONE_ATTEMPTS:
            if row.size > outcome.largest:
                outcome.too_big = min(outcome.too_big, row.size)
            outcome.refuse(key, "NotAccepted")
            return False
        outcome.alone[key] += 1
        is_sent = self._send(key, row, properties)
        self._settle(0, 0, ALONE_SECONDS)
        return is_sent

    def _send(self, key: Key, row: DeadLetterRow, properties: dict[str, str]) -> bool:
        """Send a message unless its schema is refused or others have acknowledged it.

        Return True if it was sent.
        """
        partition = self._sender.partition(row)
        if not self._sender.holds(partition, row.schema_version):
            # A closed producer gets no receipts.
            self.drain()
            try:
                self._sender.hold(partition, row.schema_version)
            except SchemaError as error:
                self._outcome.refuse(key, error.reason)
                return False
        self._wait_for_permission()
        if self._is_acknowledged(key[0]):
            return False
        # Before the send, because a failed send may have been transmitted.
        self._in_flight.add(key)
        self._bytes += row.size
        self._sender.send(key, row, partition, properties)
        return True

    def _wait_for_permission(self) -> None:
        while True:
            now = time.monotonic()
            if now - self._checked > LEASE_CHECK_SECONDS:
                self._permit, self._checked = self._check_lease(), now
                self._process_receipts()
            if now - self._confirmed > CONFIRM_SECONDS or self._unconfirmed_bytes > BYTES:
                self.confirm()
            if self._permit.drain:
                raise DrainedError
            wait = self._pace.due_in(now, self._permit.rate)
            if not wait:
                break
            time.sleep(min(wait, LEASE_CHECK_SECONDS))
        self._pace.sent(now, self._permit.rate)

    def _process_receipts(self) -> None:
        """Process available receipts. At a low rate, the window is full only after minutes."""
        for receipt in self._sender.receive(0.0):
            self._receive(receipt)

    def _settle(self, messages: int, size: int, seconds: float) -> None:
        """Process receipts until at most *messages* of *size* bytes are in-flight."""
        while len(self._in_flight) > messages or self._bytes > size:
            receipts = self._sender.receive(seconds)
            if not receipts:
                raise StalledError
            for receipt in receipts:
                self._receive(receipt)

    def _receive(self, receipt: Receipt) -> None:
        (key, row, partition), result, stored = receipt
        outcome = self._outcome
        self._in_flight.discard(key)
        self._bytes -= row.size
        if stored:
            outcome.stored_in.add(partition)
            outcome.largest = max(outcome.largest, row.size)
            self.unconfirmed[key] = row
            self._unconfirmed_bytes += row.size
        elif result == pulsar.Result.MessageTooBig:
            outcome.refuse(key, "TooBig")
        else:
            outcome.doubts.add(key)
            if result in _OVER_QUOTA:  # later messages would overtake it
                raise StalledError


POLL_SECONDS = 1.0
"""Interval of polls of acknowledgements of others, while ranges are sent."""
POLL_SHARE = 20
"""Minimum interval of polls, as a multiple of the duration of the last one."""


class TaskConnections:
    """Connections that the ranges of a task share, which are moved one after the other.

    Args:
        tasks: the ranges, in order, of one partition and one Replay.
        client: client for everything but sending.

    Attributes:
        client: the client.
        key: key of the ledger.
        lease: lease of all ranges.
        consumer: consumer that acknowledges dead letters.
        pace: pace of all messages.
        proven: True if the target has proved to deduplicate, or does not need to.
        messages: messages of several ranges that are read together; none of a range alone.
        source: state of the partition of dead letters at the last poll; None before the first.
    """

    def __init__(self, tasks: Sequence[RangeTask], client: broker.ReadingClient) -> None:
        last, self._route = tasks[-1], tasks[-1].route
        route = self._route
        self.client, self.key = client, mounted_key()
        self.lease = Lease(
            client,
            route.ledger,
            route.owner,
            self.key,
            [task.range for task in tasks],
            last.lease,
            last.number,
            last.permit,
        )
        self._partition = last.range.partition
        topic = broker.partition_of(route.source, self._partition)
        self.consumer = broker.acknowledger(client, topic, route.subscription)
        self.pace, self.proven = Pace(), not route.exactly_once
        self.source: Partition | None = None
        self._poll_due = time.monotonic() + POLL_SECONDS
        self._transport: ProtocolTransport | None = None
        self.messages = MessagesByRange(self._read_all(tasks))

    def close(self) -> None:
        """Close all connections but the client."""
        self.messages.close()
        self.lease.close()
        if self._transport is not None:
            self._transport.end()

    def transport(self) -> ProtocolTransport:
        """Return the transport of the last range if nothing is in flight there, or a new one."""
        if self._transport is None or not self._transport.is_idle:
            url, batches = self._route.service_url, self._route.batch
            self._transport = ProtocolTransport(url, batches=batches)
        return self._transport

    def read_source(self) -> Partition:
        """Return the current state of the partition of dead letters."""
        route = self._route
        return broker.waited(
            lambda: lookup.read_source(
                route.admin_url, route.source, route.subscription, self._partition
            )
        )

    def poll(self) -> None:
        """Read `source` again after `POLL_SECONDS`, or `POLL_SHARE` times as long as it takes."""
        begun = time.monotonic()
        if begun >= self._poll_due:
            self.source = self.read_source()
            now = time.monotonic()
            self._poll_due = now + max(POLL_SECONDS, POLL_SHARE * (now - begun))

    def _read_all(self, tasks: Sequence[RangeTask]) -> Generator[ReadMessage]:
        pieces = {task.range: task.to_read for task in tasks if task.to_read}
        if len(pieces) < 2:  # noqa: PLR2004  a range alone is read for each attempt
            return
        route = self._route
        topic = ReadableTopic(self.client, route.admin_url, route.source)
        after = min(task.first_of(task.to_read) for task in tasks if task.to_read)
        yield from reader.read_ranges(topic, pieces, after, min(task.ahead for task in tasks))
