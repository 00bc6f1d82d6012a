"""`AsyncRetryConsumer` on a broker in memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Unpack, overload

import pulsar

from redrive.delivery.assembly import RetryOptions
from redrive.delivery.consumers.async_consumer import AsyncRetryConsumer
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker
from redrive.testing.topics import InMemoryTopics


class AsyncInMemoryConsumer(InMemoryTopics, AsyncRetryConsumer):
    """An `AsyncRetryConsumer` whose messages, time and dead letters are in the hands of a test.

    It can be used without having been entered. What `InMemoryConsumer` says of `run` holds here;
    besides, a handler is cancelled after its time-out of real time.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[RetryOptions],
    ) -> None:
        options.setdefault("name", "in-memory")
        super().__init__(self._connect(policy, broker), policy, **options)
        self._consumer = self._open()

    @overload
    async def receive(self) -> pulsar.Message: ...
    @overload
    async def receive(self, timeout: float | timedelta | None) -> pulsar.Message | None: ...
    async def receive(self, timeout: float | timedelta | None = None) -> pulsar.Message | None:
        """Return the next message that is due, or None: that takes no time."""
        return self._opened.receive(timeout)

    async def receive_batch(self, size: int, wait: float | timedelta) -> list[pulsar.Message]:
        """Return up to *size* messages that are due within *wait*: that takes no time."""
        return self._opened.receive_batch(size, wait)
