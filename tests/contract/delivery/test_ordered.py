"""Guarantees of ordered policies, and of those that keep the sequence of their dead letters."""

from __future__ import annotations

from collections.abc import Callable, Container
from datetime import timedelta
from typing import Any

import pytest

from redrive import Event
from redrive.delivery.middleware import scheduling, sequencing
from redrive.policy.model import SubscriptionType
from tests.contract.delivery.conftest import assert_nothing_left
from tests.support.consumers import handle_until_quiet

MakeWorld = Callable[..., Any]
SOON = timedelta(seconds=180)
SECOND = timedelta(seconds=1)


@pytest.fixture
def make_ordered_world(make_world: MakeWorld) -> MakeWorld:
    def make(**choices: Any) -> Any:  # noqa: ANN401 - passed on
        return make_world(ordered=True, kind=SubscriptionType.KEY_SHARED, **choices)

    return make


def test_retry_delays_later_messages_of_its_key_only(
    make_ordered_world: MakeWorld,
) -> None:
    world = make_ordered_world(delays=("2s",))
    world.send(b"a1", b"a2", b"a3", partition_key="a")
    world.send(b"b1", b"b2", partition_key="b")
    world.send(b"none")
    events: list[Event] = []
    handled: list[tuple[bytes, int]] = []
    consumer = world.consumer(on_event=events.append)

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        attempt = consumer.attempt_of(message)
        handled.append((message.data(), attempt.number))
        assert message.topic_name() == str(world.policy.topic)
        if message.data() == b"a1" and attempt.number == 3:
            assert attempt.cause.message == "not yet"
            assert attempt.first_failed_at is not None
        if message.data() == b"a3":
            consumer.stop()
        if message.data() == b"a1" and attempt.number < 3:
            raise ValueError("not yet")

    consumer.run(handle)
    consumer.close()

    of_a = [entry for entry in handled if entry[0].startswith(b"a")]
    assert of_a == [(b"a1", 1), (b"a1", 2), (b"a1", 3), (b"a2", 1), (b"a3", 1)]
    assert [content for content, _ in handled if content.startswith(b"b")] == [b"b1", b"b2"]
    # They did not wait.
    assert {b"b1", b"b2", b"none"} <= {content for content, _ in handled[:5]}
    names = [event.event.value for event in events]
    assert names == ["redrive.attempt_failed", "redrive.retried_in_place"] * 2
    assert_nothing_left(world)


def test_ordered_key_resumes_after_a_dead_letter(
    make_ordered_world: MakeWorld,
) -> None:
    world = make_ordered_world(max_retries=1)
    world.send(b"bad", b"good", b"discard me", partition_key="k")
    with world.consumer() as consumer:
        for number in (1, 2):
            message = consumer.receive(SOON)
            assert (message.data(), consumer.attempt_of(message).number) == (b"bad", number)
            consumer.reconsume_later(message, cause=ValueError(f"no {number}"))
        message = consumer.receive(SOON)
        assert message.data() == b"good"
        assert consumer.receive(timedelta(seconds=1)) is None  # the key is busy
        consumer.acknowledge(message)
        consumer.reconsume_later(consumer.receive(SOON), level=-1)
    dead = world.dead_letters(2)
    assert [letter.data() for letter in dead] == [b"bad", b"discard me"]
    assert dead[0].properties()["RECONSUMETIMES"] == "2"
    assert dead[0].properties()["REDRIVE_CAUSE_MESSAGE"] == "no 2"
    assert dead[0].properties()["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert_nothing_left(world)


def test_waiting_messages_of_ended_consumer_return_in_order(
    make_ordered_world: MakeWorld,
) -> None:
    world = make_ordered_world(delays=("1h",))
    world.send(b"1", b"2", b"3", partition_key="k")
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
        assert consumer.receive(timedelta(seconds=1)) is None
    with world.consumer() as consumer:
        for content in (b"1", b"2", b"3"):
            message = consumer.receive(SOON)
            assert (message.data(), consumer.attempt_of(message).number) == (content, 1)
            consumer.acknowledge(message)
    assert_nothing_left(world)


def test_a_full_consumer_takes_nothing_more_until_there_is_room(
    make_ordered_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "MAX_HELD", 3)
    world = make_ordered_world(delays=("2s",))
    world.send(b"1", b"2", b"3", partition_key="a")
    world.send(b"other", partition_key="b")
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
        seen = [consumer.receive(SOON)]  # the first again: the other has no room
        assert seen[0].data() == b"1"
        consumer.acknowledge(seen[0])
        for _ in range(3):
            message = consumer.receive(SOON)
            seen.append(message)
            consumer.acknowledge(message)
    assert sorted(message.data() for message in seen) == [b"1", b"2", b"3", b"other"]
    assert_nothing_left(world)


def test_messages_of_one_key_are_handled_one_at_a_time(
    make_ordered_world: MakeWorld,
) -> None:
    world = make_ordered_world()
    contents = [f"{n}".encode() for n in range(60)]
    for key in ("a", "b", "c"):
        world.send(*contents, partition_key=key)
    handled: dict[str, list[bytes]] = {"a": [], "b": [], "c": []}
    consumer = world.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        mine = handled[message.partition_key()]
        mine.append(message.data())
        if sum(map(len, handled.values())) == 180 + 3:
            consumer.stop()
        if message.data() == b"30" and mine.count(b"30") == 1:
            raise ValueError

    consumer.run(handle, workers=4)
    consumer.close()

    expected = [*contents[:31], b"30", *contents[31:]]
    assert handled == {"a": expected, "b": expected, "c": expected}
    assert_nothing_left(world)


@pytest.fixture
def _look_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliver a message again 0.5 s after its record was refused, instead of 5 s."""
    monkeypatch.setattr(sequencing, "AGAIN_AFTER_SECONDS", 0.5)


@pytest.fixture
def make_sequenced_world(make_world: MakeWorld) -> MakeWorld:
    def make(**choices: Any) -> Any:  # noqa: ANN401 - passed on
        choices = {"max_retries": 0, **choices}
        return make_world(ordered=True, sequenced=True, kind=SubscriptionType.KEY_SHARED, **choices)

    return make


def handled_until_quiet(
    world: Any,  # noqa: ANN401 - see conftest
    bad: Container[bytes] = (),
    stay: int = 0,
) -> list[bytes]:
    """Handle all but those that *stay* with a consumer of its own; those that are *bad* fail."""
    topics = world.policy.topic, world.policy.retry_topic

    def left() -> int:
        backlog: int = sum(map(world.backlog, topics))
        return max(0, backlog - stay)

    with world.consumer() as consumer:
        return handle_until_quiet(consumer, bad, quiet=SECOND, unsettled=left)


@pytest.mark.usefixtures("_look_soon")
def test_messages_of_dead_key_follow_it_and_return_in_order(
    make_sequenced_world: MakeWorld,
) -> None:
    world = make_sequenced_world()
    world.send(b"a1", b"a2", b"a3", partition_key="a")
    world.send(b"b1", partition_key="b")
    world.send(b"none")
    assert sorted(handled_until_quiet(world, {b"a2"})) == [b"a1", b"b1", b"none"]
    world.send(b"a4", partition_key="a")
    assert handled_until_quiet(world) == []  # another consumer knows it too
    assert world.replay() == [b"a2", b"a3", b"a4"]
    world.send(b"b2", partition_key="b")
    assert [m for m in handled_until_quiet(world) if m != b"b2"] == [b"a2", b"a3", b"a4"]
    world.send(b"a5", partition_key="a")
    assert handled_until_quiet(world) == [b"a5"]
    world.dead_letters(0)
    assert_nothing_left(world)


@pytest.mark.usefixtures("_look_soon")
def test_sequenced_dead_letters_record_reason(make_sequenced_world: MakeWorld) -> None:
    world = make_sequenced_world()
    world.send(b"a1", b"a2", partition_key="a")
    handled_until_quiet(world, {b"a1"})
    first, second = (letter.properties() for letter in world.dead_letters(2))
    assert first["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert second["REDRIVE_DEAD_REASON"] == "AfterDeadLetter"
    assert (first["RECONSUMETIMES"], second["RECONSUMETIMES"]) == ("1", "0")
    assert "REDRIVE_CAUSE_TYPE" not in second


@pytest.mark.usefixtures("_look_soon")
def test_dead_letter_that_fails_again_holds_its_key(
    make_sequenced_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_sequenced_world()
    world.send(b"a1", b"a2", b"a3", partition_key="a")
    assert handled_until_quiet(world, {b"a1"}) == []
    assert world.replay() == [b"a1", b"a2", b"a3"]
    with monkeypatch.context() as patch:
        patch.setattr(sequencing, "STILL_SECONDS", 2.0)
        assert handled_until_quiet(world, {b"a2"}) == [b"a1"]
    world.send(b"a4", partition_key="a")
    assert handled_until_quiet(world) == []
    assert world.replay() == [b"a2", b"a3", b"a4"]
    assert handled_until_quiet(world) == [b"a2", b"a3", b"a4"]
    assert_nothing_left(world)


@pytest.mark.usefixtures("_look_soon")
def test_dead_letter_replayed_before_predecessor_goes_back(
    make_sequenced_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencing, "STILL_SECONDS", 2.0)
    world = make_sequenced_world()
    world.send(b"a1", b"a2", partition_key="a")
    handled_until_quiet(world, {b"a1"})
    world.replay()
    handled_until_quiet(world, {b"a1"})
    world.send(b"a3", partition_key="a")
    handled_until_quiet(world)
    handled = []
    while world.replay():  # twice; once more for a message that waits too long for a slow broker
        handled += handled_until_quiet(world)
    assert handled == [b"a1", b"a2", b"a3"]
    assert_nothing_left(world)


@pytest.mark.usefixtures("_look_soon")
def test_dead_lettered_message_delivered_again_is_not_handled(
    make_sequenced_world: MakeWorld,
) -> None:
    world = make_sequenced_world()
    world.refuse(world.policy.dead_letter_topic)  # recorded, and not sent
    world.send(b"a1", b"a2", partition_key="a")
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
        assert consumer.receive(SECOND) is None
    world.accept(world.policy.dead_letter_topic)
    assert handled_until_quiet(world) == []
    assert world.replay() == [b"a1", b"a2"]
    assert handled_until_quiet(world) == [b"a1", b"a2"]
    assert_nothing_left(world)


@pytest.mark.usefixtures("_look_soon")
def test_refused_records_make_the_key_wait_and_repeat_nothing(
    make_sequenced_world: MakeWorld,
) -> None:
    world = make_sequenced_world()
    world.send(b"a1", b"a2", partition_key="a")
    handled_until_quiet(world, {b"a1"})
    world.replay()
    world.refuse(world.policy.sequences_topic)
    with world.consumer() as consumer:
        first = consumer.receive(SOON)
        assert first.data() == b"a1"
        consumer.acknowledge(first)
        assert consumer.receive(SECOND) is None
        world.accept(world.policy.sequences_topic)
        second = consumer.receive(SOON)
        assert second.data() == b"a2"
        consumer.acknowledge(second)
        assert consumer.receive(SECOND) is None
    world.dead_letters(0)
    assert_nothing_left(world)


@pytest.mark.usefixtures("_look_soon")
def test_messages_beyond_the_bound_wait_and_keep_their_order(
    make_sequenced_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequencing, "MAX_ENTRIES", 1)
    world = make_sequenced_world()
    world.send(b"a1", b"a2", partition_key="a")
    world.send(b"b1", b"b2", partition_key="b")
    world.send(b"c1", partition_key="c")
    assert handled_until_quiet(world, {b"a1"}, stay=1) == [b"b1", b"b2", b"c1"]
    assert world.replay() == [b"a1"]
    assert handled_until_quiet(world) == [b"a1", b"a2"]
    world.dead_letters(0)
    assert_nothing_left(world)


@pytest.mark.usefixtures("_look_soon")
def test_successor_at_another_consumer_waits_for_predecessor(
    make_sequenced_world: MakeWorld,
) -> None:
    world = make_sequenced_world()
    world.send(b"a1", b"a2", partition_key="a")
    handled_until_quiet(world, {b"a1"})
    world.replay()
    with world.consumer(prefetch=1) as one, world.consumer(prefetch=1) as other:
        taken_by, rest = other, one
        first = None
        while first is None:
            taken_by, rest = rest, taken_by
            first = taken_by.receive(SECOND)
        assert first.data() == b"a1"
        assert one.receive(2 * SECOND) is None
        assert other.receive(2 * SECOND) is None
        taken_by.acknowledge(first)
        second = None
        while second is None:
            second = rest.receive(SECOND) or taken_by.receive(SECOND)
        assert second.data() == b"a2"
    world.dead_letters(0)
