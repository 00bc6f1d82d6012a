"""The cost of an outage with 1,000 messages per second: an hour in memory, minutes at a broker.

Also the cost of a dependency that fails occasionally, which is no outage. In memory, time is
virtual and the consumer is the real one.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pulsar

from redrive import Event, Policy, RetryConsumer
from redrive.delivery.reporting import Name
from redrive.policy.model import OutageLimits
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import InMemoryConsumer
from sandbox.pulsar import SUPERUSER
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy

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


UP_SECONDS = 5.0
DOWN_SECONDS = 120.0
DRAIN_SECONDS = 300.0
CONSUMERS = 2
WORKERS = 4


def test_two_minutes_without_the_dependency(
    provision_policy: Callable[..., Any], figures: list[Figure]
) -> None:
    provisioned: ProvisionedPolicy = provision_policy()
    policy = replace(provisioned.policy, outage_breaker=OutageLimits())
    handled: list[tuple[bytes, float]] = []
    down = threading.Event()

    def handle(message: pulsar.Message) -> None:
        if down.is_set():
            raise ConnectionError
        handled.append((message.data(), time.monotonic()))

    events: list[list[Event]] = [[] for _ in range(CONSUMERS)]
    with ExitStack() as closing:
        consumers = [
            closing.enter_context(
                RetryConsumer(provisioned.client(provisioned.role), policy, on_event=mine.append)
            )
            for mine in events
        ]
        runs = [
            threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": WORKERS})
            for consumer in consumers
        ]
        for run in runs:
            run.start()
        produce(provisioned, 0, UP_SECONDS)
        down.set()
        produce(provisioned, UP_SECONDS, DOWN_SECONDS)
        down.clear()
        back = time.monotonic()
        sent = {b"%d" % number for number in range(int((UP_SECONDS + DOWN_SECONDS) * PER_SECOND))}
        while len({data for data, _ in handled}) < len(sent):
            if time.monotonic() > back + DRAIN_SECONDS:
                break
            time.sleep(1)
        for consumer in consumers:
            consumer.stop()
        for run in runs:
            run.join()
    times = Counter(data for data, _ in handled)
    names = [Counter(event.event for event in mine) for mine in events]
    first = min((at for _, at in handled if at >= back), default=back + DRAIN_SECONDS)
    burnt = max(count[Name.ATTEMPT_FAILED] for count in names)
    dead = sum(count[Name.DEAD_LETTERED] for count in names)
    rows = (
        ("attempts burnt by a consumer", burnt, "", 100, None),
        ("dead letters", dead, "", 0, None),
        ("resumed after", first - back, "s", 60, None),
        ("messages not handled", len(sent - times.keys()), "", 0, 0),
        ("messages handled twice", times.total() - len(times), "", 0, 0),
        ("messages left in the topics", provisioned.unsettled(), "", 0, 0),
    )
    name = "two minutes of outage at a broker, 1 000 messages a second"
    figures += [Figure(name, *row) for row in rows]


def produce(provisioned: ProvisionedPolicy, after: float, seconds: float) -> None:
    """Send the messages of *seconds* at the benchmark's rate."""
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic), block_if_queue_full=True
    )
    began = time.monotonic()
    for number in range(int(seconds * PER_SECOND)):
        time.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))
        producer.send_async(b"%d" % (after * PER_SECOND + number), lambda *_: None)
    producer.flush()
    producer.close()
