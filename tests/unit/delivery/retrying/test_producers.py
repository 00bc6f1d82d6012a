"""Races of sends, slow openings and closing, which no broker can be made to repeat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pulsar
import pytest

from redrive.delivery.retrying.errors import NotSentError
from redrive.delivery.retrying.producers import Producers
from redrive.policy.naming import TopicName

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")
OTHER = TopicName("shop", "prod", "orders-fulfilment-DLQ")


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
        self.closed = False
        self._answer = answer

    def send(self, _content: None, **_options: object) -> None:
        self._answer()

    def close(self) -> None:
        self.closed = True


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
    assert [producer.closed for producer in made] == [True, False]
    producers.close()
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
    producers.close()


def test_a_producer_that_is_made_while_all_are_closed_is_closed_too() -> None:
    client = SlowClient()
    producers = Producers(cast("pulsar.Client", client), name="c")
    with ThreadPoolExecutor() as threads:
        sending = threads.submit(producers.send, TOPIC, cast("pulsar.Message", Message()), {}, None)
        assert client.opening.wait(10)
        producers.close()
        client.go_on.set()
        with pytest.raises(NotSentError, match="a consumer that is closed"):
            sending.result(10)
    assert [producer.closed for producer in client.made] == [True]
