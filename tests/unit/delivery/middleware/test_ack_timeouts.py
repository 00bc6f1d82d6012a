"""Messages that are not settled in time."""

from __future__ import annotations

import errno
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pulsar
import pytest

from redrive import CrashLog, Event, Policy
from redrive.delivery.middleware.ack_timeouts import AckTimeouts
from redrive.delivery.middleware.poison_guard import CrashLogFile
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryMessage, VirtualClock
from redrive.testing.consumers import InMemoryConsumer, InMemorySimpleConsumer

NOW = datetime(2026, 11, 23, tzinfo=UTC)


def test_a_message_that_is_handed_out_again_and_again_delays_no_other_ones_end() -> None:
    clock = VirtualClock(NOW)
    ack_timeouts = AckTimeouts(timedelta(seconds=10), clock)
    topic = TopicName("shop", "prod", "orders")
    put_off, other = (
        cast("pulsar.Message", InMemoryMessage(topic, pulsar.MessageId(-1, 1, n), b"", NOW))
        for n in range(2)
    )
    ack_timeouts.begin(put_off)
    ack_timeouts.begin(other)
    clock.advance(timedelta(seconds=1))
    ack_timeouts.begin(put_off)
    assert ack_timeouts.next_end() == 10
    clock.advance(timedelta(seconds=9))
    assert ack_timeouts.expired() == [other]
    assert ack_timeouts.next_end() == 11


POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", ladder=Ladder.from_fixed("5s"))
ORDERED = replace(POLICY, ordered=True, subscription_type=SubscriptionType.KEY_SHARED)
TEN = timedelta(seconds=10)
LONG = timedelta(hours=10)


def receive(consumer: InMemoryConsumer) -> Any:  # noqa: ANN401 - the client publishes no types
    message = consumer.receive(LONG)
    assert message is not None
    return message


def test_a_message_that_timed_out_can_be_settled_when_it_has_come_again_and_frees_its_key() -> None:
    events: list[Event] = []
    consumer = InMemoryConsumer(ORDERED, ack_timeout=TEN, on_event=events.append)
    for content in (b"1", b"2"):
        consumer.send(content, partition_key="k")
    receive(consumer)
    again = receive(consumer)
    assert (again.data(), consumer.attempt_of(again).number) == (b"1", 2)
    consumer.acknowledge(again)
    following = receive(consumer)
    assert following.data() == b"2"
    consumer.acknowledge(following)
    assert consumer.broker.unsettled() == []
    assert "redrive.late_success" not in [event.event for event in events]


def test_a_message_that_timed_out_and_could_not_be_sent_on_can_be_settled_later() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=TEN, handle_again_when_unsent=True)
    consumer.broker.refused.add(POLICY.retry_topic)
    consumer.send(b"x")
    first = receive(consumer)
    consumer.advance(TEN)
    consumer.acknowledge(first)  # too late, and not yet handed out again
    again = receive(consumer)
    assert consumer.attempt_of(again).number == 2
    consumer.acknowledge(again)
    assert consumer.broker.unsettled() == []
    assert consumer.receive(LONG) is None


def test_whatever_is_asked_after_the_time_is_over_is_ignored_not_only_the_first() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=TEN)
    consumer.send(b"x")
    late = receive(consumer)
    consumer.advance(TEN)
    consumer.acknowledge(late)
    consumer.reconsume_later(late)
    consumer.negative_acknowledge(late)
    consumer.hand_back(late)
    (copy,) = consumer.broker.unsettled()
    assert copy.topic == POLICY.retry_topic
    assert consumer.dead_letters == []


def test_no_message_times_out_that_a_rate_holds_back() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=TEN)
    handled: list[bytes] = []
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    consumer.run(lambda message: handled.append(message.data()), max_rate=0.05)
    assert handled == [b"1", b"2", b"3"]
    assert consumer.broker.unsettled() == []


def test_a_note_that_can_not_be_written_loses_no_message_and_ends_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = CrashLogFile.end
    failed: list[str] = []

    def end_but_once(log_file: CrashLogFile, key: str) -> None:
        if not failed:
            failed.append(key)
            raise OSError(errno.ENOSPC, "the disk is full")
        end(log_file, key)

    monkeypatch.setattr(CrashLogFile, "end", end_but_once)
    consumer = InMemoryConsumer(POLICY, crash_log=CrashLog(tmp_path), ack_timeout=TEN)
    for content in (b"1", b"2"):
        consumer.send(content)
    receive(consumer)
    receive(consumer)
    consumer.advance(TEN)
    assert "the disk is full" in caplog.text
    again = [receive(consumer) for _ in range(2)]
    assert sorted((message.data(), message.topic == POLICY.retry_topic) for message in again) == [
        (b"1", False),
        (b"2", True),
    ]
    for message in again:
        consumer.acknowledge(message)
    assert consumer.broker.unsettled() == []
    consumer.close()
    assert not list(tmp_path.glob("*.notes"))


def test_what_can_not_be_judged_stays_with_its_holder() -> None:
    consumer = InMemoryConsumer(replace(POLICY, max_retries=0), ack_timeout=TEN)
    consumer.send(b"x")
    message = receive(consumer)
    wrong: Any = "no exception"
    with pytest.raises(AttributeError):
        consumer.reconsume_later(message, cause=wrong)
    with pytest.raises(AttributeError):
        consumer.negative_acknowledge(message, cause=wrong)
    assert consumer.dead_letters == []
    consumer.advance(TEN)
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "AckTimeoutError"


def test_closing_waits_for_one_message_that_is_out_of_time_and_not_for_all() -> None:
    told: list[Event] = []

    def close(event: Event) -> None:
        told.append(event)
        consumer.close()

    consumer = InMemoryConsumer(POLICY, ack_timeout=TEN, on_event=close)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    for _ in range(3):
        receive(consumer)
    consumer.advance(TEN)
    names = [event.event for event in told if event.event != "redrive.left_unsettled"]
    assert names == ["redrive.attempt_failed", "redrive.retried"]


def test_closing_waits_for_one_message_that_turns_visible_and_not_for_all() -> None:
    told: list[Event] = []

    def close(event: Event) -> None:
        told.append(event)
        consumer.close()

    consumer = InMemorySimpleConsumer(POLICY, on_event=close)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    assert len(consumer.receive(3, TEN)) == 3
    consumer.advance(TEN)
    names = [event.event for event in told if event.event != "redrive.left_unsettled"]
    assert names == ["redrive.attempt_failed", "redrive.retried"]
