"""A broker redelivers in-flight messages: none is handed out twice, or sent on twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from typing import Any

from redrive.policy.model import SubscriptionType
from tests.contract.delivery.conftest import BOTH, assert_nothing_left, wait_until_settled

MakeWorld = Callable[..., Any]
SECOND = timedelta(seconds=1)
BRIEFLY, SOON = 0.1 * SECOND, 180 * SECOND


@BOTH
def test_in_flight_message_is_not_handed_out_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"1", b"2", b"3")
    consumer = world.consumer()
    in_hand = [consumer.receive(SOON) for _ in range(3)]
    for _ in range(2):
        world.unload()
        assert consumer.receive(SECOND) is None
    for message in in_hand:
        consumer.acknowledge(message)
    wait_until_settled(world, lambda: consumer.receive(BRIEFLY))
    consumer.close()
    assert_nothing_left(world)


def test_dropped_message_is_handed_out_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"1", b"2")
    consumer = world.consumer()
    kept = consumer.receive(SOON)
    dropped = consumer.receive(SOON).data()
    world.unload()
    again = consumer.receive(SOON)
    assert again.data() == dropped
    consumer.acknowledge(again)
    consumer.acknowledge(kept)
    consumer.close()
    assert_nothing_left(world)


def test_message_just_sent_on_is_not_sent_on_again(
    make_world: MakeWorld,
) -> None:
    world = make_world(delays=("1h",))
    world.send(*[b"%d" % number for number in range(5)])
    consumer = world.consumer()
    for _ in range(5):
        consumer.reconsume_later(consumer.receive(SOON))
    world.unload()  # the acknowledgements may not have got there
    assert consumer.receive(2 * SECOND) is None
    wait_until_settled(world, lambda: consumer.receive(BRIEFLY))
    consumer.close()
    assert world.backlog(world.policy.topic) == 0
    assert world.backlog(world.policy.retry_topic) == 5


def test_negatively_acknowledged_message_is_delivered_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"1", b"2")
    consumer = world.consumer(nack_delay=SECOND)
    kept = consumer.receive(SOON)
    given_back = consumer.receive(SOON)
    consumer.negative_acknowledge(given_back)
    world.unload()
    again = consumer.receive(SOON)
    assert again.data() == given_back.data()
    assert consumer.receive(3 * SECOND) is None
    consumer.acknowledge(again)
    consumer.acknowledge(kept)
    wait_until_settled(world, lambda: consumer.receive(BRIEFLY))
    consumer.close()
    assert_nothing_left(world)


def test_ordered_messages_are_handled_once_and_in_order(
    make_world: MakeWorld,
) -> None:
    world = make_world(ordered=True, kind=SubscriptionType.KEY_SHARED, delays=("1s",))
    world.send(b"m1", b"m2", b"m3", partition_key="k")
    handled: list[bytes] = []
    consumer = world.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        world.unload()
        if handled == [b"m1"]:
            raise ConnectionError
        if message.data() == b"m3":
            consumer.stop()

    consumer.run(handle)
    consumer.close()
    assert Counter(handled)[b"m1"] == 2
    assert [content for content, _ in groupby(handled)] == [b"m1", b"m2", b"m3"]


def test_invisible_message_is_not_received_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"1")
    with world.simple_consumer() as consumer:
        (message,) = consumer.receive(1, timedelta(hours=1), SOON)
        world.unload()
        assert consumer.receive(1, timedelta(hours=1), 2 * SECOND) == []
        consumer.acknowledge(message)
        wait_until_settled(world, lambda: consumer.receive(1, timedelta(hours=1), BRIEFLY))
    assert_nothing_left(world)
