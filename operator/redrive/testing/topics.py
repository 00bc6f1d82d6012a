"""What a test does to the topics and the clock of a consumer in memory."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pulsar

from redrive.policy.durations import given
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage


class InMemoryTopics:
    """What a test does to the topics and the clock of a consumer."""

    broker: InMemoryBroker
    _topic: TopicName

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
