"""Bursts of messages, and renewals of a subscription whose consumer has lost its permits."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest

from redrive.delivery import arrivals, connection
from redrive.delivery.arrivals import LARGEST_BATCH, Arrivals, Burst, Run, SettledRuns, place_of
from redrive.delivery.connection import MAX_HELD_PERMITS, Renewal
from redrive.policy.naming import TopicName
from tests.support.fake_client import BurstMessage

Id = tuple[int, int, int]


def message_of(place: Id, partition: int = -1) -> BurstMessage:
    ledger, entry, index = place
    message_id = pulsar.MessageId(partition, ledger, entry, index)
    topic, published = TopicName("shop", "prod", "orders"), datetime(2026, 11, 21, tzinfo=UTC)
    return BurstMessage(topic, message_id, b"", published)


BATCH = [(1, 7, index) for index in range(20, 148)]
ENTRIES = [(1, entry, -1) for entry in range(1_000, 1_100)]  # over the end of a block
BATCHES = [(1, entry, index) for entry in range(10) for index in range(12)]
MIXED = [(1, 1, -1), (1, 2, 0), (1, 2, 1), (1, 3, -1), (1, 4, -1), (1, 6, -1)]


def burst_of(ids: Sequence[Id], arrivals: Arrivals | None = None, partition: int = -1) -> Burst:
    messages = [message_of(one, partition) for one in ids]
    (arrivals or Arrivals("orders")).burst(messages)
    (burst,) = {message.redrive for message in messages}
    return burst


def runs_of(ids: Sequence[Id]) -> list[Run] | None:
    return burst_of(ids).runs


@pytest.mark.parametrize("ids", [BATCH, ENTRIES, BATCHES, MIXED, BATCHES[::2]])
def test_ascending_ids_are_found_exactly(ids: list[Id]) -> None:
    settled = SettledRuns()
    runs = runs_of(ids)
    assert runs is not None
    settled.add(runs, now=0)
    for entry in range(1, 1_110):
        for index in (-1, *range(150)) if entry < 12 else (-1, 0):
            place = 1, entry, index
            assert settled.contains(message_of(place), since=-1) == (place in ids), place
    assert not settled.contains(message_of((2, 7, 20)), since=-1)


@pytest.mark.parametrize("seed", range(100))
def test_random_ascending_ids_are_found_exactly(seed: int) -> None:
    choice = random.Random(seed)  # noqa: S311 - which ids
    ids = [
        (1, entry, index)
        for entry in range(30)
        if choice.random() < 0.8
        for index in ([-1] if choice.random() < 0.5 else range(choice.randrange(12)))
        if choice.random() < 0.97
    ]
    start = choice.randrange(len(ids) - 1)
    ids = ids[start : start + choice.randrange(2, 128)]
    runs = runs_of(ids)
    assert runs is not None
    settled = SettledRuns()
    settled.add(runs, now=0)
    every = [(1, entry, index) for entry in range(31) for index in range(-1, 13)]
    assert [one for one in every if settled.contains(message_of(one), since=-1)] == ids


@pytest.mark.parametrize(
    "ids",
    [BATCH[::-1], [*BATCH, *BATCH], [*ENTRIES[:50], *ENTRIES[40:]]],
    ids=["descending", "repeated", "redelivered"],
)
def test_ids_that_do_not_ascend_have_no_runs(ids: list[Id]) -> None:
    assert runs_of(ids) is None


def test_ids_of_a_batch_are_read_at_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Id] = []

    def note(message_id: pulsar.MessageId) -> Id:
        reads.append(read_place(message_id))
        return reads[-1]

    read_place = arrivals.place_of
    monkeypatch.setattr(arrivals, "place_of", note)
    assert runs_of(BATCH)
    assert len(reads) == 2


@pytest.mark.parametrize(
    ("arrived", "partition", "is_new"),
    [([], -1, True), ([(1, 7, 19)], -1, True), ([(1, 7, 20)], -1, False), ([(1, 7, 20)], 0, False)],
    ids=["first", "later", "repeated", "partition"],
)
def test_burst_above_all_before_contains_no_copy(
    arrived: list[Id], partition: int, *, is_new: bool
) -> None:
    arrivals = Arrivals("orders", queue=max(0, partition + 1))
    for one in arrived:
        arrivals.one(message_of(one, partition))
    for repeat in (False, True):
        burst = burst_of(BATCH, arrivals, partition)
        assert (burst.runs is not None) == (is_new and not repeat)


def test_settled_runs_are_forgotten_by_time_and_number() -> None:
    settled = SettledRuns()
    settled.add([((1, 0), 1)], now=0)
    settled.add([((1, 1), 1)], now=1)
    settled.add([((1, 2), 1)], now=2, received=10)
    assert settled.contains(message_of((1, 0, 0)), since=0)
    assert not settled.contains(message_of((1, 0, 0)), since=0.5)
    assert settled.contains(message_of((1, 1, 0)), since=0.5)
    settled.forget(2.5, 10)
    assert not settled.contains(message_of((1, 1, 0)), since=0)
    assert settled.contains(message_of((1, 2, 0)), since=0)
    settled.forget(2.5, 11)
    assert not settled.contains(message_of((1, 2, 0)), since=0)
    settled.add([((2, entry), 1) for entry in range(arrivals._MAX_BLOCKS)], now=3)  # noqa: SLF001 - the bound
    assert not settled.contains(message_of((1, 1, 0)), since=0)
    assert settled.contains(message_of((2, 1, 0)), since=0)


def test_message_received_alone_is_new_above_all_before() -> None:
    arrivals = Arrivals("orders")
    first, second, copy = (message_of((1, entry, -1)) for entry in (1, 2, 1))
    for message in (first, second, copy):
        arrivals.one(message)
    assert first.redrive is second.redrive
    assert first.redrive.alone
    assert not hasattr(copy, "redrive")


def test_partitions_have_an_order_each() -> None:
    arrivals = Arrivals("orders", queue=10)
    ids = [(ledger, entry, -1) for entry in range(20) for ledger in (7, 3)]
    messages = [message_of(one, partition=one[0] == 7) for one in ids]
    arrivals.burst(messages)
    (burst,) = {message.redrive for message in messages}
    assert burst.runs is not None
    for one, is_new in (((3, 20, -1), True), ((7, 19, -1), False), ((8, 0, -1), True)):
        message = message_of(one, partition=one[0] >= 7)
        arrivals.one(message)
        assert message.redrive.alone == is_new
    assert arrivals.received == len(ids) + 3


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("in_bursts", [False, True])
def test_connection_is_not_older_than_a_queue_of_messages(
    *, batched: bool, in_bursts: bool
) -> None:
    now, queue = 0, 80 + LARGEST_BATCH * batched
    arrivals = Arrivals("orders", queue=80, monotonic=lambda: float(now))

    def arrive(entry: int) -> Burst:
        message = message_of((1, entry, 0 if batched else -1), partition=0)
        if in_bursts:
            arrivals.burst([message])
        else:
            arrivals.one(message)
        return message.redrive

    for now in range(3 * queue):
        arrive(now)
    again = arrive(1)
    assert again.delivered_after is not None
    assert 2 * queue - 12 <= again.delivered_after <= 2 * queue
    now += queue
    assert arrive(2).delivered_after == again.delivered_after  # of the same connection
    arrivals.was_empty(now)
    assert arrive(1).delivered_after == now


@pytest.mark.parametrize("queue", [0, 9])
def test_several_workers_note_messages_of_a_partition(queue: int) -> None:
    """The highest id never falls, and marks are read while others are added."""
    noted = Arrivals("orders", queue=queue)
    forward = [message_of((1, entry, -1)) for entry in range(1, 5_000)]
    again = [message_of((1, 0, -1))] * len(forward)

    def note(received: Sequence[BurstMessage]) -> None:
        for message in received:
            noted.one(message)
            assert noted.highest >= place_of(message.message_id())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as workers:
            list(workers.map(note, [forward, again, again, again]))  # raises an error of a worker
    finally:
        sys.setswitchinterval(interval)
    assert noted.received == 4 * len(forward)


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
