"""Which producer is given up after a failed send: a race that no broker can be made to repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pulsar
import pytest

from redrive.delivery.producers import NotSentError, Producers
from redrive.policy.naming import TopicName

TOPIC = TopicName("shop", "prod", "orders-fulfilment-RETRY")


class Message:
    """As much of a message as a hop looks at."""

    def has_null_value(self) -> bool:
        return True

    def partition_key(self) -> str:
        return ""

    ordering_key = partition_key

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
