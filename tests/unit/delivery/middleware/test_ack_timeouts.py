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


def test_repeated_delivery_does_not_delay_other_timeouts() -> None:
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


def test_timed_out_message_is_settled_when_it_returns() -> None:
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


def test_timed_out_unsent_message_can_be_settled_later() -> None:
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


def test_settlements_after_the_timeout_are_ignored() -> None:
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


def test_message_delayed_by_a_rate_does_not_time_out() -> None:
    consumer = InMemoryConsumer(POLICY, ack_timeout=TEN)
    handled: list[bytes] = []
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    consumer.run(lambda message: handled.append(message.data()), max_rate=0.05)
    assert handled == [b"1", b"2", b"3"]
    assert consumer.broker.unsettled() == []


def test_failed_note_loses_no_message_and_no_timeout(
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


def test_settlement_with_invalid_cause_keeps_the_message() -> None:
    consumer = InMemoryConsumer(replace(POLICY, max_retries=0), ack_timeout=TEN)
    consumer.send(b"x")
    message = receive(consumer)
    wrong: Any = "no exception"
    with pytest.raises(TypeError, match="got 'no exception'"):
        consumer.reconsume_later(message, cause=wrong)
    with pytest.raises(TypeError, match="got 'no exception'"):
        consumer.negative_acknowledge(message, cause=wrong)
    assert consumer.dead_letters == []
    consumer.advance(TEN)
    (dead,) = consumer.dead_letters
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "AckTimeoutError"


@pytest.mark.parametrize("simple", [False, True], ids=["timed out", "expired"])
def test_close_waits_for_one_late_message_not_for_all(*, simple: bool) -> None:
    events: list[Event] = []

    def close(event: Event) -> None:
        events.append(event)
        consumer.close()

    consumer: InMemoryConsumer | InMemorySimpleConsumer
    if simple:
        consumer = InMemorySimpleConsumer(POLICY, on_event=close)
    else:
        consumer = InMemoryConsumer(POLICY, ack_timeout=TEN, on_event=close)
    for content in (b"1", b"2", b"3"):
        consumer.send(content)
    if isinstance(consumer, InMemorySimpleConsumer):
        assert len(consumer.receive(3, TEN)) == 3
    else:
        for _ in range(3):
            receive(consumer)
    consumer.advance(TEN)
    names = [event.event for event in events if event.event != "redrive.left_unsettled"]
    assert names == ["redrive.attempt_failed", "redrive.retried"]
