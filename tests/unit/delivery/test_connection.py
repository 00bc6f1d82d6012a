"""Renewals of a subscription whose consumer has lost its permits, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from redrive.delivery import connection
from redrive.delivery.arrivals import LARGEST_BATCH, Arrivals
from redrive.delivery.connection import MAX_HELD_PERMITS, Renewal

PERMITS = 100


class Clock:
    """Virtual time: a sleep only adds to it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(connection, "time", clock)
    return clock


class Opened:
    """A consumer of the client, with the one of C++ that it refers to."""

    def __init__(self, added: int, last: int) -> None:
        self.added, self.last = added, last
        self._consumer = SimpleNamespace(close=lambda: self.closed.append(self), opened=self)
        self.closed: list[Opened] = []

    def topic(self) -> str:
        return "orders"

    def close(self) -> None:
        self._consumer.close()

    def get_last_message_id(self) -> pulsar.MessageId:
        if self.last < 0:
            raise pulsar.OperationNotSupported
        return pulsar.MessageId(-1, 1, self.last, -1)


class Broker:
    """Subscriptions as a broker opens them: *refuses* so many times."""

    def __init__(self, last: int) -> None:
        self.last, self.refuses = last, 0
        self.closed: list[Opened] = []
        self.opened: list[Opened] = []

    def open(self, added: int) -> Any:  # noqa: ANN401 - a consumer
        if self.refuses:
            self.refuses -= 1
            raise pulsar.ConsumerBusy
        opened = Opened(added, self.last)
        opened.closed = self.closed
        self.opened.append(opened)
        return opened


def renewing(broker: Broker, received: int = 7, **traits: Any) -> Renewal:  # noqa: ANN401
    arrivals = Arrivals("orders")
    if received >= 0:
        message: Any = SimpleNamespace(message_id=lambda: pulsar.MessageId(-1, 1, received, -1))
        arrivals.one(message)
    options = {"overlaps": True, "takes_turns": False} | traits
    return Renewal(broker.open(0), arrivals, broker.open, permits=PERMITS, **options)


def undecryptable(messages: int, entry: int = 8) -> Any:  # noqa: ANN401 - a message
    return SimpleNamespace(
        encryption_context=lambda: SimpleNamespace(
            is_decryption_failed=lambda: True, batch_size=lambda: messages
        ),
        message_id=lambda: pulsar.MessageId(-1, 1, entry, -1),
        topic_name=lambda: "orders",
    )


def renew(one: Renewal, *, closing: Callable[[], bool] = lambda: False) -> None:
    one.renew(closing, lambda: None)


def seconds_until_due(one: Renewal, clock: Clock) -> float:
    began = clock.now
    while not one.is_due():
        clock.now += 1
        assert clock.now < began + 10_000
    return clock.now - began


def test_pauses_between_renewals_double_to_an_hour(clock: Clock) -> None:
    one, pauses = renewing(Broker(last=8)), []
    for _ in range(9):
        pauses.append(seconds_until_due(one, clock))
        renew(one)
    assert pauses == [60, 60, 120, 240, 480, 960, 1_920, 3_600, 3_600]


def test_renewal_with_an_effect_is_followed_by_one_soon(clock: Clock) -> None:
    one = renewing(Broker(last=8))
    clock.now += 60
    renew(one)
    clock.now += 1
    assert one.had_effect()
    assert one.is_due()
    renew(one)
    clock.now += 2
    assert not one.had_effect()
    assert seconds_until_due(one, clock) == 58


@pytest.mark.parametrize(
    ("last", "received", "takes_turns", "is_due"),
    [
        (8, 7, False, True),
        (7, 7, False, False),
        (-1, 7, False, True),  # partitions: the client does not know
        (8, -1, False, True),
        (8, -1, True, False),  # maybe inactive
        (8, 7, True, True),
    ],
)
def test_only_a_consumer_behind_its_topic_is_renewed(
    clock: Clock, last: int, received: int, *, takes_turns: bool, is_due: bool
) -> None:
    one = renewing(Broker(last), received, takes_turns=takes_turns)
    clock.now += 60
    assert one.is_due() is is_due


def test_permits_of_small_entries_are_added(clock: Clock) -> None:
    broker = Broker(last=8)
    one = renewing(broker)
    entries = [undecryptable(LARGEST_BATCH, entry) for entry in range(11)]
    assert all(map(one.withholds, entries))
    assert one.is_due()
    renew(one)
    assert broker.opened[-1].added == 2 * 10 * (LARGEST_BATCH - 1) <= 2 * MAX_HELD_PERMITS
    assert all(map(one.withholds, entries))
    assert not one.is_short
    assert not one.is_due()
    assert clock.now == 1_000


def test_entry_larger_than_a_batch_is_removed(clock: Clock) -> None:
    broker, removed = Broker(last=8), []
    one = renewing(broker)
    one.remove = lambda _, messages: removed.append(messages)
    assert one.withholds(undecryptable(LARGEST_BATCH + 1))
    assert removed == [LARGEST_BATCH + 1]
    assert one.is_due()
    renew(one)
    assert broker.opened[-1].added == 0
    assert not one.is_due()
    assert clock.now == 1_000


def test_exclusive_subscription_is_opened_again_until_closing(clock: Clock) -> None:
    broker = Broker(last=8)
    one = renewing(broker, overlaps=False)
    first = broker.opened[0]
    broker.refuses = 3
    renew(one)
    assert clock.now == 1_003
    assert broker.closed == [first, first]  # the client accepts a second call
    broker.refuses = 9
    renew(one, closing=lambda: clock.now == 1_005)
    assert len(broker.opened) == 2


def test_refused_renewal_leaves_the_consumer_as_it_is(clock: Clock) -> None:
    broker = Broker(last=8)
    one = renewing(broker)
    broker.refuses = 1
    renew(one)
    assert broker.closed == []
    assert len(broker.opened) == 1
    assert clock.now == 1_000
