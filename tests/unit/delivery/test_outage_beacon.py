"""A broker that doesn't answer keeps nothing that shows an outage."""

from __future__ import annotations

import queue
import threading
from typing import cast

import pulsar
import pytest

from redrive import Policy
from redrive.delivery import reporting
from redrive.delivery.reporting import OutageBeacon
from redrive.policy.naming import TopicName

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


class Producer:
    """A producer of which a test sees that it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class SilentClient:
    """Its broker answers the first question once *answers* is set, and others at once."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: queue.SimpleQueue[Producer] = queue.SimpleQueue()
        self._silent = True

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, _topic: str, **_options: object) -> Producer:
        producer, silent, self._silent = Producer(), self._silent, False
        self.asked.put(producer)
        if silent:
            assert self.answers.wait(30)
        return producer


def test_an_outage_is_shown_although_the_broker_did_not_answer_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "OPEN_SECONDS", 0.1)
    client = SilentClient()
    beacon = OutageBeacon(cast("pulsar.Client", client), POLICY)
    beacon.show("ConnectionError")
    late = client.asked.get(timeout=30)
    beacon.show("TimeoutError")
    shown = client.asked.get(timeout=30)  # the broker has still not answered the first time
    client.answers.set()
    assert late.closed.wait(30)
    assert not shown.closed.is_set()
    beacon.close()
    assert shown.closed.wait(30)
