"""Guarantees of a policy that keeps the sequence of its dead letters."""

from __future__ import annotations

from collections.abc import Callable, Container
from datetime import timedelta
from typing import Any

import pytest

from redrive.delivery.middleware import sequencing
from redrive.policy.model import SubscriptionType
from tests.contract.delivery.conftest import assert_nothing_left
from tests.support.messages import handle_until_quiet

MakeWorld = Callable[..., Any]
SECOND = timedelta(seconds=1)
SOON = 180 * SECOND


@pytest.fixture(autouse=True)
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


def test_sequenced_dead_letters_record_reason(make_sequenced_world: MakeWorld) -> None:
    world = make_sequenced_world()
    world.send(b"a1", b"a2", partition_key="a")
    handled_until_quiet(world, {b"a1"})
    first, second = (letter.properties() for letter in world.dead_letters(2))
    assert first["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert second["REDRIVE_DEAD_REASON"] == "AfterDeadLetter"
    assert (first["RECONSUMETIMES"], second["RECONSUMETIMES"]) == ("1", "0")
    assert "REDRIVE_CAUSE_TYPE" not in second


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
