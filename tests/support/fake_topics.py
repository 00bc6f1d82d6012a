"""A client and its broker in memory, with deduplication and with failing sends."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import NamedTuple, cast

import pulsar

NO_ENTRY = pulsar.MessageId(-1, -1, -1, -1)
"""The id in the broker's answer to a dropped duplicate."""


class Fate(enum.Enum):
    """The result of one send."""

    STORED = "stored, unless it is a duplicate"
    UNANSWERED = "the same, without a receipt"
    REFUSED = "not stored"
    FORGOTTEN = "not stored, and the broker forgets all producers"
    CONTRADICTED = "not stored, and answered as a duplicate"


class StoredCopy(NamedTuple):
    """A message of a topic."""

    topic: str
    producer: str
    sequence_id: int
    content: object


class FakeTopics:
    """The part of `pulsar.Client` for sends.

    Args:
        fate: the result of each send; by default the message is stored.
        partitions: of each topic; 0 for none.

    Attributes:
        taken: the producer names that another client holds.
    """

    def __init__(
        self, fate: Callable[[], Fate] = lambda: Fate.STORED, *, partitions: int = 0
    ) -> None:
        self.partitions = partitions
        self.deduplicates = True
        self.taken: set[str] = set()
        self.stored: list[StoredCopy] = []
        self.producers: list[FakeProducer] = []
        self.fate = fate
        self.last: dict[tuple[str, str], int] = {}
        self.changing = threading.Lock()

    def as_pulsar(self) -> pulsar.Client:
        """Return this as a `pulsar.Client`."""
        return cast("pulsar.Client", self)

    @property
    def contents(self) -> list[object]:
        """Return the contents of the stored messages."""
        return [copy.content for copy in self.stored]

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [f"{topic}-partition-{n}" for n in range(self.partitions)] or [topic]

    def create_producer(
        self, topic: str, *, producer_name: str, **_options: object
    ) -> FakeProducer:
        if producer_name in self.taken:
            raise pulsar.ProducerBusy
        producer = FakeProducer(self, topic, producer_name)
        self.producers.append(producer)
        return producer


class FakeProducer:
    """A producer. It sends only in the caller's thread: other ways leak memory."""

    def __init__(self, topics: FakeTopics, topic: str, name: str) -> None:
        self.name = name
        self.closed = threading.Event()
        self._topics = topics
        self._at = topic, name
        self._last = topics.last.get(self._at, -1)

    def last_sequence_id(self) -> int:
        return self._last

    def is_connected(self) -> bool:
        return True

    def send(self, content: object, *, sequence_id: int, **_fields: object) -> pulsar.MessageId:
        topics, fate = self._topics, self._topics.fate()
        if fate is Fate.FORGOTTEN:
            topics.last.clear()
        if fate in {Fate.REFUSED, Fate.FORGOTTEN}:
            raise pulsar.ConnectError
        if fate is Fate.CONTRADICTED:
            return NO_ENTRY
        with topics.changing:
            receipt = self._store(content, sequence_id)
        if fate is Fate.UNANSWERED:
            raise pulsar.Timeout
        return receipt

    def close(self) -> None:
        if self.closed.is_set():
            raise pulsar.AlreadyClosed
        self.closed.set()

    def _store(self, content: object, sequence_id: int) -> pulsar.MessageId:
        topics = self._topics
        if topics.deduplicates:
            if sequence_id <= topics.last.get(self._at, -1):
                return NO_ENTRY
            topics.last[self._at] = sequence_id
        topics.stored.append(StoredCopy(*self._at, sequence_id, content))
        return pulsar.MessageId(-1, 5, len(topics.stored))
