"""A broker in memory that blocks until a test releases it."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Literal

import pulsar

from redrive import Policy
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
