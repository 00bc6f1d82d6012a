"""An outage of a dependency of handlers, at a real broker: it uses no retry and loses nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from redrive import Event, RetryConsumer
from redrive.delivery.reporting import Name
from redrive.policy.model import OUTAGE, OutageLimits
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.topics import path
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]

PROBES = 6
"""Failed probes of both consumers before the outage ends."""
CONSUMERS = 2
WORKERS = 4
MESSAGES = 600
LIMITS = OutageLimits(max_probe_interval=timedelta(seconds=2))


class Warehouse:
    """A service on which the handlers of several consumers depend."""

    def __init__(self) -> None:
        self.is_down = True
        self.handled: list[bytes] = []
        self.events: list[Event] = []
        self.done = threading.Event()

    def handle(self, message: pulsar.Message) -> None:
        if self.is_down:
            raise ConnectionError
        self.handled.append(message.data())
        if len(set(self.handled)) == MESSAGES:
            self.done.set()

    def count(self, name: Name) -> int:
        return sum(event.event is name for event in list(self.events))


@pytest.fixture
def warehouse() -> Warehouse:
    return Warehouse()


def paused_causes(provisioned: ProvisionedPolicy) -> list[str]:
    """Return the causes of paused consumers in the statistics of the broker."""
    answer = provisioned.broker.request("GET", f"{path(provisioned.policy.retry_topic)}/stats")
    answer.check("read statistics")
    producers = json.loads(answer.body)["publishers"]
    return [
        producer["metadata"][OUTAGE] for producer in producers if OUTAGE in producer["metadata"]
    ]


def sent(result: pulsar.Result, _id: pulsar.MessageId) -> None:
    assert result == pulsar.Result.Ok


def run_through_an_outage(
    provisioned: ProvisionedPolicy, warehouse: Warehouse, during: Callable[[], None]
) -> None:
    policy = replace(provisioned.policy, outage_breaker=LIMITS)
    producer = provisioned.client("superuser").create_producer(
        str(policy.topic), block_if_queue_full=True
    )
    with ExitStack() as closing:
        consumers = [
            closing.enter_context(
                RetryConsumer(
                    provisioned.client(provisioned.role), policy, on_event=warehouse.events.append
                )
            )
            for _ in range(CONSUMERS)
        ]
        threads = [
            threading.Thread(
                target=consumer.run, args=(warehouse.handle,), kwargs={"workers": WORKERS}
            )
            for consumer in consumers
        ]
        for thread in threads:
            thread.start()
        for number in range(MESSAGES):  # one by one: a batch would go to one consumer
            producer.send_async(f"{number}".encode(), sent)
        producer.flush()
        wait_until(lambda: all(consumer.outages for consumer in consumers))
        wait_until(lambda: paused_causes(provisioned) == ["ConnectionError"] * CONSUMERS)
        during()
        held = warehouse.count(Name.HELD)
        wait_until(lambda: warehouse.count(Name.HELD) >= held + PROBES)
        warehouse.is_down = False
        assert warehouse.done.wait(180), (len(warehouse.handled), [c.in_flight for c in consumers])
        wait_until(lambda: paused_causes(provisioned) == [])
        wait_until(lambda: provisioned.backlog(policy.retry_topic) == 0)
        for consumer in consumers:
            consumer.stop()
        for thread in threads:
            thread.join()


def test_consumers_pause_for_an_outage_and_resume(
    provision_policy: ProvisionPolicy, warehouse: Warehouse
) -> None:
    provisioned = provision_policy()
    run_through_an_outage(provisioned, warehouse, lambda: None)
    assert warehouse.count(Name.ATTEMPT_FAILED) <= CONSUMERS * LIMITS.window // 2
    assert warehouse.count(Name.OUTAGE_BEGAN) == CONSUMERS
    assert warehouse.count(Name.OUTAGE_ENDED) == CONSUMERS
    assert len(warehouse.handled) == MESSAGES
    assert provisioned.dead_letters(0) == []
    assert provisioned.backlog(provisioned.policy.topic) == 0


def test_outage_continues_after_unloads_of_its_topics(
    provision_policy: ProvisionPolicy, warehouse: Warehouse
) -> None:
    provisioned = provision_policy()

    def unload() -> None:
        for topic in (provisioned.policy.topic, provisioned.policy.retry_topic):
            provisioned.broker.request("PUT", f"{path(topic)}/unload").check(f"unload {topic}")
        wait_until(lambda: paused_causes(provisioned) == ["ConnectionError"] * CONSUMERS)

    run_through_an_outage(provisioned, warehouse, unload)
    assert warehouse.count(Name.ATTEMPT_FAILED) <= CONSUMERS * LIMITS.window // 2
    assert len(set(warehouse.handled)) == MESSAGES
    assert provisioned.dead_letters(0) == []
    assert provisioned.backlog(provisioned.policy.topic) == 0
