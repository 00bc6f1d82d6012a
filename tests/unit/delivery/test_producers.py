"""Races of sends, slow openings and closing, which no broker can be made to repeat."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pulsar
import pytest

from redrive.delivery import forwarder as module
from redrive.delivery.concurrency import Deadline
from redrive.delivery.forwarder import Producers
from redrive.messages import NotSentError
from redrive.policy.naming import TopicName
from tests.support.fake_topics import FakeProducer, FakeTopics, Fate
from tests.support.waiting import wait_until

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
OTHER = TopicName("shop", "prod", "orders-fulfilment-DLQ")


class Message:
    """As much of a message as a hop looks at."""

    def __init__(self, number: int = 0, key: str = "") -> None:
        self._number = number
        self._key = key

    def has_null_value(self) -> bool:
        return False

    def data(self) -> bytes:
        return b"%d" % self._number

    def topic_name(self) -> str:
        return "persistent://shop/prod/orders"

    def message_id(self) -> pulsar.MessageId:
        return pulsar.MessageId(-1, 1, self._number)

    def partition_key(self) -> str:
        return self._key

    def ordering_key(self) -> str:
        return ""

    schema_version = ordering_key

    def event_timestamp(self) -> int:
        return 0


def send(
    producers: Producers, number: int = 0, topic: TopicName = TOPIC, key: str = ""
) -> pulsar.MessageId | None:
    return producers.send(topic, cast("pulsar.Message", Message(number, key)), {}, None)


def scripted(fates: Iterable[Fate], *, partitions: int = 0) -> FakeTopics:
    script = itertools.chain(fates, itertools.repeat(Fate.STORED))
    return FakeTopics(lambda: next(script), partitions=partitions)


@pytest.mark.parametrize("partitions", [0, 3])
def test_hop_sent_again_keeps_its_identity(partitions: int) -> None:
    """While others are sent, before and after it, by the same consumer."""
    topics = scripted([Fate.STORED, Fate.UNANSWERED, Fate.UNANSWERED], partitions=partitions)
    producers = Producers(topics.as_pulsar(), name="c")
    send(producers, 0)
    for number in (1, 2):
        with pytest.raises(NotSentError):
            send(producers, number)
    assert send(producers, 3) is not None
    assert [send(producers, number) for number in (2, 1)] == [None, None]
    assert send(producers, 4) is not None
    producers.close(Deadline(10))
    assert topics.contents == [b"0", b"1", b"2", b"3", b"4"]


def test_hop_that_was_refused_is_not_taken_for_stored() -> None:
    topics = scripted([Fate.STORED, Fate.REFUSED])
    producers = Producers(topics.as_pulsar(), name="c")
    send(producers, 0)
    with pytest.raises(NotSentError):
        send(producers, 1)
    send(producers, 2)  # a higher sequence id under the same name would hide the first
    assert send(producers, 1) is not None
    producers.close(Deadline(10))
    assert topics.contents == [b"0", b"2", b"1"]


def test_hop_to_a_partition_that_is_gone_goes_to_another() -> None:
    topics = scripted([Fate.REFUSED], partitions=2)
    producers = Producers(topics.as_pulsar(), name="c")
    with pytest.raises(NotSentError):
        send(producers)
    topics.partitions = 0
    send(producers)
    assert [copy.topic for copy in topics.stored] == [str(TOPIC)]
    producers.close(Deadline(10))


def test_messages_of_a_key_share_the_partition_that_java_chooses() -> None:
    topics = scripted([], partitions=4)
    producers = Producers(topics.as_pulsar(), name="c")
    for number, key in enumerate(["customer-7", "größe", "\N{GRINNING FACE}", "customer-7"]):
        send(producers, number, key=key)
    for number in range(4, 8):
        send(producers, number)
    producers.close(Deadline(10))
    partitions = [int(copy.topic.rpartition("-")[2]) for copy in topics.stored]
    # "…".hashCode() & Integer.MAX_VALUE of Java: 566298120, 98762257, 1772899
    assert partitions[:4] == [0, 1, 3, 0]
    assert sorted(partitions[4:]) == [0, 1, 2, 3]


def test_idle_producers_beyond_a_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_IDLE", 2)
    topics = scripted([], partitions=4)
    producers = Producers(topics.as_pulsar(), name="c")
    for number in range(12):
        send(producers, number)
    wait_until(lambda: sum(not one.closed.is_set() for one in topics.producers) == 2)
    producers.close(Deadline(10))
    assert topics.contents == [b"%d" % number for number in range(12)]
    assert all(one.closed.is_set() for one in topics.producers)


class SlowTopics(FakeTopics):
    """Topics of which TOPIC takes until *go_on* to open a producer."""

    def __init__(self) -> None:
        super().__init__()
        self.opening = threading.Event()
        self.go_on = threading.Event()

    def create_producer(self, topic: str, **options: str) -> FakeProducer:  # type: ignore[override]
        if topic == str(TOPIC):
            self.opening.set()
            assert self.go_on.wait(10)
        return super().create_producer(topic, producer_name=options["producer_name"])


def test_topic_that_is_slow_to_open_keeps_no_other_waiting() -> None:
    topics = SlowTopics()
    producers = Producers(topics.as_pulsar(), name="c")
    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(send, producers, number) for number in range(3)]
        assert topics.opening.wait(10)
        threads.submit(send, producers, 4, OTHER).result(10)
        assert not any(sending.done() for sending in slow)
        topics.go_on.set()
        for sending in slow:
            sending.result(10)
    producers.close(Deadline(10))


def test_producer_that_is_opened_while_all_are_closed_is_closed() -> None:
    topics = SlowTopics()
    producers = Producers(topics.as_pulsar(), name="c")
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(send, producers)
        assert topics.opening.wait(10)
        producers.close(Deadline(10))
        topics.go_on.set()
        with pytest.raises(NotSentError, match="a consumer that is closed"):
            sending.result(10)
    with pytest.raises(NotSentError, match="a consumer that is closed"):
        send(producers)
    (opened,) = topics.producers
    assert opened.closed.wait(10)
    assert topics.stored == []


def test_sends_share_one_question_for_partitions() -> None:
    asked, go_on = threading.Event(), threading.Event()
    questions: list[str] = []

    class Refusing(FakeTopics):
        def get_topic_partitions(self, topic: str) -> list[str]:
            questions.append(topic)
            asked.set()
            assert go_on.wait(10)
            raise pulsar.ConnectError

    producers = Producers(Refusing().as_pulsar(), name="c")
    with ThreadPoolExecutor() as threads:
        sending = [threads.submit(send, producers, number) for number in range(4)]
        assert asked.wait(10)
        while any(not one.running() for one in sending):
            threading.Event().wait(0.01)
        go_on.set()
        for one in sending:
            with pytest.raises(NotSentError):
                one.result(10)
    assert questions == [str(TOPIC)]
    producers.close(Deadline(10))


def test_stopped_consumer_waits_once_for_a_refusing_topic() -> None:
    sends: list[str] = []

    class Unanswering(FakeTopics):
        def create_producer(self, topic: str, **_options: object) -> FakeProducer:
            sends.append(topic)
            raise pulsar.Timeout

    producers = Producers(Unanswering().as_pulsar(), name="c")

    def fail(topic: TopicName) -> None:
        with pytest.raises(NotSentError):
            send(producers, topic=topic)

    fail(TOPIC)
    fail(TOPIC)
    producers.stop()
    for topic in (TOPIC, TOPIC, OTHER, OTHER):
        fail(topic)
    assert sends == [str(TOPIC)] * 3 + [str(OTHER)]
    producers.close(Deadline(10))
