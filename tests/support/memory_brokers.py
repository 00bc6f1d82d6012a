"""Brokers in memory that block, kill consumers, or lose their last acknowledgements."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any, Literal

import pulsar

from redrive import Policy
from redrive.messages import id_text
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage


class BlockingBroker(InMemoryBroker):
    """A broker whose calls of one kind block until `release` is set, at most 30 s.

    Args:
        policy: the policy of the consumer.
        call: `store` blocks sends to the retry topic, `acknowledge` all acknowledgements.

    """

    def __init__(self, policy: Policy, call: Literal["store", "acknowledge"]) -> None:
        super().__init__(policy)
        self.blocked, self.release = threading.Event(), threading.Event()
        self._call, self._retry_topic = call, policy.retry_topic

    def _block(self) -> None:
        self.blocked.set()
        assert self.release.wait(30)

    def store(
        self, topic: TopicName, message: InMemoryMessage, deliver_after: timedelta | None = None
    ) -> pulsar.MessageId:
        if self._call == "store" and topic == self._retry_topic:
            self._block()
        return super().store(topic, message, deliver_after)

    def acknowledge(self, message: InMemoryMessage) -> None:
        if self._call == "acknowledge":
            self._block()
        super().acknowledge(message)


KEPT_BACK = timedelta(seconds=0.1)
"""The time until a client sends an acknowledgement."""


class Killed(BaseException):
    """The end of a killed process."""


class FaultyBroker(InMemoryBroker):
    """Records the topics of sent messages and the latest acknowledgements.

    Attributes:
        used: the topics of sent messages.
        kills: kill the next process before it acknowledges a message.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.used: set[TopicName] = set()
        self.kills = False
        self._acknowledged: list[tuple[datetime, InMemoryMessage]] = []

    def store(self, topic: TopicName, *args: Any, **kwargs: Any) -> pulsar.MessageId:  # noqa: ANN401
        """Store the message."""
        self.used.add(topic)
        return super().store(topic, *args, **kwargs)

    def acknowledge(self, message: InMemoryMessage) -> None:
        """Acknowledge the message, unless the process is killed first."""
        if self.kills:
            raise Killed
        if id_text(message.message_id()) in {id_text(kept.id) for kept in self.unsettled()}:
            self._acknowledged.append((self.clock.now(), message))
        super().acknowledge(message)

    def flush(self) -> None:
        """Apply the acknowledgements that closing consumers send."""
        self._acknowledged.clear()

    def is_due(self) -> bool:
        """Return True if a message can be delivered now."""
        due = self.next_due()
        return due is not None and due <= self.clock.now()

    def reconnect(self) -> list[InMemoryMessage]:
        """Disconnect all consumers, and return the settled messages that are redelivered."""
        self.unload()
        since = self.clock.now() - KEPT_BACK
        again = [message for when, message in self._acknowledged if when > since]
        self._acknowledged.clear()
        for message in again:
            self._give_back(message, self.clock.now())
        return again
