"""What a simple consumer does when it is interrupted."""

from __future__ import annotations

from datetime import timedelta

import pulsar
import pytest

from redrive import Policy
from redrive.delivery.middleware.chain import Middleware, Receive
from redrive.policy.naming import TopicName
from redrive.testing.consumers import InMemorySimpleConsumer

POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")
MINUTE = timedelta(minutes=1)


class Interrupting(Middleware):
    """Ends the third reception."""

    def __init__(self) -> None:
        self.receptions = 0

    def receive(self, receive: Receive) -> Receive:
        def receive_or_end(timeout: float | None) -> pulsar.Message | None:
            self.receptions += 1
            if self.receptions == 3:
                raise KeyboardInterrupt
            return receive(timeout)

        return receive_or_end


def test_what_was_taken_before_an_interruption_is_received_afterwards() -> None:
    consumer = InMemorySimpleConsumer(POLICY, middleware=[Interrupting()])
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    with pytest.raises(KeyboardInterrupt):
        consumer.receive(3, MINUTE, MINUTE)
    received = consumer.receive(3, MINUTE, MINUTE)
    assert [message.data() for message in received] == [b"1", b"2", b"3"]
    assert [consumer.attempt_of(message).number for message in received] == [1, 1, 1]
