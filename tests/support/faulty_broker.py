"""A broker in memory that kills, and that loses what its consumers told it last."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pulsar

from redrive import Policy
from redrive.messages import id_text
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage

KEPT_BACK = timedelta(seconds=0.1)
"""So long a client keeps an acknowledgement before it sends it."""


class Killed(BaseException):
    """The process ended here."""


class FaultyBroker(InMemoryBroker):
    """Remembers where messages were sent, and what was acknowledged a moment ago.

    Attributes:
        used: the topics to which messages were sent.
        kills: whether the next process that acknowledges a message is killed first.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.used: set[TopicName] = set()
        self.kills = False
        self._acknowledged: list[tuple[datetime, InMemoryMessage]] = []

    def store(self, topic: TopicName, *args: Any, **kwargs: Any) -> pulsar.MessageId:  # noqa: ANN401
        """Store it as ever."""
        self.used.add(topic)
        return super().store(topic, *args, **kwargs)

    def acknowledge(self, message: InMemoryMessage) -> None:
        """Acknowledge it, unless the process is killed first."""
        if self.kills:
            raise Killed
        if id_text(message.message_id()) in {id_text(kept.id) for kept in self.unsettled()}:
            self._acknowledged.append((self.clock.now(), message))
        super().acknowledge(message)

    def flush(self) -> None:
        """Get what its consumers have kept back: they close."""
        self._acknowledged.clear()

    def is_due(self) -> bool:
        """Whether a message would be handed out now."""
        due = self.next_due()
        return due is not None and due <= self.clock.now()

    def reconnect(self) -> list[InMemoryMessage]:
        """Lose the connection of all consumers, and return what was settled and comes again."""
        self.unload()
        since = self.clock.now() - KEPT_BACK
        again = [message for when, message in self._acknowledged if when > since]
        self._acknowledged.clear()
        for message in again:
            self._give_back(message, self.clock.now())
        return again
