"""A consumer with a schema hands its handler what the schema decodes, at every attempt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive import FailureRules
from tests.contract.delivery.conftest import assert_nothing_left

MakeWorld = Callable[..., Any]
SOON = timedelta(seconds=180)


class Order(pulsar.schema.Record):  # type: ignore[misc]  # the client has no types
    """What the producers of the source topic send."""

    number = pulsar.schema.Integer(required=True)


@pytest.mark.parametrize("kind", ["threads", "asyncio"], indirect=True)
def test_a_handler_gets_what_the_schema_decodes_and_what_it_does_not_is_dead_lettered(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=1)
    orders = pulsar.schema.JsonSchema(Order)
    handled: list[tuple[int, int]] = []

    def handle(message: pulsar.Message) -> None:
        number = message.value().number
        attempt = consumer.attempt_of(message).number
        handled.append((number, attempt))
        if len(handled) == 2:
            consumer.stop()
        if attempt == 1:
            raise ConnectionError

    with world.consumer(schema=orders) as consumer:
        world.send(b"\xff no order", orders.encode(Order(number=7)))
        consumer.run(handle, rules=FailureRules(retry_on=(ConnectionError,)))
    assert handled == [(7, 1), (7, 2)]
    (dead,) = world.dead_letters(1)
    assert dead.data() == b"\xff no order"


@pytest.mark.parametrize("kind", ["threads", "asyncio"], indirect=True)
def test_who_asks_for_messages_gets_what_the_schema_decodes(make_world: MakeWorld) -> None:
    world = make_world()
    orders = pulsar.schema.JsonSchema(Order)
    with world.simple_consumer(schema=orders) as consumer:
        world.send(orders.encode(Order(number=7)))
        (message,) = consumer.receive(1, timedelta(minutes=1), SOON)
        assert message.value().number == 7
        consumer.acknowledge(message)
    assert_nothing_left(world)
