"""What other threads are about to settle when a consumer closes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pulsar

from redrive import Policy
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker, InMemoryMessage
from redrive.testing.consumers import InMemoryConsumer

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


class Slow(InMemoryBroker):
    """A broker whose retry topic takes its time."""

    def __init__(self) -> None:
        super().__init__(POLICY)
        self.storing, self.go_on = threading.Event(), threading.Event()

    def store(
        self, topic: TopicName, message: InMemoryMessage, deliver_after: timedelta | None = None
    ) -> pulsar.MessageId:
        if topic == POLICY.retry_topic:
            self.storing.set()
            self.go_on.wait(30)
        return super().store(topic, message, deliver_after)


def test_a_settlement_of_another_thread_ends_before_its_consumer_closes() -> None:
    broker = Slow()
    consumer = InMemoryConsumer(POLICY, broker=broker)
    consumer.send(b"x")
    message = consumer.receive()
    with ThreadPoolExecutor() as threads:
        settling = threads.submit(consumer.reconsume_later, message)
        assert broker.storing.wait(30)
        threading.Timer(0.3, broker.go_on.set).start()
        consumer.close(timeout=30)
        settling.result()
    assert [left.topic for left in broker.unsettled()] == [POLICY.retry_topic]


def test_a_settlement_that_hangs_holds_up_closing_no_longer_than_its_time_out() -> None:
    broker = Slow()
    consumer = InMemoryConsumer(POLICY, broker=broker)
    consumer.send(b"x")
    message = consumer.receive()
    with ThreadPoolExecutor() as threads:
        settling = threads.submit(consumer.reconsume_later, message)
        assert broker.storing.wait(30)
        consumer.close(timeout=0.2)
        assert not settling.done()
        broker.go_on.set()
        settling.result()
    assert [left.topic for left in broker.unsettled()] == [POLICY.topic, POLICY.retry_topic]


def test_what_is_called_while_a_message_is_settled_may_close_the_consumer() -> None:
    consumer = InMemoryConsumer(POLICY, on_event=lambda _: consumer.close(timedelta.max))
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    assert [left.topic for left in consumer.broker.unsettled()] == [POLICY.retry_topic]
