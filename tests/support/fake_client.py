"""Fake clients of Pulsar: consumers of messages that a test delivers, and topics in memory."""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple, cast

import pulsar

from redrive.delivery.arrivals import BURST, Burst
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage


class BurstMessage(InMemoryMessage):
    """A message to which its consumer may add, as to one of the client."""

    redrive: Burst

    __setattr__ = object.__setattr__


class FakeSubscription:
    """A consumer of one subscription."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self.waiting: queue.SimpleQueue[InMemoryMessage | None] = queue.SimpleQueue()
        self.closed = False
        self.connected = True

    def topic(self) -> str:
        return self._topic

    def is_connected(self) -> bool:
        return self.connected and not self.closed

    def receive(self, milliseconds: int) -> InMemoryMessage:
        try:
            message = self.waiting.get(timeout=milliseconds / 1_000)
        except queue.Empty:
            raise pulsar.Timeout from None
        if message is None:
            self.waiting.put(None)
            raise pulsar.AlreadyClosed
        return message

    read_next = receive

    def batch_receive(self) -> list[InMemoryMessage]:
        messages: list[InMemoryMessage] = []
        with contextlib.suppress(pulsar.Timeout):
            while len(messages) < BURST:
                messages.append(self.receive(0 if messages else 1))
        return messages

    def acknowledge(self, _message: InMemoryMessage) -> None:
        """Do nothing: there is no broker."""

    def close(self) -> None:
        self.closed = True
        self.waiting.put(None)


class FakeClient:
    """The part of `pulsar.Client` for a consumer that only receives."""

    def __init__(self) -> None:
        self._subscriptions: dict[str, FakeSubscription] = {}
        self._delivered = 0

    def as_pulsar(self) -> pulsar.Client:
        """Return this as a `pulsar.Client`."""
        return cast("pulsar.Client", self)

    @property
    def open(self) -> list[str]:
        """Return the subscribed topics."""
        return [topic for topic, its in self._subscriptions.items() if not its.closed]

    def subscribe(self, topic: str, _name: str, **_options: object) -> FakeSubscription:
        return self._subscriptions.setdefault(topic, FakeSubscription(topic))

    def create_reader(self, topic: str, _start: object, **_options: object) -> FakeSubscription:
        return self.subscribe(topic, "")

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def connect(self, topic: TopicName, *, connected: bool) -> None:
        """Connect or disconnect the consumer of *topic*."""
        self._subscriptions[str(topic)].connected = connected

    def deliver(
        self, topic: TopicName, *contents: bytes, properties: Mapping[str, str] | None = None
    ) -> None:
        """Deliver messages to the consumer of *topic*."""
        for content in contents:
            self._delivered += 1
            message = BurstMessage(
                topic,
                pulsar.MessageId(-1, 1, self._delivered),
                content,
                datetime(2026, 11, 21, tzinfo=UTC),
                properties or {},
            )
            self._subscriptions[str(topic)].waiting.put(message)

    def wait_until_taken(self, topic: TopicName) -> None:
        """Wait until the consumers have received all delivered messages."""
        pause = threading.Event()
        while not self._subscriptions[str(topic)].waiting.empty():
            pause.wait(0.01)


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

    def topic(self) -> str:
        return self._at[0]

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
