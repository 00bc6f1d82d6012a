"""What all asyncio consumers of a policy have in common."""

from __future__ import annotations

from typing import TypeVar

import pulsar

from redrive.delivery.consumers.async_base import AsyncBase
from redrive.delivery.consumers.policy_consumer import PolicyConsumer
from redrive.delivery.middleware.outage_circuit import Outage
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy

_Consumer = TypeVar("_Consumer", bound=PolicyConsumer)


class AsyncPolicyConsumer(AsyncBase[_Consumer]):
    """Consumes the source and the retry topic of a policy by a `PolicyConsumer`."""

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is; see `RetryConsumer.attempt_of`."""
        return self._opened.attempt_of(message)

    async def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled; see `acknowledge` of the consumer without `Async`."""
        consumer = self._opened
        if consumer._processor.wrapped and not self._threads.closed:  # noqa: SLF001 - none of the API
            await self._threads.settle(consumer.acknowledge, message)
        else:
            consumer.acknowledge(message)  # the client notes it, and tells the broker later

    @property
    def policy(self) -> Policy:
        """Return the policy in force; its `generation` tells which."""
        return self._opened.policy

    @property
    def connected(self) -> bool:
        """Return True if there is a connection for both topics; see `RetryConsumer.connected`."""
        return self._opened.connected

    @property
    def in_hand(self) -> int:
        """Return how many messages were taken and are not settled; see `RetryConsumer.in_hand`."""
        return self._opened.in_hand

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Return what this consumer has paused for by itself; see `OutageBreaker`."""
        return self._opened.outages

    @property
    def dead_keys(self) -> int:
        """Return how many keys' messages follow a dead letter; see `RetryConsumer.dead_keys`."""
        return self._opened.dead_keys

    def ignore_outages(self) -> None:
        """Go on in spite of all outages; see `RetryConsumer.ignore_outages`."""
        self._opened.ignore_outages()
