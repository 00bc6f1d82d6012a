"""What a consumer is put together from, on a broker in memory; called by the others here."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import cast

import pulsar

from redrive.delivery.parts import Parts
from redrive.delivery.receiving.fetcher import ConsumerStoppedError
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage


class NothingLeftError(ConsumerStoppedError):
    """Whoever waited for a message would have waited for ever; `run` returns instead."""

    reason = "NothingLeft"


class InMemoryTopics:
    """What a test does to the topics and the clock of a consumer."""

    broker: InMemoryBroker
    _topic: TopicName

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
        """Put the clock forward: let time pass while no call waits for a message."""
        self.broker.clock.advance(by)


def parts_of(broker: InMemoryBroker, policy: Policy, nack_delay: timedelta) -> Parts:
    """Put together what consumes source and retry topic of *policy*."""
    subscription = _Subscription(broker, nack_delay)
    return Parts(
        broker.clock,
        dict.fromkeys((policy.topic, policy.retry_topic), subscription),
        _Incoming(broker),
        _Outgoing(broker),
    )


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

    def take(
        self, timeout: float | None = None, *, only_again: bool = False
    ) -> pulsar.Message | None:
        if self._stopped:
            raise ConsumerStoppedError(
                "this consumer was stopped", remedy="make a new one to go on consuming"
            )
        clock = self._broker.clock
        end = None if timeout is None else clock.now() + timedelta(seconds=timeout)
        message = None if self._paused else self._next(end, only_again=only_again)
        if message is not None:
            return message
        if end is None:
            raise NothingLeftError(
                "no message will ever come",
                got="paused" if self._paused else "empty topics",
                remedy="send one before, or wait with a time-out",
            )
        clock.advance(end - clock.now())
        return None

    def _next(self, end: datetime | None, *, only_again: bool) -> pulsar.Message | None:
        clock = self._broker.clock
        while clock.fire_next(min([due for due in (end, self._next_due()) if due], default=None)):
            pass  # what rings may send a message that comes earlier
        theirs = None if only_again else self._broker.next_due()
        # What is due again goes before all that waits at the broker, as in a `Fetcher`.
        if self._again and (theirs is None or self._again[0][0] <= max(theirs, clock.now())):
            return self._hand_out_again(end)
        if theirs is None:
            return None
        return self._broker.hand_out(self, None if end is None else end - clock.now())

    def _hand_out_again(self, end: datetime | None) -> pulsar.Message | None:
        due, _, message = self._again[0]
        if end is not None and due > end:
            return None
        heapq.heappop(self._again)
        self._broker.clock.advance(due - self._broker.clock.now())
        return message

    def _next_due(self) -> datetime | None:
        theirs = self._broker.next_due()
        mine = self._again[0][0] if self._again else None
        return min([due for due in (theirs, mine) if due], default=None)

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
