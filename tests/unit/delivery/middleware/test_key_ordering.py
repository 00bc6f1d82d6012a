"""A key goes on when its message is settled, and its handler has ended."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Any

import pulsar

from redrive.delivery.middleware.chain import DONE, Redeliver, Settlement
from redrive.delivery.middleware.scheduling import KeyOrdering
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage, VirtualClock

START = datetime(2026, 1, 1, tzinfo=UTC)


class Consumer:
    """What hands messages out in their order, and again."""

    def __init__(self) -> None:
        self.incoming: deque[pulsar.Message] = deque()
        ordering = KeyOrdering(self, VirtualClock(START), by_topic=False)  # type: ignore[arg-type]
        self.receive = ordering.receive(self._take)
        self.settle = ordering.settle(lambda _: None)
        self.ordering = ordering

    def _take(self, _: float | None) -> pulsar.Message | None:
        return self.incoming.popleft() if self.incoming else None

    def again(self, message: pulsar.Message, _: float) -> None:
        self.incoming.append(message)

    def hold_new(self, holder: object, *, held: bool) -> None:
        """Nothing new comes anyway."""

    def taken(self) -> list[bytes]:
        """Take all that may go."""
        return [message.data() for message in iter(lambda: self.receive(0), None)]

    def handle(self, message: pulsar.Message, handler: Any) -> None:  # noqa: ANN401 - calls back
        self.ordering.handle(lambda _: [handler()])([message])


def of_key(number: int) -> InMemoryMessage:
    message_id = pulsar.MessageId(0, 1, number, -1)
    topic = TopicName("shop", "prod", "orders")
    return InMemoryMessage(topic, message_id, b"%d" % number, START, key="k")


def test_a_key_waits_for_the_handler_of_what_was_settled_meanwhile() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2)])
    assert consumer.taken() == [b"1"]

    def time_out() -> None:
        consumer.settle(Settlement(first, DONE))
        assert consumer.taken() == []

    consumer.handle(first, time_out)
    assert consumer.taken() == [b"2"]


def test_what_comes_again_while_its_handler_is_at_work_waits_its_turn() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2)])
    assert consumer.taken() == [b"1"]

    def give_back() -> None:
        consumer.settle(Settlement(first, Redeliver(counted=True, reason="asked")))
        consumer.incoming.append(of_key(1))
        assert consumer.taken() == []

    consumer.handle(first, give_back)
    second = consumer.receive(0)
    assert second is not None
    assert second.data() == b"2"
    consumer.handle(second, lambda: None)
    assert consumer.taken() == []
    consumer.settle(Settlement(second, DONE))
    assert consumer.taken() == [b"1"]


def test_a_retry_in_place_is_still_the_first_of_its_key() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2)])
    assert consumer.taken() == [b"1"]
    consumer.handle(first, lambda: None)
    consumer.incoming.append(first)
    assert consumer.taken() == [b"1"]
    consumer.settle(Settlement(first, DONE))
    assert consumer.taken() == [b"2"]
