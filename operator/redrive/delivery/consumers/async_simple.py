"""`AsyncSimpleConsumer`: `SimpleConsumer` for asyncio, with the same surface."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Unpack

import pulsar

from redrive.delivery.assembly import Options
from redrive.delivery.consumers.async_base import AsyncBase, sliced
from redrive.delivery.consumers.simple import SimpleConsumer
from redrive.delivery.middleware.outage_circuit import Outage
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.envelope import Attempt
from redrive.policy.model import Policy


class AsyncSimpleConsumer(AsyncBase[SimpleConsumer]):
    """Consumes a topic on request: each message is the caller's for as long as was asked for.

    Use it as an asynchronous context manager, within the life of *client*, an ordinary
    `pulsar.Client`: entering it subscribes. Arguments, methods and guarantees are those of
    `SimpleConsumer`, which does the work in threads of its own. For one event loop.

    What a cancelled `receive` would have returned is handed out again, as the same attempt.

    Raises:
        SubscribeError: on entering, the broker refused one of the two subscriptions.
        InvalidSpecError: on entering, the policy is ordered.
    """

    def __init__(
        self,
        client: pulsar.Client | BrokerConnection,
        policy: Policy | PolicyFile,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(functools.partial(SimpleConsumer, client, policy, **options))

    async def receive(
        self,
        max_messages: int,
        invisible: float | timedelta,
        timeout: float | timedelta | None = None,
    ) -> list[pulsar.Message]:
        """Return up to *max_messages*; see `SimpleConsumer.receive`."""

        async def take(wait: timedelta) -> list[pulsar.Message]:
            receive = self._opened.receive
            return await self._threads.take(receive, max_messages, invisible, wait)

        return await sliced(take, timeout)

    async def acknowledge(self, message: pulsar.Message) -> None:
        """Settle *message* as handled; see `SimpleConsumer.acknowledge`."""
        self._opened.acknowledge(message)  # the client notes it, and tells the broker later

    def change_invisible_duration(
        self, message: pulsar.Message, invisible: float | timedelta
    ) -> None:
        """Have *message* stay invisible; see `SimpleConsumer.change_invisible_duration`."""
        self._opened.change_invisible_duration(message, invisible)

    def attempt_of(self, message: pulsar.Message) -> Attempt:
        """Return which attempt at *message* this is; see `RetryConsumer.attempt_of`."""
        return self._opened.attempt_of(message)

    @property
    def policy(self) -> Policy:
        """Return the policy in force; its `generation` tells which."""
        return self._opened.policy

    @property
    def in_hand(self) -> int:
        """Return how many messages were taken and are not settled; see `RetryConsumer.in_hand`."""
        return self._opened.in_hand

    @property
    def outages(self) -> tuple[Outage, ...]:
        """Return what this consumer has paused for by itself; see `OutageBreaker`."""
        return self._opened.outages

    def ignore_outages(self) -> None:
        """Go on in spite of all outages; see `RetryConsumer.ignore_outages`."""
        self._opened.ignore_outages()
