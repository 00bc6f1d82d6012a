"""Races of sends, slow openings and closing, which no broker can be made to repeat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pulsar
import pytest

from redrive.copying.errors import NotSentError
from redrive.delivery.bounded import Deadline
from redrive.delivery.retrying.producers import Producers
from redrive.policy.naming import TopicName

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
OTHER = TopicName("shop", "prod", "orders-fulfilment-DLQ")
SOON = Deadline(10)


class Message:
    """As much of a message as a hop looks at."""

    def has_null_value(self) -> bool:
        return True

    def partition_key(self) -> str:
        return ""

    ordering_key = schema_version = partition_key

    def event_timestamp(self) -> int:
        return 0


class Producer:
    """A producer whose sends do what *answer* does."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self.closed = threading.Event()
        self._answer = answer

    def send(self, _content: None, **_options: object) -> None:
        self._answer()

    def close(self) -> None:
        self.closed.set()


def test_a_late_failure_does_not_close_the_producer_made_after_an_earlier_one() -> None:
    """Two sends of one producer fail; what a third thread uses since the first stays open."""
    made: list[Producer] = []
    failing = True

    def send() -> None:
        message = cast("pulsar.Message", Message())
        producers.send(TOPIC, message, {}, None)

    def fail_after_others() -> None:
        nonlocal failing
        if failing:
            failing = False
            with pytest.raises(NotSentError):
                send()  # fails with the same producer, which is given up
            send()  # makes another, and succeeds
        raise pulsar.Timeout

    class Client:
        def create_producer(self, _topic: str, **_options: object) -> Producer:
            made.append(Producer(fail_after_others if not made else lambda: None))
            return made[-1]

    producers = Producers(cast("pulsar.Client", Client()), name="c")
    with pytest.raises(NotSentError):
        send()
    first, second = made
    assert first.closed.wait(10)
    assert not second.closed.is_set()
    producers.close(SOON)
    with pytest.raises(NotSentError, match="a consumer that is closed"):
        send()


class SlowClient:
    """A client whose producers of TOPIC take until *go_on* to be made."""

    def __init__(self) -> None:
        self.made: list[Producer] = []
        self.opening = threading.Event()
        self.go_on = threading.Event()

    def create_producer(self, topic: str, **_options: object) -> Producer:
        if topic == str(TOPIC):
            self.opening.set()
            assert self.go_on.wait(10)
        self.made.append(Producer(lambda: None))
        return self.made[-1]


def test_a_topic_that_is_slow_to_open_keeps_no_other_waiting() -> None:
    client = SlowClient()
    producers = Producers(cast("pulsar.Client", client), name="c")
    message = cast("pulsar.Message", Message())
    with ThreadPoolExecutor() as threads:
        slow = [threads.submit(producers.send, TOPIC, message, {}, None) for _ in range(3)]
        assert client.opening.wait(10)
        threads.submit(producers.send, OTHER, message, {}, None).result(10)
        assert not any(sending.done() for sending in slow)
        client.go_on.set()
        for sending in slow:
            sending.result(10)
    assert len(client.made) == 2
    producers.close(SOON)


def test_a_producer_that_is_made_while_all_are_closed_is_closed_too() -> None:
    client = SlowClient()
    producers = Producers(cast("pulsar.Client", client), name="c")
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(producers.send, TOPIC, cast("pulsar.Message", Message()), {}, None)
        assert client.opening.wait(10)
        producers.close(SOON)
        client.go_on.set()
        with pytest.raises(NotSentError, match="a consumer that is closed"):
            sending.result(10)
    (made,) = client.made
    assert made.closed.wait(10)


def test_those_who_send_while_a_producer_is_refused_share_that_and_ask_once() -> None:
    class Refusing(SlowClient):
        def create_producer(self, topic: str, **options: object) -> Producer:
            super().create_producer(topic, **options)
            raise pulsar.ConnectError

    client = Refusing()
    producers = Producers(cast("pulsar.Client", client), name="c")
    message = cast("pulsar.Message", Message())
    with ThreadPoolExecutor() as threads:
        sending = [threads.submit(producers.send, TOPIC, message, {}, None) for _ in range(4)]
        assert client.opening.wait(10)
        while any(not each.running() for each in sending):
            threading.Event().wait(0.01)
        client.go_on.set()
        for each in sending:
            with pytest.raises(NotSentError):
                each.result(10)
    assert len(client.made) == 1
    producers.close(SOON)


def test_a_consumer_that_stops_waits_once_for_a_topic_that_takes_nothing() -> None:
    sends = []

    class Client:
        def create_producer(self, topic: str, **_options: object) -> Producer:
            sends.append(topic)
            raise pulsar.Timeout

    def send(topic: TopicName) -> None:
        with pytest.raises(NotSentError):
            producers.send(topic, cast("pulsar.Message", Message()), {}, None)

    producers = Producers(cast("pulsar.Client", Client()), name="c")
    send(TOPIC)
    send(TOPIC)
    producers.stop()
    for topic in (TOPIC, TOPIC, OTHER, OTHER):
        send(topic)
    assert sends == [str(TOPIC)] * 3 + [str(OTHER)]
    producers.close(SOON)
