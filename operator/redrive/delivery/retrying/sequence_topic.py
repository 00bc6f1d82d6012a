"""The compacted topic that remembers dead letters by key, as one consumer follows and writes it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator

import pulsar

from redrive.copying.errors import NotSentError
from redrive.delivery.bounded import OPEN_SECONDS, Deadline, all_within, within
from redrive.delivery.identity import identity
from redrive.delivery.producing.sends import PartitionSender, open_producer
from redrive.delivery.retrying.send_watchdog import SendWatchdog
from redrive.policy.naming import TopicName
from redrive.policy.sequences import Sequences

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
