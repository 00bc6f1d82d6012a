"""The compacted topic that remembers dead letters by key, as one consumer follows and writes it."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pulsar

from redrive.copying.errors import NotSentError
from redrive.delivery.bounded import OPEN_SECONDS, Deadline, all_within, within
from redrive.policy.naming import TopicName
from redrive.policy.sequences import Sequences

_Opened = TypeVar("_Opened", pulsar.Reader, pulsar.Producer)
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
        self._producer: pulsar.Producer | None = None
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
            reader, sequences = _open(self._read_from_the_first), Sequences()
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
                if self._producer is None:
                    self._producer = _open(
                        lambda: self._client.create_producer(
                            str(self._topic),
                            batching_enabled=False,
                            # Else the client does not say that a message is empty, and compaction
                            # keeps it.
                            compression_type=pulsar.CompressionType.LZ4,
                            send_timeout_millis=10_000,
                        )
                    )
                # It tells of the consumers of this cluster; those of others have their own.
                self._producer.send(content, partition_key=name, disable_replication=True)
            self.read()

    def close(self, deadline: Deadline) -> None:
        """Close the reader and the producer."""
        opened = [each for each in (self._reader, self._producer) if each is not None]
        all_within(deadline, [functools.partial(_leave, each) for each in opened])

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


def _open(call: Callable[[], _Opened]) -> _Opened:
    return within(OPEN_SECONDS, call, late=_leave)


def _leave(opened: pulsar.Reader | pulsar.Producer) -> None:
    with contextlib.suppress(pulsar.PulsarException):
        opened.close()
