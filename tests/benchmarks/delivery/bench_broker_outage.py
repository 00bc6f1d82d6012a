"""The cost of an outage of two minutes at a real broker, with 1,000 messages per second."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pulsar

from redrive import Event, RetryConsumer
from redrive.delivery.reporting import Name
from redrive.policy.model import OutageLimits
from sandbox.pulsar import SUPERUSER
from tests.benchmarks.figures import Figure
from tests.support.provisioned_policy import ProvisionedPolicy

PER_SECOND = 1_000
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
