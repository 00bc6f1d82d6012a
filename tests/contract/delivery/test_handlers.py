"""What `run` promises to handlers, at a real broker and in memory alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from redrive import Attempt, FailureRules

MakeWorld = Callable[..., Any]
SOON = timedelta(seconds=30)


def assert_nothing_left(world: Any) -> None:  # noqa: ANN401 - see conftest
    assert world.backlog(world.policy.topic) == world.backlog(world.policy.retry_topic) == 0


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
    assert world.backlog(world.policy.topic) == 1
    with world.consumer() as following:
        message = following.receive(SOON)
        assert message.data() == b"2"
        following.acknowledge(message)
    assert_nothing_left(world)


@pytest.mark.parametrize("kind", ["threads", "asyncio"], indirect=True)
def test_rules_see_what_an_exception_was_raised_from_and_the_parts_of_a_group(
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
