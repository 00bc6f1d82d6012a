"""`RetryConsumer` on a broker in memory; the way in for users' tests."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import cast

import pulsar

from redrive.delivery import PolicyFile, RetryConsumer, load_policy
from redrive.delivery.consumer import NACK_DELAY
from redrive.delivery.events import Hook
from redrive.delivery.inbox import ConsumerStoppedError
from redrive.delivery.parts import Parts
from redrive.delivery.run import Run
from redrive.delivery.tracing import UNTRACED, Tracing
from redrive.policy.cause import Redaction
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage


class NothingLeftError(ConsumerStoppedError):
    """Whoever waited for a message would have waited for ever; `run` returns instead."""

    reason = "NothingLeft"


class InMemoryConsumer(RetryConsumer):
    """A `RetryConsumer` whose messages, time and dead letters are in the hands of a test.

    `run` and `run_batches` return when nothing is left to be handled, and can be called again. They
    handle one message, or one batch, after another, however many workers they are given. A handler
    that puts the clock forward by more than its time-out has timed out.

    Args:
        policy: what failures lead to; a `PolicyFile` is looked at again in virtual time.
        broker: one to share with other consumers of the policy; by default one of its own.
    """

    def __init__(  # noqa: PLR0913 - as of RetryConsumer
        self,
        policy: Policy | PolicyFile,
        *,
        broker: InMemoryBroker | None = None,
        name: str = "in-memory",
        redaction: Redaction = Redaction(),
        nack_delay: timedelta = NACK_DELAY,
        on_event: Hook | None = None,
        tracing: Tracing = UNTRACED,
    ) -> None:
        first = policy if isinstance(policy, Policy) else load_policy(policy.path)
        self.broker = broker or InMemoryBroker(first)
        self._topic = first.topic
        subscription = _Subscription(self.broker, nack_delay)
        parts = Parts(
            self.broker.clock,
            dict.fromkeys((first.topic, first.retry_topic), subscription),
            _Incoming(self.broker),
            _Outgoing(self.broker),
        )
        self._assemble(parts, policy, name, redaction, on_event, tracing)

    def send(
        self,
        content: bytes | None,
        *,
        properties: Mapping[str, str] | None = None,
        partition_key: str = "",
        ordering_key: str = "",
        event_timestamp: int = 0,
    ) -> pulsar.MessageId:
        """Produce a message to the source topic, as an application would."""
        message = InMemoryMessage(
            self._topic,
            pulsar.MessageId(-1, 0, 0),
            content,
            self.broker.clock.now(),
            headers=dict(properties or {}),
            key=partition_key,
            order=ordering_key,
            event_time=event_timestamp,
        )
        return self.broker.store(self._topic, message)

    @property
    def dead_letters(self) -> list[InMemoryMessage]:
        """Return what lies in the dead-letter topic, oldest first."""
        return list(self.broker.dead_letters)

    def advance(self, by: timedelta) -> None:
        """Put the clock forward: let time pass while nobody waits for a message."""
        self.broker.clock.advance(by)

    def _execute(self, run: Run) -> None:
        clock = self.broker.clock
        while True:
            try:
                messages = run.take()
            except ConsumerStoppedError:
                return
            began = clock.now()
            outcomes = run.outcomes(messages)
            if clock.now() - began > run.timeout:
                run.give_up(messages)
                run.ignore(messages, outcomes)
            else:
                run.settle_all(messages, outcomes)


class _Subscription:
    def __init__(self, broker: InMemoryBroker, nack_delay: timedelta) -> None:
        self._broker = broker
        self._nack_delay = nack_delay

    def acknowledge(self, message: pulsar.Message) -> None:
        self._broker.acknowledge(message)

    def negative_acknowledge(self, message: pulsar.Message) -> None:
        self._broker.negative_acknowledge(message, self._nack_delay)


class _Outgoing:
    def __init__(self, broker: InMemoryBroker) -> None:
        self._broker = broker

    def send(
        self,
        topic: TopicName,
        message: pulsar.Message,
        properties: dict[str, str],
        deliver_after: timedelta | None,
    ) -> pulsar.MessageId:
        original = cast("InMemoryMessage", message)
        copy = InMemoryMessage(
            topic, original.id, original.content, original.published,
            properties, original.key, original.order, original.event_time,
        )  # fmt: skip
        return self._broker.store(topic, copy, deliver_after)

    def close(self) -> None:
        """Nothing was opened."""


class _Incoming:
    def __init__(self, broker: InMemoryBroker) -> None:
        self._broker = broker
        self._paused = False
        self._stopped = False
        self._again: list[tuple[datetime, int, pulsar.Message]] = []
        self._numbers = itertools.count()

    def take(self, timeout: float | None = None) -> pulsar.Message | None:
        if self._stopped:
            raise ConsumerStoppedError(
                "this consumer was stopped", remedy="make a new one to go on consuming"
            )
        within = None if timeout is None else timedelta(seconds=timeout)
        message = None if self._paused else self._next(within)
        if message is not None:
            return message
        if within is None:
            raise NothingLeftError(
                "no message will ever come",
                got="paused" if self._paused else "empty topics",
                remedy="send one before, or wait with a time-out",
            )
        self._broker.clock.advance(within)
        return None

    def _next(self, within: timedelta | None) -> pulsar.Message | None:
        clock, theirs = self._broker.clock, self._broker.next_due()
        if not self._again or (theirs is not None and theirs < self._again[0][0]):
            return self._broker.hand_out(self, within)
        due, _, message = self._again[0]
        if within is not None and due > clock.now() + within:
            return None
        heapq.heappop(self._again)
        clock.advance(due - clock.now())
        return message

    def again(self, message: pulsar.Message, seconds: float) -> None:
        due = self._broker.clock.now() + timedelta(seconds=seconds)
        heapq.heappush(self._again, (due, next(self._numbers), message))

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self, seconds: float) -> None:
        self._broker.clock.advance(timedelta(seconds=seconds))

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        self.stop()
        self._broker.take_back(self)
