"""Topics that take nothing for a while: no attempt is burnt, no message lost, memory is bounded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from redrive import CrashLog, Event, Policy, PolicyFile
from redrive.delivery import forwarder
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.delivery.reporting import Name
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.consumers import InMemoryConsumer

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=2, ladder=Ladder.from_fixed("10m")
)
MINUTE = timedelta(minutes=1)
TAKING = [Name.TAKING_STOPPED, Name.TAKING_RESUMED]


class Failing:
    """A handler that always fails, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _message: object) -> None:
        self.calls += 1
        raise LookupError


def test_an_outage_of_the_retry_topic_burns_no_attempt() -> None:
    consumer, handle = InMemoryConsumer(POLICY), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.run(handle)
    consumer.advance(60 * MINUTE)
    assert handle.calls == 1
    assert [message.topic for message in consumer.broker.unsettled()] == [POLICY.topic]

    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    (moved,) = consumer.broker.unsettled()
    assert moved.topic == POLICY.retry_topic
    assert moved.properties()["RECONSUMETIMES"] == "1"
    consumer.run(handle)
    assert handle.calls == 3
    assert len(consumer.dead_letters) == 1


def test_a_dead_letter_topic_that_is_away_has_nothing_handled_again() -> None:
    consumer, handle = InMemoryConsumer(replace(POLICY, max_retries=0)), Failing()
    consumer.broker.refused.add(POLICY.dead_letter_topic)
    consumer.send(b"x")
    consumer.run(handle)
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    assert handle.calls == 1
    (dead,) = consumer.dead_letters
    assert dead.properties()["RECONSUMETIMES"] == "1"
    assert consumer.broker.unsettled() == []


def test_sends_are_tried_again_after_5_s_and_then_with_back_off_up_to_a_minute() -> None:
    tried: list[float] = []
    consumer = InMemoryConsumer(
        POLICY,
        on_event=lambda event: (
            tried.append(consumer.broker.clock.monotonic())
            if event.event == "redrive.unsent"
            else None
        ),
    )
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    consumer.advance(4 * MINUTE)
    assert tried == [0, 5, 15, 35, 75, 135, 195]


def test_what_waits_follows_at_once_when_one_is_sent() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.broker.refused.add(POLICY.retry_topic)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    for _ in range(3):
        consumer.reconsume_later(consumer.receive(), cause=LookupError())
    consumer.broker.refused.clear()
    consumer.advance(timedelta(seconds=5))
    moved = consumer.broker.unsettled()
    assert [message.topic for message in moved] == [POLICY.retry_topic] * 3


def test_an_attempt_is_reported_as_failed_once_however_often_its_send_is_tried() -> None:
    events: list[Event] = []
    consumer, handle = InMemoryConsumer(POLICY, on_event=events.append), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.run(handle)
    names = [str(event.event) for event in events]
    assert (names.count("redrive.attempt_failed"), names[1:]) == (
        1,
        ["redrive.unsent"] * (len(names) - 1),
    )
    assert len(names) > 10


def test_nothing_new_is_taken_while_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "MAX_UNSENT", 3)
    events: list[Event] = []
    consumer, handle = InMemoryConsumer(POLICY, on_event=events.append), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    for _ in range(10):
        consumer.send(b"x")
    consumer.run(handle)
    assert handle.calls == 3
    assert [event.event for event in events if event.event in TAKING] == TAKING[:1]

    consumer.broker.refused.clear()
    consumer.run(handle)
    assert handle.calls == 30
    assert [event.event for event in events if event.event in TAKING] == TAKING
    assert len(consumer.dead_letters) == 10


def test_a_key_waits_for_its_message_that_can_not_be_dead_lettered() -> None:
    policy = replace(
        POLICY, max_retries=0, ordered=True, subscription_type=SubscriptionType.KEY_SHARED
    )
    consumer, handle = InMemoryConsumer(policy), Failing()
    consumer.broker.refused.add(policy.dead_letter_topic)
    for content in (b"1", b"2"):
        consumer.send(content, partition_key="k")
    consumer.run(handle)
    assert handle.calls == 1
    consumer.broker.refused.clear()
    consumer.run(handle)
    assert [dead.data() for dead in consumer.dead_letters] == [b"1", b"2"]


@pytest.fixture
def followed(tmp_path: Path) -> Callable[[Policy], PolicyFile]:
    """A policy file that can be changed, by its next generation."""

    def write(policy: Policy) -> PolicyFile:
        (tmp_path / "new.json").write_text(codec.encode(policy))
        (tmp_path / "new.json").replace(tmp_path / "policy.json")
        return PolicyFile(tmp_path / "policy.json")

    return write


def test_what_waits_is_decided_again_when_the_policy_has_changed(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    consumer, handle = InMemoryConsumer(followed(POLICY)), Failing()
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.run(handle)
    followed(replace(POLICY, generation=2, ladder=Ladder.from_fixed("30s")))
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    (moved,) = consumer.broker.unsettled()
    assert moved.properties()["DELAY_TIME"] == "30000"
    assert moved.properties()["RECONSUMETIMES"] == "1"
    assert handle.calls == 1


def test_what_was_asked_for_is_asked_for_again_when_the_policy_has_changed(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    consumer = InMemoryConsumer(followed(POLICY))
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive(), delay=7)
    followed(replace(POLICY, generation=2, ladder=Ladder.from_fixed("30s")))
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    (moved,) = consumer.broker.unsettled()
    assert moved.properties()["DELAY_TIME"] == "7000"


def test_dead_letters_that_wait_go_to_the_topic_that_has_replaced_theirs(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    old = replace(POLICY, max_retries=0, dead_letter_topic=POLICY.topic.sibling("old"))
    new = replace(POLICY, generation=2, max_retries=0)
    consumer, handle = InMemoryConsumer(followed(old), broker=InMemoryBroker(new)), Failing()
    consumer.broker.refused.add(new.dead_letter_topic)
    for _ in range(3):
        consumer.send(b"x")
    consumer.run(handle)
    followed(new)
    consumer.advance(10 * MINUTE)
    assert consumer.dead_letters == []
    consumer.broker.refused.clear()
    consumer.advance(MINUTE)
    assert len(consumer.dead_letters) == 3
    assert consumer.broker.unsettled() == []
    assert handle.calls == 3


def test_what_waits_is_discarded_when_the_policy_keeps_dead_letters_no_more(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    events: list[str] = []
    policy = replace(POLICY, max_retries=0)
    consumer = InMemoryConsumer(followed(policy), on_event=lambda event: events.append(event.event))
    consumer.broker.refused.add(POLICY.dead_letter_topic)
    consumer.send(b"x")
    consumer.run(Failing())
    followed(replace(policy, generation=2, dead_letters=False))
    consumer.advance(2 * MINUTE)
    assert consumer.broker.unsettled() == []
    assert (events.count("redrive.attempt_failed"), events[-1]) == (1, "redrive.discarded")


def test_a_letter_on_record_stays_in_its_sequence_when_it_would_be_retried_by_now(
    followed: Callable[[Policy], PolicyFile],
) -> None:
    policy = replace(
        POLICY, max_retries=0, ordered=True, sequenced=True,
        subscription_type=SubscriptionType.KEY_SHARED,
    )  # fmt: skip
    consumer, handle = InMemoryConsumer(followed(policy)), Failing()
    consumer.broker.refused.add(policy.dead_letter_topic)
    for content in (b"1", b"2"):
        consumer.send(content, partition_key="k")
    consumer.run(handle)
    followed(replace(policy, generation=2, max_retries=3))
    consumer.advance(2 * MINUTE)
    consumer.broker.refused.clear()
    consumer.run(handle)
    assert [dead.data() for dead in consumer.dead_letters] == [b"1", b"2"]
    assert consumer.broker.unsettled() == []
    assert handle.calls == 1


def test_who_closes_leaves_what_waits_to_others() -> None:
    consumer = InMemoryConsumer(POLICY)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    consumer.reconsume_later(consumer.receive())
    consumer.close()
    consumer.broker.refused.clear()
    consumer.advance(10 * MINUTE)
    other = InMemoryConsumer(POLICY, broker=consumer.broker)
    message = other.receive()
    assert other.attempt_of(message).number == 1


def test_a_poison_message_is_noted_until_it_is_dead_lettered(tmp_path: Path) -> None:
    consumer = InMemoryConsumer(POLICY)
    key = id_text(consumer.send(b"x"))
    for _ in range(2):
        note = CrashLogFile(tmp_path, POLICY)
        note.begin(key)
        (file,) = tmp_path.glob("*.notes")
        left_behind = file.read_text()
        note.close()
        file.write_text(left_behind)  # as a kill leaves it

    guarded = InMemoryConsumer(
        POLICY, broker=consumer.broker, crash_log=CrashLog(tmp_path, max_redeliveries=0)
    )
    guarded.broker.refused.add(POLICY.dead_letter_topic)
    assert guarded.receive(MINUTE) is None
    guarded.close()
    with closing(CrashLogFile(tmp_path, POLICY)) as note:
        assert note.crashes(key) == 2


def test_a_poison_message_leaves_the_notes_with_its_dead_letter(tmp_path: Path) -> None:
    consumer = InMemoryConsumer(POLICY)
    note = CrashLogFile(tmp_path, POLICY)
    note.begin(id_text(consumer.send(b"x")))
    (file,) = tmp_path.glob("*.notes")
    left_behind = file.read_text()
    note.close()
    file.write_text(left_behind)  # as a kill leaves it
    guarded = InMemoryConsumer(
        POLICY, broker=consumer.broker, crash_log=CrashLog(tmp_path, max_redeliveries=0)
    )
    guarded.broker.refused.add(POLICY.dead_letter_topic)
    assert guarded.receive(MINUTE) is None
    guarded.broker.refused.clear()
    guarded.advance(MINUTE)
    (dead,) = guarded.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "ConsumerCrashError"
    guarded.close()
    assert not list(tmp_path.glob("*.notes"))
