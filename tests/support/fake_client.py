"""A fake `pulsar.Client` without a broker: consumers receive the messages that a test delivers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import cast

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
