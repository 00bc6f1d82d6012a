"""Sequences of dead letters by key, and the compacted topic that records them.

For policies with `deadLetter.sequenced`, messages of a key with a dead letter follow it unhandled.

    record the dead letter ─▶ send it ─▶ acknowledge the message

Every consumer reads the records before it handles a message with a key. After a crash between the
record and the send, the message is sent again, unhandled. A crash after the send duplicates the
dead letter.

Any role that consumes the topics of the policy may write to the topic of the records. An invalid
record is ignored. The client drops an entry that it cannot decode, and its reader never reaches the
end of a topic that ends with one. So the consumer writes a marker behind it. A malformed entry ends
the client's process. A consumer whose crash log has credentials reads the records without the
client.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pulsar

from redrive.delivery.concurrency import (
    OPEN_SECONDS,
    Deadline,
    SendWatchdog,
    Timer,
    all_within,
    identity,
    log_of,
    within,
)
from redrive.delivery.decisions import Attempts
from redrive.delivery.middleware.chain import (
    Forward,
    Hop,
    Middleware,
    Receive,
    Settle,
    Settlement,
    receive_accepted,
)
from redrive.delivery.parts import Parts, SequenceLog
from redrive.delivery.sender import (
    CHECK_POLICY,
    IDLE_SECONDS,
    PartitionSender,
    open_producer,
    remedy_of,
)
from redrive.messages import NotSentError, id_text, partition_key, read_properties, sequence_key
from redrive.policy import envelope
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.sequences import MAX_ENTRIES, Entry, Sequences, record_name
from redrive.policy.verdict import Discard, Done

if TYPE_CHECKING:
    from redrive.reading.entries import EntryReader

AGAIN_AFTER_SECONDS = 5.0
"""Delay of a message while the records of its key cannot be read."""
LOOK_SECONDS = 0.5
"""Interval at which a replayed dead letter is checked while it waits for those before it."""
STILL_SECONDS = 30.0
"""Time without progress after which replayed dead letters of a key no longer wait."""
_MAX_WAITING = 10_000
"""Highest number of waits that are remembered. Fewer messages wait, see `scheduling.MAX_HELD`."""

_log = log_of(__name__)


class Sequencing(Middleware):
    """Delivers no message that follows a dead letter of its key. May be used by several threads.

    Args:
        records: records of the dead letters of all consumers of the policy.
        follow: dead-letters a message that was not handled.
    """

    def __init__(
        self,
        parts: Parts,
        records: SequenceLog,
        attempts: Attempts,
        policy: Callable[[], Policy],
        follow: Callable[[pulsar.Message], None],
    ) -> None:
        self._incoming = parts.incoming
        self._clock = parts.clock
        self._records = records
        self._attempts = attempts
        self._policy = policy
        self._follow = follow
        # Waits by key and number of replays: the first dead letter of the key, since when it is the
        # first, and the last poll. All messages with this key and number share a wait.
        self._waiting: dict[tuple[str, int], tuple[Entry | None, float, float]] = {}
        self._changing = threading.Lock()
        # By id of handled messages whose record could not be removed.
        self._ended: dict[str, Settlement] = {}
        self._settle: Settle

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that follows no dead letter; dead-letter the others."""

        def receive_in_sequence(timeout: float | None) -> pulsar.Message | None:
            return receive_accepted(receive, self._may_be_handled, self._clock.monotonic, timeout)

        return receive_in_sequence

    def settle(self, settle: Settle) -> Settle:
        """Remove a replayed dead letter from its sequence when it is handled."""

        def settle_in_sequence(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, _ = settlement
            if isinstance(verdict, (Done, Discard)) and not self._is_off_record(message):
                # Not acknowledged, or the key would stay dead; and not handled again.
                self._ended[id_text(message.message_id())] = settlement
                self._incoming.again(message, AGAIN_AFTER_SECONDS)
                return None
            return settle(settlement)

        self._settle = settle_in_sequence
        return settle_in_sequence

    def forward(self, forward: Forward) -> Forward:
        """Record a dead letter before it is sent."""

        def forward_in_sequence(hop: Hop) -> pulsar.MessageId | None:
            key = sequence_key(hop.message)
            if key and hop.topic == self._policy().dead_letter_topic:
                self._record(key, hop.message)
            return forward(hop)

        return forward_in_sequence

    def _is_off_record(self, message: pulsar.Message) -> bool:
        key = sequence_key(message)
        first_id = self._attempts.of(message).first_id if key else ""
        if self._records.sequences.find(key, first_id) is None:
            return True
        try:
            self._records.write(record_name(key, first_id), b"")
        except NotSentError as error:
            _log.warning("a handled message is acknowledged later: %s", error)
            return False
        return True

    def _may_be_handled(self, message: pulsar.Message) -> bool:
        ended = self._ended.pop(id_text(message.message_id()), None)
        if ended is not None:
            self._settle(ended)
            return False
        key = sequence_key(message)
        if not key:
            return True
        try:
            # Includes all records of before the broker delivered the message.
            self._records.read()
        except NotSentError as error:
            _log.warning("a message waits until the records of its key can be read: %s", error)
            self._incoming.again(message, AGAIN_AFTER_SECONDS)
            return False
        first_id, replays = self._attempts.of(message).first_id, _replays(message)
        if self._records.sequences.may_be_handled(key, first_id, replays):
            self._waiting.pop((key, replays), None)
            return True
        if self._waits(key, first_id, replays):
            self._incoming.again(message, LOOK_SECONDS)
        elif self._is_full(key, first_id):  # its key may be alive when there is room
            _log.warning("%s", _full())
            self._incoming.again(message, AGAIN_AFTER_SECONDS)
        else:
            self._follow(message)
        return False

    def _waits(self, key: str, first_id: str, replays: int) -> bool:
        """Return True if a message waits for dead letters that other consumers handle."""
        own = self._records.sequences.find(key, first_id)
        if own is None or replays <= own.replays:
            return False
        first, now = self._records.sequences.first(key), self._clock.monotonic()
        with self._changing:
            before, since, polled = self._waiting.pop((key, replays), (None, now, now))
            # One that was over at its last poll, long ago, was of an earlier replay.
            if before != first or polled - since >= STILL_SECONDS < now - polled:
                since = now
            self._waiting[key, replays] = first, since, now
            if len(self._waiting) > _MAX_WAITING:
                del self._waiting[next(iter(self._waiting))]
        return now - since < STILL_SECONDS

    def _record(self, key: str, message: pulsar.Message) -> None:
        sequences, first_id = self._records.sequences, self._attempts.of(message).first_id
        letter = sequences.enter(key, first_id, _replays(message))
        if sequences.find(key, first_id) == letter:
            return
        if self._is_full(key, first_id):
            raise _full()
        self._records.write(record_name(key, first_id), letter.encode())
        if self._records.sequences.find(key, first_id) != letter:
            # Without the record, consumers would handle later messages of the key.
            raise NotSentError(
                "a message cannot be dead-lettered, because its record is not readable: a "
                f"transaction may be open in {self._policy().sequences_topic}",
                remedy="commit or abort it, or wait for its time-out; the send is repeated",
                reason="TransactionOpen",
            )

    def _is_full(self, key: str, first_id: str) -> bool:
        sequences = self._records.sequences
        return len(sequences) >= MAX_ENTRIES and sequences.find(key, first_id) is None


def _full() -> NotSentError:
    return NotSentError(
        "a message cannot be dead-lettered, and waits in its consumer with its key",
        got=f"{MAX_ENTRIES} dead letters in sequences",
        remedy="replay them",
        reason="SequencesFull",
    )


def _replays(message: pulsar.Message) -> int:
    return envelope.replays(read_properties(message) or {})


_SEND_SECONDS = 10.0
_READ_MILLISECONDS = 10_000
_MARKER = "end"
"""Key of the record behind an entry that the client cannot decode; no name of a dead letter."""
STALE_SECONDS = 60.0
"""Age of the records after which all are read again: compaction may have deleted the removal of a
record."""


class ClientReader:
    """Reads the records with the client.

    Args:
        mark: writes a record with `_MARKER`.
    """

    def __init__(self, client: pulsar.Client, topic: TopicName, mark: Callable[[], None]) -> None:
        first = pulsar.MessageId.earliest
        self._topic, self._mark = topic, mark
        self._reader = client.create_reader(str(topic), first, is_read_compacted=True)

    def next_stored(self, timeout_millis: int) -> pulsar.Message | None:
        """Return the next record; None after the last one."""
        if not self._reader.has_message_available():
            return None
        try:
            return self._reader.read_next(timeout_millis)
        except pulsar.Timeout:
            _log.warning(
                "the topic %s, which records dead letters by key, seems to end with an entry that "
                "cannot be decoded; a record is written behind it",
                self._topic,
            )
            self._mark()
            return self._reader.read_next(timeout_millis)

    def close(self) -> None:
        """Close the reader."""
        with contextlib.suppress(pulsar.PulsarException):
            self._reader.close()


class SequenceTopic:
    """Reads and writes the records in *topic*; opened at the first use, and again after a failure.

    May be used by several threads.

    Args:
        open_reader: opens a reader that does without the client; None to read with the client.
    """

    def __init__(
        self,
        client: pulsar.Client,
        topic: TopicName,
        open_reader: Callable[[TopicName], EntryReader] | None = None,
    ) -> None:
        self.sequences = Sequences()
        self._client = client
        self._topic = topic
        self._open_reader: Callable[[TopicName], ClientReader | EntryReader] = (
            open_reader or self._open_client_reader
        )
        self._reader: ClientReader | EntryReader | None = None
        self._watchdog = SendWatchdog()
        self._sender = PartitionSender(self._make_producer, identity(), self._watchdog)
        self._written = 0.0
        self._timer: Timer | None = None  # closes the idle producer
        self._followed = 0.0
        self._asked = 0
        self._refused: NotSentError | None = None
        self._changing = threading.RLock()

    def read(self) -> None:
        """Read all stored records. Threads that wait share one call."""
        asked = self._asked
        with self._changing:
            if self._asked == asked:  # otherwise another thread has begun a later call
                self._asked += 1
                self._refused = None
                try:
                    with self._answered():
                        self._follow()
                except NotSentError as error:
                    self._refused = error
            if self._refused is not None:
                raise self._refused

    def _follow(self) -> None:
        now = time.monotonic()
        if self._reader is not None and now - self._followed <= STALE_SECONDS:
            try:
                self._apply(self._reader, self.sequences)
            except pulsar.Timeout:
                self._forget()
                raise
            except pulsar.PulsarException:  # such as of a connection that was idle
                self._forget()
        else:
            self._forget()
        if self._reader is None:
            reader = within(OPEN_SECONDS, lambda: self._open_reader(self._topic), late=_close)
            sequences = Sequences()
            try:
                self._apply(reader, sequences)
            except BaseException:
                reader.close()
                raise
            self._reader, self.sequences = reader, sequences
        self._followed = now

    @staticmethod
    def _apply(reader: ClientReader | EntryReader, sequences: Sequences) -> None:
        while (record := reader.next_stored(_READ_MILLISECONDS)) is not None:
            sequences.apply(partition_key(record), record.data())

    def _open_client_reader(self, topic: TopicName) -> ClientReader:
        return ClientReader(self._client, topic, functools.partial(self._send, _MARKER, b"end"))

    def _forget(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def write(self, name: str, content: bytes) -> None:
        """Store a record, and read all records up to it."""
        with self._changing:
            with self._answered():
                self._send(name, content)
            self.read()

    def _send(self, name: str, content: bytes) -> None:
        # Records are for the consumers of this cluster; others have their own.
        fields = {"partition_key": name, "disable_replication": True}
        self._sender.begin()
        self._sender.send(content, fields, _SEND_SECONDS)
        self._written = time.monotonic()
        if self._timer is None:
            with contextlib.suppress(RuntimeError):  # the interpreter is going away
                self._timer = Timer(lambda: self._written + IDLE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        with self._changing:
            if self._written + IDLE_SECONDS <= time.monotonic():
                self._sender.close()
                self._written = time.monotonic()

    def close(self, deadline: Deadline) -> None:
        """Close the reader and the producer."""
        readers = [] if self._reader is None else [self._reader.close]
        timers = [self._watchdog.close, *([self._timer.close] if self._timer else [])]
        all_within(deadline, [*readers, self._sender.end, *timers])

    def _make_producer(self, name: str) -> pulsar.Producer:
        # Otherwise the client does not mark a message as empty, and compaction keeps it.
        options = {"compression_type": pulsar.CompressionType.LZ4}
        return open_producer(self._client, str(self._topic), name, options)

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except (pulsar.PulsarException, OSError) as error:
            raise NotSentError(
                f"the topic {self._topic}, which records dead letters by key, does not answer",
                got=str(error) or type(error).__name__,
                remedy=remedy_of(error, CHECK_POLICY),
            ) from error


def _close(reader: ClientReader | EntryReader) -> None:
    reader.close()
