"""The cost of an outage: 1,000 messages per second, the dependency down for an hour.

Also the cost of a dependency that fails occasionally, which is no outage. In virtual time, with the
real consumer; only the broker is in memory.
"""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pulsar

from redrive import Event, Policy
from redrive.delivery.reporting import Name
from redrive.policy.model import OutageLimits
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import InMemoryConsumer
from tests.benchmarks.figures import Figure

PER_SECOND = 1_000
UP = timedelta(seconds=10)
DOWN = timedelta(hours=1)
AFTER = timedelta(seconds=60)
UNRELIABLE = timedelta(minutes=5)
FAILING = 0.05
POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", outage_breaker=OutageLimits())


class Stream(InMemoryBroker):
    """A broker with a message per millisecond, created when it is delivered."""

    def __init__(self) -> None:
        super().__init__(POLICY)
        self._began = self.clock.now()
        self.sent = 0

    @property
    def _next(self) -> datetime:
        return self._began + timedelta(seconds=self.sent / PER_SECOND)

    def next_due(self) -> datetime | None:
        waiting = super().next_due()
        return self._next if waiting is None else min(waiting, self._next)

    def hand_out(self, consumer: object, within: timedelta | None) -> InMemoryMessage | None:
        waiting = super().next_due()
        if (waiting is None or self._next < waiting) and (
            within is None or self._next <= self.clock.now() + within
        ):
            content = str(self.sent).encode()
            message = InMemoryMessage(POLICY.topic, pulsar.MessageId(-1, 0, 0), content, self._next)
            self.store(POLICY.topic, message, self._next - self.clock.now())
            self.sent += 1
        return super().hand_out(consumer, within)


def test_an_hour_without_the_dependency(figures: list[Figure]) -> None:
    broker, events, handled = Stream(), list[Event](), dict[bytes, datetime]()
    consumer = InMemoryConsumer(POLICY, broker=broker, on_event=events.append)
    began = broker.clock.now()
    back = began + UP + DOWN

    def handle(message: pulsar.Message) -> None:
        now = broker.clock.now()
        if now >= back + AFTER:
            consumer.stop()
        if began + UP <= now < back:
            raise ConnectionError
        broker.clock.advance(timedelta(microseconds=100))
        handled[message.data()] = now

    consumer.run(handle)
    first = min(moment for moment in handled.values() if moment >= back)
    failed = sum(event.event is Name.ATTEMPT_FAILED for event in events)
    in_hand = len(broker.unsettled())
    rows = (
        ("attempts burnt", failed, "", 100, None),
        ("dead letters", len(broker.dead_letters), "", 0, None),
        ("resumed after", (first - back).total_seconds(), "s", 60, None),
        ("messages missing in the account", broker.sent - len(handled) - in_hand, "", 0, 0),
    )
    name = "an hour of outage, 1 000 messages a second"
    figures += [Figure(name, *row) for row in rows]


def test_a_dependency_that_fails_now_and_then(figures: list[Figure]) -> None:
    broker, events, handled = Stream(), list[Event](), 0
    consumer = InMemoryConsumer(POLICY, broker=broker, on_event=events.append)
    end, luck = broker.clock.now() + UNRELIABLE, random.Random(7)  # noqa: S311 - no secret

    def handle(_message: pulsar.Message) -> None:
        nonlocal handled
        if broker.clock.now() >= end:
            consumer.stop()
        if luck.random() < FAILING:
            raise ConnectionError
        handled += 1

    consumer.run(handle)
    names = [event.event for event in events]
    missing = broker.sent - handled - len(broker.dead_letters) - len(broker.unsettled())
    name = "five minutes of a dependency that fails at 5 %"
    figures += [
        Figure(name, "attempts failed", names.count(Name.ATTEMPT_FAILED), ""),
        Figure(name, "pauses", names.count(Name.OUTAGE_BEGAN), "", 0),
        Figure(name, "dead letters", len(broker.dead_letters), "", 0),
        Figure(name, "messages missing in the account", missing, "", 0, 0),
    ]
