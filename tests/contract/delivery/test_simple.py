"""Guarantees of a simple consumer, at a real broker and in memory alike."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from redrive.delivery.consumers import simple
from redrive.delivery.consumers.simple import NotInFlightError
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.errors import InvalidSpecError
from redrive.messages import id_text
from tests.contract.delivery.conftest import BOTH, BOTH_AT_BROKER, Observed, assert_nothing_left

MakeWorld = Callable[..., Any]
SECOND = timedelta(seconds=1)
SOON = 180 * SECOND


@pytest.fixture(autouse=True)
def short_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds have tests of their own; these need not wait for 10 s each time."""
    monkeypatch.setattr(simple, "MIN_INVISIBLE", SECOND)


@BOTH_AT_BROKER
def test_message_acknowledged_in_time_is_settled(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(*[b"%d" % n for n in range(5)])
    with world.simple_consumer() as consumer:
        received: list[Any] = []
        while len(received) < 5:
            received += consumer.receive(5 - len(received), 60 * SECOND, SOON)
        for message in received:
            consumer.change_invisible_duration(message, 2 * SECOND)  # that the end be soon
            consumer.acknowledge(message)
        assert consumer.receive(1, 2 * SECOND, 3 * SECOND) == []
    assert sorted(message.data() for message in received) == [b"%d" % n for n in range(5)]
    assert_nothing_left(world)


@BOTH
def test_unsettled_message_returns_and_is_dead_lettered(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=1, delays=("1h",))
    (origin,) = world.send(b"bad", partition_key="k")
    observed = Observed()
    with world.simple_consumer(on_event=observed) as consumer:
        (message,) = consumer.receive(10, 60 * SECOND, SOON)
        attempts = [consumer.attempt_of(message)]
        assert consumer.receive(10, 2 * SECOND, SECOND) == []
        consumer.change_invisible_duration(message, SECOND)
        (message,) = consumer.receive(10, SECOND, SOON)
        attempts.append(consumer.attempt_of(message))
        while "redrive.dead_lettered" not in observed.events:
            assert consumer.receive(10, 2 * SECOND, SECOND) == []
    assert [attempt.number for attempt in attempts] == [1, 2]
    assert {attempt.origin for attempt in attempts} == {id_text(origin)}
    (dead,) = world.dead_letters(1)
    properties = dead.properties()
    assert (dead.data(), dead.partition_key()) == (b"bad", "k")
    assert properties["RECONSUMETIMES"] == "2"
    assert properties["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert properties["REDRIVE_CAUSE_TYPE"] == "InvisibleDurationEndedError"
    assert_nothing_left(world)


@BOTH
def test_a_duration_can_be_changed_and_takes_effect_at_once(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"longer")
    with world.simple_consumer() as consumer:
        (message,) = consumer.receive(1, 2 * SECOND, SOON)
        consumer.change_invisible_duration(message, 60 * SECOND)
        assert consumer.receive(1, SECOND, 3 * SECOND) == []
        consumer.change_invisible_duration(message, SECOND)
        (again,) = consumer.receive(1, 60 * SECOND, SOON)
        assert consumer.attempt_of(again).number == 2
        consumer.acknowledge(again)
    assert_nothing_left(world)


@BOTH
def test_timed_out_or_settled_message_can_not_be_settled(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.send(b"late")
    with world.simple_consumer() as consumer:
        (late,) = consumer.receive(1, SECOND, SOON)
        (again,) = consumer.receive(1, 30 * SECOND, SOON)
        with pytest.raises(NotInFlightError, match="ask for more time before it ends"):
            consumer.acknowledge(late)
        with pytest.raises(NotInFlightError):
            consumer.change_invisible_duration(late, 2 * SECOND)
        consumer.acknowledge(again)
        with pytest.raises(NotInFlightError):
            consumer.acknowledge(again)
        with pytest.raises(NotInFlightError):
            consumer.change_invisible_duration(again, 2 * SECOND)
        assert consumer.receive(1, SECOND, 2 * SECOND) == []
    assert_nothing_left(world)


@BOTH
def test_receptions_of_short_jobs_use_up_retries(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1)
    world.send(b"x")
    for number in (1, 2):
        with world.simple_consumer() as consumer:
            (message,) = consumer.receive(1, timedelta(hours=12), SOON)
            assert consumer.attempt_of(message).number == number
    (dead,) = world.dead_letters(1)
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "InvisibleDurationEndedError"
    assert_nothing_left(world)


@BOTH
def test_failed_message_is_retried_later_and_dead_lettered(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1, delays=("1h",))
    world.send(b"x")
    with world.simple_consumer() as consumer:
        (message,) = consumer.receive(1, 60 * SECOND, SOON)
        with pytest.raises(InvalidSpecError, match="delay"):
            consumer.fail(message, delay=0)
        consumer.fail(message, delay=SECOND, cause=ValueError("bad"))
        with pytest.raises(NotInFlightError):
            consumer.fail(message)
        (again,) = consumer.receive(1, 60 * SECOND, SOON)
        assert consumer.attempt_of(again).number == 2
        consumer.fail(again, cause=ValueError("bad"))
    (dead,) = world.dead_letters(1)
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "ValueError"
    assert_nothing_left(world)


@BOTH
def test_handed_back_message_is_the_same_attempt_again(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"x")
    with world.simple_consumer() as consumer:
        (message,) = consumer.receive(1, timedelta(hours=12), SOON)
        consumer.hand_back(message)
        with pytest.raises(NotInFlightError):
            consumer.acknowledge(message)
        (again,) = consumer.receive(1, 60 * SECOND, SOON)
        assert consumer.attempt_of(again).number == 1
        consumer.acknowledge(again)
    assert_nothing_left(world)


@BOTH
def test_the_count_outlives_every_consumer(make_world: MakeWorld) -> None:
    world = make_world(max_retries=5)
    world.send(b"x")
    for number in (1, 3):  # with the reception that closing ends
        with world.simple_consumer() as consumer:
            (message,) = consumer.receive(1, SECOND, SOON)
            assert consumer.attempt_of(message).number == number
            (message,) = consumer.receive(1, timedelta(hours=1), SOON)
            assert consumer.attempt_of(message).number == number + 1


@BOTH
def test_a_policy_without_dead_letters_discards(make_world: MakeWorld) -> None:
    world = make_world(max_retries=0, dead_letters=False)
    world.send(b"x")
    observed = Observed()
    with world.simple_consumer(on_event=observed) as consumer:
        consumer.receive(1, SECOND, SOON)
        while "redrive.discarded" not in observed.events:
            assert consumer.receive(1, SECOND, SECOND) == []
    world.dead_letters(0)
    assert_nothing_left(world)


@BOTH
def test_invalid_arguments_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"x")
    with world.simple_consumer() as consumer:
        with pytest.raises(InvalidSpecError, match="10 s to 12 h"):
            consumer.receive(1, 0.9 * SECOND)
        with pytest.raises(InvalidSpecError, match="max_messages must be a whole number"):
            consumer.receive(0, SECOND)
        (message,) = consumer.receive(1, 60 * SECOND, SOON)
        with pytest.raises(InvalidSpecError, match="10 s to 12 h"):
            consumer.change_invisible_duration(message, timedelta(hours=13))
        consumer.acknowledge(message)
        consumer.stop()
        with pytest.raises(ConsumerStoppedError):
            consumer.receive(1, SECOND)
    assert_nothing_left(world)
