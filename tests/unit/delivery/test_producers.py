"""`RetryProducer`, and sends whose receipts are lost, refused or wrong."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive import AsyncRetryProducer, RetryProducer
from redrive.delivery.concurrency import SendWatchdog
from redrive.delivery.sender import PartitionSender, open_producer
from redrive.errors import InvalidSpecError
from redrive.policy.naming import partition_of_key
from tests.support.fake_client import FakeTopics, Fate

CLIENT = cast("pulsar.Client", None)  # no test uses it


@pytest.mark.parametrize(
    ("choice", "wrong"),
    [
        ({"send_retries": -1}, "send_retries"),
        ({"timeout": timedelta()}, "time-out"),
        ({"in_flight": 0}, "in_flight"),
        ({"in_flight": "3"}, "in_flight"),
    ],
)
async def test_invalid_producer_option_is_refused(choice: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match=wrong):
        RetryProducer(CLIENT, "orders", **choice)
    with pytest.raises(InvalidSpecError, match=wrong):
        async with AsyncRetryProducer(CLIENT, "orders", **choice):
            raise AssertionError


async def test_async_producer_before_async_with_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="async with"):
        await AsyncRetryProducer(CLIENT, "orders").send(b"x")


class Stuck:
    """A client whose first producer never answers, as during an endless reconnection."""

    def __init__(self) -> None:
        self.made: list[StuckProducer] = []

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, _topic: str, *, producer_name: str, **_options: object) -> object:
        self.made.append(StuckProducer(producer_name, answers=bool(self.made)))
        return self.made[-1]


class StuckProducer:
    """Its producer. It sends in the caller's thread: other ways leak in the client."""

    def __init__(self, name: str, *, answers: bool) -> None:
        self.name = name
        self.sent: list[int] = []
        self._answers = answers
        self._closed = threading.Event()

    def topic(self) -> str:
        return "orders"

    def last_sequence_id(self) -> int:
        return -1

    def send(self, _content: bytes, *, sequence_id: int, **_fields: object) -> pulsar.MessageId:
        self.sent.append(sequence_id)
        if not self._answers:
            assert self._closed.wait(60)
            raise pulsar.AlreadyClosed
        return pulsar.MessageId(-1, 5, sequence_id)

    def close(self) -> None:
        if self._closed.is_set():
            raise pulsar.AlreadyClosed
        self._closed.set()


def test_hung_send_is_repeated_with_the_same_sequence_id() -> None:
    client, others = Stuck(), set(threading.enumerate())
    with RetryProducer(
        cast("pulsar.Client", client), "orders", timeout=timedelta(milliseconds=10)
    ) as producer:
        ids = [producer.send(b"1"), producer.send(b"2")]
    given_up, used = client.made
    assert given_up.name == used.name
    first, second = used.sent
    assert given_up.sent == [first]
    assert ids == [pulsar.MessageId(-1, 5, first), pulsar.MessageId(-1, 5, second)]
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
        assert not thread.is_alive()


async def test_cancelled_opening_leaves_no_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entering, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    opened = RetryProducer(cast("pulsar.Client", Stuck()), "orders")
    close = opened.close

    def close_and_tell() -> None:
        close()
        closed.set()

    monkeypatch.setattr(opened, "close", close_and_tell)

    def open_slowly() -> RetryProducer:
        entering.set()
        go_on.wait(30)
        return opened

    producer = AsyncRetryProducer(CLIENT, "orders")
    monkeypatch.setattr(producer, "_open", open_slowly)
    task = asyncio.create_task(producer.__aenter__())
    await asyncio.to_thread(entering.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert await asyncio.to_thread(closed.wait, 30)


TOPIC = "orders"


def sender(topics: FakeTopics, *, chunked: bool = False) -> PartitionSender:
    def make(name: str) -> pulsar.Producer:
        return open_producer(topics.as_pulsar(), TOPIC, name, {})

    return PartitionSender(make, "shop", SendWatchdog(), chunked=chunked)


def send_until_stored(sending: PartitionSender, content: str) -> pulsar.MessageId | None:
    sending.begin()
    while True:
        with suppress(pulsar.exceptions.PulsarException):
            return sending.send(content, {}, 30)


@given(
    fates=st.lists(st.sampled_from(Fate), max_size=30),
    deduplicates=st.booleans(),
    chunked=st.booleans(),
)
def test_message_reported_as_stored_is_stored(
    *, fates: list[Fate], deduplicates: bool, chunked: bool
) -> None:
    script = itertools.chain(fates, itertools.repeat(Fate.STORED))
    topics = FakeTopics(lambda: next(script))
    topics.deduplicates = deduplicates
    sending = sender(topics, chunked=chunked)
    sent = [f"m{number}" for number in range(5)]
    for content in sent:
        send_until_stored(sending, content)
    sending.end()
    copies = Counter(topics.contents)
    assert set(copies) == set(sent)
    if deduplicates and not chunked and not {Fate.FORGOTTEN, Fate.CONTRADICTED} & set(fates):
        assert copies == Counter(sent)


def test_lost_receipt_is_proven_by_the_last_sequence_id() -> None:
    script = iter([Fate.STORED, Fate.UNANSWERED, Fate.STORED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    sending = sender(topics)
    assert send_until_stored(sending, "m1") is not None
    assert send_until_stored(sending, "m2") is None
    assert send_until_stored(sending, "m3") is not None
    sending.end()
    assert topics.contents == ["m1", "m2", "m3"]
    assert {producer.name for producer in topics.producers} == {"shop"}
    assert all(producer.closed.is_set() for producer in topics.producers)


def test_contradicted_receipt_changes_the_producer_name() -> None:
    script = iter([Fate.CONTRADICTED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    assert send_until_stored(sender(topics), "m1") is not None
    assert topics.contents == ["m1"]
    assert [copy.producer for copy in topics.stored] == ["shop.2"]


def test_receipt_without_entry_is_no_proof() -> None:
    topics = FakeTopics(lambda: Fate.CONTRADICTED)
    sending = sender(topics)
    sending.begin()
    with pytest.raises(pulsar.exceptions.PulsarException, match="prove nothing"):
        sending.send("m1", {}, 30)
    assert topics.stored == []


def test_id_of_another_client_under_the_name_is_no_proof() -> None:
    topics = FakeTopics()
    sending = sender(topics)
    send_until_stored(sending, "m1")
    sending.close()
    topics.last[TOPIC, "shop"] += 1
    send_until_stored(sending, "m2")
    assert topics.contents == ["m1", "m2"]


def test_unsent_message_leaves_a_taken_name_at_once() -> None:
    topics = FakeTopics()
    topics.taken.add("shop")
    assert send_until_stored(sender(topics), "m1") is not None
    assert [copy.producer for copy in topics.stored] == ["shop.2"]


def test_message_in_doubt_leaves_a_taken_name_later(monkeypatch: pytest.MonkeyPatch) -> None:
    script = iter([Fate.UNANSWERED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    sending = sender(topics)
    sending.begin()
    with pytest.raises(pulsar.Timeout):
        sending.send("m1", {}, 30)
    topics.taken.add("shop")
    for seconds in (60.0, 60.0, 0.0):
        monkeypatch.setattr("redrive.delivery.sender._NAME_SECONDS", seconds)
        with pytest.raises(pulsar.ProducerBusy):
            sending.send("m1", {}, 30)
    assert sending.send("m1", {}, 30) is not None
    assert [copy.producer for copy in topics.stored] == ["shop", "shop.2"]


def test_chunked_message_without_receipt_gets_another_name() -> None:
    """The broker recognises the last chunk alone: it proves nothing about the others."""
    script = iter([Fate.UNANSWERED, Fate.STORED])
    topics = FakeTopics(lambda: next(script))
    assert send_until_stored(sender(topics, chunked=True), "large") is not None
    assert [copy.producer for copy in topics.stored] == ["shop", "shop.2"]


@pytest.mark.parametrize("key", ["", "customer-7"])
def test_repeated_send_keeps_its_partition_when_some_are_added(key: str) -> None:
    def lose_receipt() -> Fate:
        topics.fate, topics.partitions = lambda: Fate.STORED, 4
        return Fate.UNANSWERED

    topics = FakeTopics(lose_receipt, partitions=2)
    with RetryProducer(topics.as_pulsar(), "orders") as producer:
        assert producer.send(b"1", partition_key=key) is None
    partition = f"orders-partition-{partition_of_key(key, 2)}"
    assert [(copy.topic, copy.content) for copy in topics.stored] == [(partition, b"1")]


def test_added_partitions_are_used_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redrive.delivery.retry_producer.in_background", lambda call: call())
    topics = FakeTopics(partitions=2)
    with RetryProducer(topics.as_pulsar(), "orders") as producer:
        topics.partitions = 4
        assert to_partitions(producer) == {0, 1}
        monkeypatch.setattr("redrive.delivery.retry_producer.PARTITIONS_SECONDS", -1)
        assert to_partitions(producer) == {0, 1, 2, 3}


def to_partitions(producer: RetryProducer) -> set[int]:
    """Send messages with and without keys; return their partitions, which are those of the keys."""
    keyed = {}
    for key in map(str, range(20)):
        receipts = [producer.send(b"x", partition_key=key) for _ in range(2)]
        (keyed[key],) = {receipt.partition() for receipt in receipts if receipt}
    turns = {receipt.partition() for _ in range(8) if (receipt := producer.send(b"x"))}
    assert keyed == {key: partition_of_key(key, len(turns)) for key in keyed}
    return turns


def test_watchdog_ends_each_call_once_at_its_own_limit() -> None:
    given_up: list[str] = []
    ended = threading.Event()

    def give_up() -> None:
        given_up.append("slow")
        ended.set()

    waiting = SendWatchdog()
    began = time.monotonic()
    with waiting.during(600, lambda: given_up.append("later")), waiting.during(0.2, give_up):
        for _ in range(3):
            with waiting.during(60, lambda: given_up.append("quick")):
                pass
        assert ended.wait(30)
        assert time.monotonic() - began >= 0.2
        time.sleep(0.1)
    waiting.close()
    assert given_up == ["slow"]


def test_watchdog_forgets_a_failed_call() -> None:
    given_up: list[str] = []
    waiting = SendWatchdog()
    with pytest.raises(LookupError), waiting.during(0.2, lambda: given_up.append("failed")):
        raise LookupError
    time.sleep(0.4)
    waiting.close()
    assert given_up == []


def test_watchdog_thread_ends_on_close() -> None:
    others = set(threading.enumerate())
    waiting = SendWatchdog()
    with waiting.during(1, lambda: None):
        (ours,) = set(threading.enumerate()) - others
        assert ours.is_alive()
    waiting.close()
    assert not ours.is_alive()
