"""`AsyncSimpleConsumer` on a broker in memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Unpack

import pulsar

from redrive.delivery.assembly import Options
from redrive.delivery.consumers.async_simple import AsyncSimpleConsumer
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.model import Policy
from redrive.testing.broker import InMemoryBroker
from redrive.testing.topics import InMemoryTopics


class AsyncInMemorySimpleConsumer(InMemoryTopics, AsyncSimpleConsumer):
    """An `AsyncSimpleConsumer` whose messages, time and dead letters are in the hands of a test.

    It can be used without having been entered. What `InMemorySimpleConsumer` says holds here.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[Options],
    ) -> None:
        options.setdefault("name", "in-memory")
        super().__init__(self._connect(policy, broker), policy, **options)
        self._consumer = self._open()

    async def receive(
        self,
        max_messages: int,
        invisible: float | timedelta,
        timeout: float | timedelta | None = None,
    ) -> list[pulsar.Message]:
        """Return up to *max_messages* that are due: that takes no time."""
        return self._opened.receive(max_messages, invisible, timeout)
