"""Guarantees of `run` to handlers, at a real broker and in memory alike."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.schema
import pytest

from redrive import Attempt, Event, FailureRules
from redrive.delivery.middleware.outage_breaker import OutageBreaker
from redrive.delivery.reporting import Name
from redrive.policy.model import OutageLimits
from tests.contract.delivery.conftest import BOTH, assert_nothing_left
from tests.support.waiting import wait_until

MakeWorld = Callable[..., Any]


SOON = timedelta(seconds=180)


def test_a_handler_gets_the_attempt_if_it_takes_one(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1)
    world.send(b"x")
    numbers: list[int] = []
    consumer = world.consumer()

    def handle(_message: Any, attempt: Attempt) -> None:  # noqa: ANN401 - the client has no types
        numbers.append(attempt.number)
        if attempt.number == 1:
            raise ConnectionError
        consumer.stop()

    consumer.run(handle)
    consumer.close()
    assert numbers == [1, 2]
    assert_nothing_left(world)


def test_a_handler_may_close_its_consumer(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"1", b"2")
    consumer = world.consumer()
    handled: list[bytes] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        consumer.close()

    consumer.run(handle)
    assert handled == [b"1"]
    wait_until(lambda: world.backlog(world.policy.topic) == 1)
    with world.consumer() as following:
        message = following.receive(SOON)
        assert message.data() == b"2"
        following.acknowledge(message)
    assert_nothing_left(world)


@BOTH
def test_rules_apply_to_causes_and_members_of_groups(
    make_world: MakeWorld,
) -> None:
    world = make_world(delays=("10d",))
    world.send(b"from", b"group", b"other")
    handled: list[bytes] = []
    consumer = world.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        if len(handled) == 3:
            consumer.stop()
        if message.data() == b"from":
            raise RuntimeError from LookupError("no such order")
        if message.data() == b"group":
            raise ExceptionGroup("two", [LookupError("no such order"), LookupError("nor this")])
        raise RuntimeError

    consumer.run(handle, rules=FailureRules(dead_letter_on=(LookupError,)))
    consumer.close()
    dead = {letter.data() for letter in world.dead_letters(2)}
    assert dead == {b"from", b"group"}
    assert world.backlog(world.policy.retry_topic) == 1


class Panic(BaseException):
    """A panic in Rust, as PyO3 raises it."""


@pytest.mark.parametrize("error", [Panic(), asyncio.CancelledError()], ids=["panic", "cancelled"])
@BOTH
def test_handler_failure_that_is_no_exception_stops_no_run(
    make_world: MakeWorld, error: BaseException
) -> None:
    world = make_world(max_retries=1)
    world.send(b"bad", b"good")
    calls: Counter[bytes] = Counter()
    consumer = world.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        calls[message.data()] += 1
        if calls.total() == 3:
            consumer.stop()
        if message.data() == b"bad":
            raise error

    consumer.run(handle, workers=2)
    consumer.close()
    assert calls == {b"bad": 2, b"good": 1}
    (dead,) = world.dead_letters(1)
    assert dead.data() == b"bad"
    assert_nothing_left(world)


@BOTH
def test_outage_uses_up_no_retry_and_a_probe_ends_it(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1, delays=("10d",))
    world.send(*[f"{number}".encode() for number in range(30)])
    events: list[Event] = []
    failures: Counter[bytes] = Counter()
    handled: set[bytes] = set()
    limits = OutageLimits(max_probe_interval=1)
    consumer = world.consumer(on_event=events.append, middleware=[OutageBreaker(limits)])

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        if failures.total() < 13:  # ten before the outage is seen, and three probes
            failures[message.data()] += 1
            raise ConnectionError
        handled.add(message.data())
        if len(handled) == 21:
            consumer.stop()

    consumer.run(handle)
    consumer.close()
    counts = Counter(event.event for event in events)
    assert (counts[Name.ATTEMPT_FAILED], counts[Name.RETRIED], counts[Name.HELD]) == (9, 9, 4)
    assert (counts[Name.OUTAGE_BEGAN], counts[Name.OUTAGE_ENDED]) == (1, 1)
    world.dead_letters(0)
    wait_until(lambda: world.backlog(world.policy.topic) == 0)
    assert world.backlog(world.policy.retry_topic) == 9


class Order(pulsar.schema.Record):  # type: ignore[misc]  # the client has no types
    """The type of the messages of the source topic."""

    number = pulsar.schema.Integer(required=True)


@BOTH
def test_handler_gets_decoded_values_others_are_dead_lettered(
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


@BOTH
def test_simple_consumer_gets_decoded_values(make_world: MakeWorld) -> None:
    world = make_world()
    orders = pulsar.schema.JsonSchema(Order)
    with world.simple_consumer(schema=orders) as consumer:
        world.send(orders.encode(Order(number=7)))
        (message,) = consumer.receive(1, timedelta(minutes=1), SOON)
        assert message.value().number == 7
        consumer.acknowledge(message)
    assert_nothing_left(world)
