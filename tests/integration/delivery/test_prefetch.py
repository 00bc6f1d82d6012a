"""What waits in a consumer is as much as it was given, and the rest goes to others."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pulsar
import pytest

from redrive import RetryConsumer
from redrive.delivery.receiving import queue_length
from redrive.delivery.receiving.queue_length import LONG, SHORT, QueuedSubscription
from redrive.errors import InvalidSpecError
from redrive.policy.model import SubscriptionType
from sandbox.pulsar import SUPERUSER
from tests.support.provisioned_policy import ProvisionedPolicy

ProvisionPolicy = Callable[..., Any]

KEYS = 20


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end, "it was not reached"
        time.sleep(0.1)


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
def test_a_consumer_that_joins_gets_what_a_busy_one_has_not_begun(
    provision_policy: ProvisionPolicy, kind: SubscriptionType
) -> None:
    provisioned = provision_policy(kind=kind)
    busy, go_on = provisioned.consumer(prefetch=4), threading.Event()
    held: list[bytes] = []

    def hold(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        held.append(message.data())
        go_on.wait(60)

    running = threading.Thread(target=busy.run, args=(hold,), kwargs={"workers": 2})
    running.start()
    for number in range(200):
        provisioned.send(b"%d" % number, partition_key=f"{number}")
        if number == 0:
            wait_until(lambda: bool(held))
    joined = provisioned.consumer()
    found = []
    while message := joined.receive(timedelta(seconds=3)):
        found.append(message.data())
        joined.acknowledge(message)
    go_on.set()
    wait_until(lambda: provisioned.backlog(provisioned.policy.topic) == 0)
    busy.close()
    running.join(30)
    assert len(found) > 50  # of a key-shared subscription, about half of the keys are another's
    assert sorted([*found, *held]) == sorted(b"%d" % number for number in range(200))


def produce(provisioned: ProvisionedPolicy, count: int, *, batched: bool = False) -> None:
    """Produce so many messages, fast."""
    client = provisioned.client(SUPERUSER)
    producer = client.create_producer(
        str(provisioned.policy.topic), batching_enabled=batched, block_if_queue_full=True
    )
    for number in range(count):
        producer.send_async(b"%d" % number, lambda *_: None, partition_key=f"{number % KEYS}")
    producer.flush()


class Handlings:
    """What the handlers of two consumers were given, in that order; those of the first are slow."""

    def __init__(self, seconds: float, *, after: int = 0) -> None:
        self.slow: list[int] = []
        self.helped: list[int] = []
        self.all: list[int] = []
        self.redelivered: list[int] = []
        self.recovered = threading.Event()
        self._seconds, self._after = seconds, after

    def handle(self, message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        number = self._begin(message)
        if len(self.all) > self._after and not self.recovered.is_set():
            self.slow.append(number)
            self.recovered.wait(self._seconds)

    def help_out(self, message: Any) -> None:  # noqa: ANN401
        self.helped.append(self._begin(message))

    def _begin(self, message: Any) -> int:  # noqa: ANN401
        number = int(message.data())
        self.all.append(number)
        if message.redelivery_count():
            self.redelivered.append(number)
        return number

    def assert_each_once(self, count: int) -> None:
        assert sorted(self.all) == list(range(count))
        assert self.redelivered == []

    def assert_keys_in_order(self) -> None:
        for key in range(KEYS):
            of_key = [number for number in self.all if number % KEYS == key]
            assert of_key == sorted(of_key)


@contextlib.contextmanager
def running(consumer: RetryConsumer, handle: Callable[..., None], workers: int) -> Iterator[None]:
    thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": workers})
    thread.start()
    try:
        yield
    finally:
        consumer.close()
        thread.join(30)


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
def test_a_consumer_that_joins_a_slow_one_gets_the_greater_part(
    provision_policy: ProvisionPolicy, kind: SubscriptionType
) -> None:
    provisioned, count, found = provision_policy(kind=kind), 200, Handlings(1)
    produce(provisioned, count)
    with running(provisioned.consumer(), found.handle, 1):
        wait_until(lambda: len(found.slow) > 0)
        with running(provisioned.consumer(), found.help_out, 1):
            # Of a key-shared subscription, some keys are the first one's.
            greater = count / 2 if kind is SubscriptionType.SHARED else count / 4
            wait_until(lambda: len(found.helped) > greater)
            assert len(found.slow) < 20  # of a second each
            found.recovered.set()
            wait_until(lambda: len(found.all) >= count)
    found.assert_each_once(count)
    if kind is SubscriptionType.KEY_SHARED:
        found.assert_keys_in_order()
    assert provisioned.unsettled() == 0


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
@pytest.mark.parametrize("partitions", [0, 2])
@pytest.mark.parametrize("workers", [1, 4])
def test_what_waits_in_a_consumer_whose_handlers_become_slow_goes_to_those_who_join(
    provision_policy: ProvisionPolicy, kind: SubscriptionType, partitions: int, workers: int
) -> None:
    provisioned, fast, count = provision_policy(kind=kind, partitions=partitions), 10_000, 14_000
    found = Handlings(1, after=fast)
    with running(provisioned.consumer(), found.handle, workers):
        produce(provisioned, count)
        wait_until(lambda: len(found.slow) > 0)
        with running(provisioned.consumer(), found.help_out, 1):
            if kind is SubscriptionType.SHARED:
                wait_until(lambda: len(found.helped) > count - fast - 500)
            else:  # the first one's keys stay its own
                wait_until(lambda: len(found.slow) > 12)
            found.recovered.set()
            wait_until(lambda: len(found.all) >= count)
    found.assert_each_once(count)
    if kind is SubscriptionType.KEY_SHARED and workers == 1:
        found.assert_keys_in_order()
    assert provisioned.unsettled(partitions) == 0


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.KEY_SHARED])
@pytest.mark.parametrize("workers", [1, 4])
def test_nothing_is_handled_twice_however_often_the_queue_changes(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    kind: SubscriptionType,
    workers: int,
) -> None:
    changes: list[int] = []

    def exchange(
        queue: QueuedSubscription, consumer: pulsar.Consumer, length: int
    ) -> pulsar.Consumer:
        changes.append(length)
        return unchanged(queue, consumer, length)

    unchanged = QueuedSubscription.exchange
    monkeypatch.setattr(QueuedSubscription, "exchange", exchange)
    monkeypatch.setattr(queue_length, "_SLOW", math.inf)
    monkeypatch.setattr(queue_length, "_SLOW_SECONDS", 0)
    monkeypatch.setattr(queue_length, "_FAST", 0)
    provisioned, count = provision_policy(kind=kind, partitions=2), 8_000
    found = Handlings(0.001)
    produce(provisioned, count)
    with running(provisioned.consumer(), found.handle, workers):
        wait_until(lambda: len(found.all) >= count)
    assert {SHORT, LONG} <= set(changes)
    found.assert_each_once(count)
    if kind is SubscriptionType.KEY_SHARED and workers == 1:
        found.assert_keys_in_order()
    assert provisioned.unsettled(2) == 0


@pytest.mark.parametrize("partitions", [0, 2])
def test_nothing_of_a_batch_is_handled_twice_by_a_slow_consumer(
    provision_policy: ProvisionPolicy, partitions: int
) -> None:
    provisioned, count, found = provision_policy(partitions=partitions), 1_000, Handlings(0.05)
    produce(provisioned, count, batched=True)
    with running(provisioned.consumer(), found.handle, 1):
        wait_until(lambda: len(found.slow) > 200)  # at most 20 a second
        found.recovered.set()
        wait_until(lambda: len(found.all) >= count)
    found.assert_each_once(count)


def test_partitions_share_one_bound(provision_policy: ProvisionPolicy) -> None:
    provisioned = provision_policy(partitions=4)
    consumer = provisioned.consumer(prefetch=20)
    provisioned.send(*[b"%d" % number for number in range(200)])
    time.sleep(2)
    joined = provisioned.consumer()
    found = 0
    while message := joined.receive(timedelta(seconds=3)):
        found += 1
        joined.acknowledge(message)
    # The client has a queue of each partition and one of all.
    assert 200 - 2 * 20 <= found <= 200 - 20
    consumer.close()


@pytest.mark.parametrize("prefetch", [0, -1])
def test_a_consumer_without_room_for_a_message_is_refused(
    provision_policy: ProvisionPolicy, prefetch: int
) -> None:
    with pytest.raises(InvalidSpecError, match="prefetch"):
        provision_policy().consumer(prefetch=prefetch)
