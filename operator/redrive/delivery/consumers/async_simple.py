"""`AsyncSimpleConsumer`: `SimpleConsumer` for asyncio, with the same surface."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Unpack

import pulsar

from redrive.delivery.assembly import Options
from redrive.delivery.consumers.async_policy_consumer import AsyncPolicyConsumer
from redrive.delivery.consumers.simple import SimpleConsumer
from redrive.delivery.parts import BrokerConnection
from redrive.delivery.policy_file import PolicyFile
from redrive.policy.model import Policy


class AsyncSimpleConsumer(AsyncPolicyConsumer[SimpleConsumer]):
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
        return await self._take(
            lambda wait: self._opened.receive(max_messages, invisible, wait), timeout
        )

    def change_invisible_duration(
        self, message: pulsar.Message, invisible: float | timedelta
    ) -> None:
        """Have *message* stay invisible; see `SimpleConsumer.change_invisible_duration`."""
        self._opened.change_invisible_duration(message, invisible)
