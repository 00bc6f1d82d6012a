"""What a test does to the topics and the clock of a consumer in memory."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pulsar

from redrive.delivery.policy_file import PolicyFile, at_first
from redrive.policy.durations import given
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.connection import InMemoryConnection


class InMemoryTopics:
    """What a test does to the topics and the clock of a consumer."""

    broker: InMemoryBroker
    _topic: TopicName

    def _connect(
        self, policy: Policy | PolicyFile, broker: InMemoryBroker | None
    ) -> InMemoryConnection:
        """Connect to *broker*, or to one of its own."""
        first = at_first(policy)
        self.broker = broker or InMemoryBroker(first)
        self._topic = first.topic
        return InMemoryConnection(self.broker)

    def send(
        self,
        content: bytes | None,
        *,
        properties: Mapping[str, str] | None = None,
        partition_key: str = "",
        ordering_key: str = "",
        event_timestamp: int = 0,
    ) -> pulsar.MessageId:
        """Produce a message to the source topic, as an application would."""
        message = InMemoryMessage(
            self._topic,
            pulsar.MessageId(-1, 0, 0),
            content,
            self.broker.clock.now(),
            headers=dict(properties or {}),
            key=partition_key,
            order=ordering_key,
            event_time=event_timestamp,
        )
        return self.broker.store(self._topic, message)

    @property
    def dead_letters(self) -> list[InMemoryMessage]:
        """Return what lies in the dead-letter topic, oldest first."""
        return list(self.broker.dead_letters)

    def advance(self, by: float | timedelta) -> None:
        """Put the clock forward: let time pass while no call waits for a message."""
        self.broker.clock.advance(given(by, "a time to pass"))
