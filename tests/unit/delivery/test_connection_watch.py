"""Lost connections: reported after a while, and only then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from redrive import Event, Policy, RetryConsumer
from redrive.delivery.fetcher import ConnectionWatch
from redrive.delivery.reporting import Name
from redrive.policy.naming import TopicName
from tests.support.fake_client import FakeClient
from tests.support.waiting import wait_until

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing", name="shop/orders")


@pytest.fixture
def reports() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    moments = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: moments[0])
    yield moments
    monkeypatch.undo()


@pytest.fixture
def watch(reports: list[tuple[str, bool]]) -> ConnectionWatch:
    return ConnectionWatch("orders", 30, lambda topic, back, _: reports.append((topic, back)))


def test_short_loss_of_a_connection_is_not_reported(
    watch: ConnectionWatch, reports: list[tuple[str, bool]], clock: list[float]
) -> None:
    for clock[0], connected in ((0, True), (1, False), (30, False), (31, True), (90, True)):
        watch.check(connected=connected)
    assert reports == []


def test_long_loss_is_reported_once_and_so_is_its_end(
    watch: ConnectionWatch, reports: list[tuple[str, bool]], clock: list[float]
) -> None:
    for clock[0], connected in ((1, False), (31, False), (500, False), (501, True), (502, True)):
        watch.check(connected=connected)
    assert reports == [("orders", False), ("orders", True)]


def test_each_loss_is_reported(reports: list[tuple[str, bool]], clock: list[float]) -> None:
    watch = ConnectionWatch("orders", 0.5, lambda topic, back, _: reports.append((topic, back)))
    for moment, connected in enumerate([False, True] * 3):
        for clock[0] in (moment, moment + 0.5):
            watch.check(connected=connected)
    assert reports == [("orders", False), ("orders", True)] * 3


def test_lost_connection_is_reported_while_all_workers_are_busy() -> None:
    client, events = FakeClient(), list[Event]()
    free = threading.Event()
    with RetryConsumer(
        client.as_pulsar(), POLICY, on_event=events.append, disconnect_timeout=0.1
    ) as consumer:
        running = threading.Thread(
            target=consumer.run, args=(lambda _: free.wait(60),), kwargs={"timeout": 90}
        )
        running.start()
        client.deliver(POLICY.topic, b"x")
        client.wait_until_taken(POLICY.topic)
        assert consumer.connected
        client.connect(POLICY.topic, connected=False)
        assert not consumer.connected
        wait_until(lambda: [event.event for event in events] == [Name.DISCONNECTED])
        client.connect(POLICY.topic, connected=True)
        wait_until(lambda: len(events) == 2)
        free.set()
        consumer.stop()
        running.join()
    assert not consumer.connected
    assert [(event.event, event.topic, event.policy) for event in events] == [
        (Name.DISCONNECTED, str(POLICY.topic), POLICY.name),
        (Name.RECONNECTED, str(POLICY.topic), POLICY.name),
    ]
