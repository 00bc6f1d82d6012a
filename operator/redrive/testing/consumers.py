"""Consumers of all kinds on a broker in memory, for the tests of applications.

They share topics, and have methods by which a test changes these topics and the clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Unpack, overload

import pulsar

from redrive.delivery.assembly import Options, RetryOptions, check_options
from redrive.delivery.consumers.asynchronous import AsyncRetryConsumer, AsyncSimpleConsumer
from redrive.delivery.consumers.consumer import RetryConsumer
from redrive.delivery.consumers.simple import SimpleConsumer
from redrive.delivery.policy_file import PolicyFile, at_first
from redrive.messages import BYTES
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.values import check_instance, to_timedelta
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.connection import InMemoryClientProducer, InMemoryConnection


class InMemoryTopics:
    """Methods by which a test changes the topics and the clock of a consumer."""

    broker: InMemoryBroker
    _topic: TopicName

    def _connect(
        self,
        policy: Policy | PolicyFile,
        broker: InMemoryBroker | None,
        options: Options,
        kind: type = RetryOptions,
    ) -> InMemoryConnection:
        """Connect to *broker*, or to one of its own; name the consumer if *options* do not.

        Args:
            kind: class of the options.
        """
        check_options(options, kind, "broker")
        check_instance(broker, InMemoryBroker, "broker", optional=True)
        options.setdefault("name", "in-memory")
        first = at_first(policy)
        self.broker = broker or InMemoryBroker(first)
        self._topic = first.topic
        return InMemoryConnection(self.broker)

    def send(
        self,
        content: bytes | None,
        *,
        properties: Mapping[str, str] | None = None,
        partition_key: str = "",
        ordering_key: str = "",
        event_timestamp: int = 0,
    ) -> pulsar.MessageId:
        """Produce a message to the source topic, as an application would.

        Raises:
            TypeError: the client refuses it, as it does a property that is no string.
            pulsar.MessageTooBig: its content is above 5 MiB.
        """
        producer = InMemoryClientProducer(self.broker, self._topic, BYTES)
        return producer.send(
            content, dict(properties or {}), partition_key, ordering_key,
            event_timestamp=event_timestamp,
        )  # fmt: skip

    @property
    def dead_letters(self) -> list[InMemoryMessage]:
        """Return the messages of the dead-letter topic, oldest first."""
        return list(self.broker.dead_letters)

    def advance(self, by: float | timedelta) -> None:
        """Put the clock forward: let time pass while no call waits for a message."""
        self.broker.clock.advance(to_timedelta(by, "a time to pass"))


class InMemoryConsumer(InMemoryTopics, RetryConsumer):
    """A `RetryConsumer` whose messages, time and dead letters are in the hands of a test.

    `run` and `run_batches` return when nothing is left to be handled, and can be called again. They
    handle one message, or one batch, after another, however many workers they are given. A handler
    that puts the clock forward by more than its time-out has timed out.

    Args:
        policy: decides about failures; a `PolicyFile` is read again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[RetryOptions],
    ) -> None:
        super().__init__(self._connect(policy, broker, options), policy, **options)


class InMemorySimpleConsumer(InMemoryTopics, SimpleConsumer):
    """A `SimpleConsumer` whose messages, time and dead letters are in the hands of a test.

    Invisible durations end while the clock is put forward, by `advance` or by whoever waits for a
    message, of this consumer or of another one of its broker.

    Args:
        policy: decides about failures; a `PolicyFile` is read again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(self._connect(policy, broker, options, Options), policy, **options)


class AsyncInMemoryConsumer(InMemoryTopics, AsyncRetryConsumer):
    """An `AsyncRetryConsumer` whose messages, time and dead letters are in the hands of a test.

    It can be used without having been entered. `run` is as in `InMemoryConsumer`; besides, a
    handler is cancelled after its time-out of real time.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[RetryOptions],
    ) -> None:
        super().__init__(self._connect(policy, broker, options), policy, **options)
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


class AsyncInMemorySimpleConsumer(InMemoryTopics, AsyncSimpleConsumer):
    """An `AsyncSimpleConsumer` whose messages, time and dead letters are in the hands of a test.

    It can be used without having been entered, as `InMemorySimpleConsumer`.
    """

    def __init__(
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(self._connect(policy, broker, options, Options), policy, **options)
        self._consumer = self._open()

    async def receive(
        self,
        max_messages: int,
        invisible: float | timedelta,
        timeout: float | timedelta | None = None,
    ) -> list[pulsar.Message]:
        """Return up to *max_messages* that are due: that takes no time."""
        return self._opened.receive(max_messages, invisible, timeout)
