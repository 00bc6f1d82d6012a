"""Messages that a broker redelivers or refuses: none is handed out twice or uses up an attempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby
from typing import Any

import pytest

from redrive.delivery import processor
from redrive.policy.model import SubscriptionType
from tests.contract.delivery.conftest import BOTH, Observed, assert_nothing_left, wait_until_settled

MakeWorld = Callable[..., Any]
SECOND = timedelta(seconds=1)
BRIEFLY = 0.1 * SECOND
SOON = 180 * SECOND


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


@pytest.fixture
def _try_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try once more after 0.5 s, and at least every 2 s, instead of 5 s and 60 s."""
    monkeypatch.setattr(processor, "_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(processor, "_LONGEST_SECONDS", 2.0)


@pytest.mark.usefixtures("_try_again_soon")
@BOTH
def test_refused_retry_is_sent_later_as_the_next_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=1)
    world.refuse(world.policy.retry_topic)
    world.send(b"x")
    observed = Observed()
    with world.consumer(on_event=observed) as consumer:
        consumer.reconsume_later(consumer.receive(SOON), cause=ConnectionError())
        observed.wait(consumer, "redrive.unsent", 2)  # at once, and after a pause
        world.accept(world.policy.retry_topic)
        again = consumer.receive(SOON)
        assert consumer.attempt_of(again).number == 2
        consumer.acknowledge(again)
    *refused, sent = observed.events
    assert (set(refused), sent) == ({"redrive.unsent"}, "redrive.retried")
    world.dead_letters(0)
    assert_nothing_left(world)


@pytest.mark.usefixtures("_try_again_soon")
def test_refused_dead_letter_is_sent_later_and_handled_once(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=0)
    world.refuse(world.policy.dead_letter_topic)
    world.send(b"bad", b"good")
    observed = Observed()
    with world.consumer(on_event=observed) as consumer:
        bad = consumer.receive(SOON)
        consumer.reconsume_later(bad, cause=ValueError("no"))
        consumer.acknowledge(consumer.receive(SOON))  # others are handled meanwhile
        observed.wait(consumer, "redrive.unsent", 2)
        world.accept(world.policy.dead_letter_topic)
        observed.wait(consumer, "redrive.dead_lettered", 1)
    (dead,) = world.dead_letters(1)
    assert (dead.data(), dead.properties()["REDRIVE_CAUSE_MESSAGE"]) == (b"bad", "no")
    assert_nothing_left(world)


@pytest.mark.usefixtures("_try_again_soon")
@BOTH
def test_unsent_message_goes_to_the_next_as_the_same_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.refuse(world.policy.retry_topic)
    world.send(b"x")
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
    world.accept(world.policy.retry_topic)
    with world.consumer() as consumer:
        again = consumer.receive(SOON)
        assert (again.topic_name(), consumer.attempt_of(again).number) == (
            str(world.policy.topic), 1,
        )  # fmt: skip
        consumer.acknowledge(again)
    assert_nothing_left(world)


@pytest.mark.usefixtures("_try_again_soon")
@BOTH
def test_too_many_unsent_messages_stop_and_resume_taking(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "MAX_UNSENT", 2)
    world = make_world(max_retries=0)
    world.refuse(world.policy.dead_letter_topic)
    world.send(b"1", b"2", b"3")
    observed = Observed()
    with world.consumer(on_event=observed) as consumer:
        for _ in range(2):
            consumer.reconsume_later(consumer.receive(SOON))
        observed.wait(consumer, "redrive.unsent", 4)
        assert of_taking(observed.events) == ["redrive.taking_stopped"]
        world.accept(world.policy.dead_letter_topic)
        last = consumer.receive(SOON)
        assert last.data() == b"3"
        consumer.acknowledge(last)
        observed.wait(consumer, "redrive.dead_lettered", 2)  # it resumes between them
        assert of_taking(observed.events) == ["redrive.taking_stopped", "redrive.taking_resumed"]
    world.dead_letters(2)
    assert_nothing_left(world)


def of_taking(events: list[str]) -> list[str]:
    return [event for event in events if event.startswith("redrive.taking")]


@pytest.mark.usefixtures("_try_again_soon")
def test_unsent_messages_are_stored_once_despite_unloads(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=0)
    world.refuse(world.policy.dead_letter_topic)
    world.send(b"1", b"2", b"3")
    observed = Observed()
    with world.consumer(on_event=observed) as consumer:
        for _ in range(3):
            consumer.reconsume_later(consumer.receive(SOON))
        for _ in range(3):
            world.unload()
            assert consumer.receive(SECOND) is None
        world.accept(world.policy.dead_letter_topic)
        observed.wait(consumer, "redrive.dead_lettered", 3)
        wait_until_settled(world, lambda: consumer.receive(0.1 * SECOND))
    letters = world.dead_letters(3)
    assert sorted(letter.data() for letter in letters) == [b"1", b"2", b"3"]
    assert_nothing_left(world)


@pytest.mark.usefixtures("_try_again_soon")
def test_unsent_message_holds_its_key(make_world: MakeWorld) -> None:
    world = make_world(max_retries=0, ordered=True, kind=SubscriptionType.KEY_SHARED)
    world.refuse(world.policy.dead_letter_topic)
    world.send(b"a1", b"a2", partition_key="a")
    world.send(b"b1", partition_key="b")
    observed = Observed()
    with world.consumer(on_event=observed) as consumer:
        received = [consumer.receive(SOON), consumer.receive(SOON)]
        first = {message.data(): message for message in received}
        assert sorted(first) == [b"a1", b"b1"]
        consumer.acknowledge(first[b"b1"])
        consumer.reconsume_later(first[b"a1"])
        observed.wait(consumer, "redrive.unsent", 2)
        world.accept(world.policy.dead_letter_topic)
        following = consumer.receive(SOON)
        assert following.data() == b"a2"
        consumer.acknowledge(following)
    assert [letter.data() for letter in world.dead_letters(1)] == [b"a1"]
    assert_nothing_left(world)
