from __future__ import annotations

from redrive.policy.naming import TopicName
from redrive.replay.move import Mover, Route, Tally
from redrive.replay.rows import DeadLetter
from tests.support.messages import NO_TEXT, message_with

TOPIC = TopicName("shop", "prod", "orders-billing-DLQ")
ROUTE = Route("pulsar://unused", TOPIC, "redrive", TOPIC, 0, "producer", "shop/again")


def test_a_message_of_which_a_copy_would_lack_something_is_neither_sent_nor_acknowledged() -> None:
    mover = Mover(ROUTE, -1)  # with no client open, so that it could not be sent
    mover.move([DeadLetter.of(message_with(property=("a", NO_TEXT)), -1)])
    assert mover.finish() == Tally(kept=1)
