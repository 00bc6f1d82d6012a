"""Sequence of dead letters by key, and the topic that stores it.

Messages of a key that has a dead letter follow it, for policies that keep sequences.

    record that it is one ─▶ send the letter ─▶ acknowledge

Whoever gets the key next reads the record before it handles a message. A crash after the record
leaves the message to be sent again, unhandled; one after the letter duplicates the letter.

The compacted topic that remembers dead letters by key, as one consumer follows and writes it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pulsar

from redrive.delivery.concurrency import (
    OPEN_SECONDS,
    Deadline,
    SendWatchdog,
    all_within,
    identity,
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
from redrive.delivery.sender import PartitionSender, open_producer
from redrive.messages import NotSentError, id_text, read_properties, sequence_key
from redrive.policy import envelope
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.sequences import MAX_ENTRIES, Entry, Sequences, record_name
from redrive.policy.verdict import Discard, Done

AGAIN_AFTER_SECONDS = 5.0
"""When a message is looked at again of which it can't be known whether its key is dead."""
LOOK_SECONDS = 0.5
"""How often a letter that came back is looked at again while others go before it."""
STILL_SECONDS = 30.0
"""A letter that came back waits until none before it was handled for so long."""

_log = logging.getLogger(__name__)


class SequencesFullError(NotSentError):
    """A policy has as many dead letters in sequences as are remembered; it was not stored."""

    reason = "SequencesFull"


class Sequencing(Middleware):
    """Hands out no message that comes after a dead letter of its key. For several threads.

    Args:
        letters: what all consumers of the policy know of dead letters.
        follow: dead-letters a message that was not handled.
    """

    def __init__(
        self,
        parts: Parts,
        letters: SequenceLog,
        attempts: Attempts,
        policy: Callable[[], Policy],
        follow: Callable[[pulsar.Message], None],
    ) -> None:
        self._incoming = parts.incoming
        self._clock = parts.clock
        self._letters = letters
        self._attempts = attempts
        self._policy = policy
        self._follow = follow
        # By id of letters that came back: the one that goes first, and since when.
        self._waiting: dict[str, tuple[Entry | None, float]] = {}
        # By id of messages that are handled, and whose record could not be removed.
        self._ended: dict[str, Settlement] = {}
        self._settle: Settle

    def receive(self, receive: Receive) -> Receive:
        """Receive the next message that is not behind a dead letter; the others follow it."""

        def receive_in_sequence(timeout: float | None) -> pulsar.Message | None:
            return receive_accepted(receive, self._may_be_handled, self._clock.monotonic, timeout)

        return receive_in_sequence

    def settle(self, settle: Settle) -> Settle:
        """Take a letter that was replayed out of its sequence when it is done."""

        def settle_in_sequence(settlement: Settlement) -> pulsar.MessageId | None:
            message, verdict, _ = settlement
            if isinstance(verdict, (Done, Discard)) and not self._is_off_record(message):
                # Not acknowledged: the key would stay dead. Nor is it handled again.
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
        if self._letters.sequences.find(key, first_id) is None:
            return True
        try:
            self._letters.write(record_name(key, first_id), b"")
        except NotSentError as error:
            _log.warning("a message that was handled is acknowledged later: %s", error)
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
            # What was recorded before the broker gave this consumer the message.
            self._letters.read()
        except NotSentError as error:
            _log.warning("a message waits until it is known whether its key is dead: %s", error)
            self._incoming.again(message, AGAIN_AFTER_SECONDS)
            return False
        first_id = self._attempts.of(message).first_id
        if self._letters.sequences.may_be_handled(key, first_id, _replays(message)):
            self._waiting.pop(id_text(message.message_id()), None)
            return True
        if self._waits(key, first_id, message):
            self._incoming.again(message, LOOK_SECONDS)
        elif self._is_full(key, first_id):  # its key may live again when there is room
            _log.warning("%s", _full())
            self._incoming.again(message, AGAIN_AFTER_SECONDS)
        else:
            self._follow(message)
        return False

    def _waits(self, key: str, first_id: str, message: pulsar.Message) -> bool:
        """Whether *message* came back behind others that are being handled elsewhere."""
        own = self._letters.sequences.find(key, first_id)
        if own is None or _replays(message) <= own.replays:
            return False
        first, now = self._letters.sequences.first(key), self._clock.monotonic()
        message_id = id_text(message.message_id())
        before, since = self._waiting.get(message_id, (None, now))
        since = since if before == first else now
        if now - since < STILL_SECONDS:
            self._waiting[message_id] = first, since
            return True
        del self._waiting[message_id]
        return False

    def _record(self, key: str, message: pulsar.Message) -> None:
        sequences, first_id = self._letters.sequences, self._attempts.of(message).first_id
        letter = sequences.enter(key, first_id, _replays(message))
        if sequences.find(key, first_id) == letter:
            return
        if self._is_full(key, first_id):
            raise _full()
        self._letters.write(record_name(key, first_id), letter.encode())

    def _is_full(self, key: str, first_id: str) -> bool:
        sequences = self._letters.sequences
        return len(sequences) >= MAX_ENTRIES and sequences.find(key, first_id) is None


def _full() -> SequencesFullError:
    return SequencesFullError(
        "a message can't become a dead letter, and waits in its consumer with its key",
        got=f"{MAX_ENTRIES} dead letters in sequences",
        remedy="replay them",
    )


def _replays(message: pulsar.Message) -> int:
    return envelope.replays(read_properties(message) or {})


_SEND_SECONDS = 10.0
_READ_MILLISECONDS = 10_000
STALE_SECONDS = 60.0
"""Who has followed nothing for so long begins again: of a record that was removed meanwhile,
compaction may have left nothing to follow."""


class SequenceTopic:
    """Follows and writes *topic*; opened when it is first needed, and again after a failure.

    May be used by several threads.
    """

    def __init__(self, client: pulsar.Client, topic: TopicName) -> None:
        self.sequences = Sequences()
        self._client = client
        self._topic = topic
        self._reader: pulsar.Reader | None = None
        self._watchdog = SendWatchdog()
        self._sender = PartitionSender(self._make_producer, identity(), self._watchdog)
        self._followed = 0.0
        self._asked = 0
        self._refused: NotSentError | None = None
        self._changing = threading.RLock()

    def read(self) -> None:
        """Follow all that is stored by now. Threads that wait for their turn share one answer."""
        asked = self._asked
        with self._changing:
            if self._asked == asked:  # else another has begun to ask later than this thread
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
        reader, sequences = self._reader, self.sequences
        now = time.monotonic()
        if reader is None or now - self._followed > STALE_SECONDS:
            self._forget()
            reader = within(OPEN_SECONDS, self._read_from_the_first, late=_leave)
            sequences = Sequences()
        self._reader = reader
        try:
            while reader.has_message_available():
                record = reader.read_next(_READ_MILLISECONDS)
                sequences.apply(record.partition_key(), record.data())
        except pulsar.PulsarException:
            self._forget()
            raise
        self.sequences, self._followed = sequences, now

    def _read_from_the_first(self) -> pulsar.Reader:
        first = pulsar.MessageId.earliest
        return self._client.create_reader(str(self._topic), first, is_read_compacted=True)

    def _forget(self) -> None:
        if self._reader is not None:
            _leave(self._reader)
        self._reader = None

    def write(self, name: str, content: bytes) -> None:
        """Store a record, and follow all up to it."""
        with self._changing:
            with self._answered():
                # It tells of the consumers of this cluster; those of others have their own.
                fields = {"partition_key": name, "disable_replication": True}
                self._sender.begin()
                self._sender.send(content, fields, _SEND_SECONDS)
            self.read()

    def close(self, deadline: Deadline) -> None:
        """Close the reader and the producer."""
        readers = [] if self._reader is None else [functools.partial(_leave, self._reader)]
        all_within(deadline, [*readers, self._sender.end, self._watchdog.close])

    def _make_producer(self, name: str) -> pulsar.Producer:
        # Else the client does not say that a message is empty, and compaction keeps it.
        options = {"compression_type": pulsar.CompressionType.LZ4}
        return open_producer(self._client, str(self._topic), name, options)

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except (pulsar.PulsarException, TimeoutError) as error:
            raise NotSentError(
                f"the topic {self._topic}, which remembers dead letters by key, does not answer",
                got=str(error) or type(error).__name__,
                remedy="check that the RetryPolicy is Ready and lists this consumer's role, "
                "and that the broker answers",
            ) from error


def _leave(reader: pulsar.Reader) -> None:
    with contextlib.suppress(pulsar.PulsarException):
        reader.close()
