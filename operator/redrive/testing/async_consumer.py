"""`AsyncRetryConsumer` on a broker in memory."""

from __future__ import annotations

from datetime import timedelta
from typing import overload

import pulsar

from redrive.delivery.consumers.async_consumer import AsyncRetryConsumer
from redrive.delivery.consumers.consumer import NACK_DELAY
from redrive.delivery.policy_file import PolicyFile
from redrive.delivery.telemetry.events import Hook
from redrive.delivery.telemetry.tracing import UNTRACED, MessageTracing
from redrive.policy.cause import Redaction
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker
from redrive.testing.consumer import InMemoryConsumer
from redrive.testing.parts import InMemoryTopics


class AsyncInMemoryConsumer(InMemoryTopics, AsyncRetryConsumer):
    """An `AsyncRetryConsumer` whose messages, time and dead letters are in the hands of a test.

    It can be used without having been entered. What `InMemoryConsumer` says of `run` holds here;
    besides, a handler is cancelled after its time-out of real time.
    """

    def __init__(  # noqa: PLR0913 - as of AsyncRetryConsumer
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        name: str = "in-memory",
        redaction: Redaction = Redaction(),
        nack_delay: timedelta = NACK_DELAY,
        ack_timeout: timedelta | None = None,
        on_event: Hook | None = None,
        tracing: MessageTracing = UNTRACED,
    ) -> None:
        consumer = InMemoryConsumer(
            policy, broker=broker, name=name, redaction=redaction, nack_delay=nack_delay,
            ack_timeout=ack_timeout, on_event=on_event, tracing=tracing,
        )  # fmt: skip
        self._open = lambda: consumer
        self._assemble()
        self._consumer = consumer
        self.broker = consumer.broker
        self._topic = consumer.policy.topic

    @overload
    async def receive(self) -> pulsar.Message: ...
    @overload
    async def receive(self, timeout: timedelta | None) -> pulsar.Message | None: ...
    async def receive(self, timeout: timedelta | None = None) -> pulsar.Message | None:
        """Return the next message that is due, or None: that takes no time."""
        return self._opened.receive(timeout)

    async def receive_batch(self, size: int, wait: timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages that are due within *wait*: that takes no time."""
        return self._opened.receive_batch(size, wait)
