"""Guarantees of a consumer, at a real broker and in memory alike."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive import DeadLetter, Done, Event, FailureRules, NotRunError, PolicyFile, RetryLater
from redrive.delivery.fetcher import ConsumerStoppedError
from redrive.errors import InvalidSpecError
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.model import SubscriptionType
from tests.contract.delivery.conftest import BOTH, BOTH_AT_BROKER, Observed, assert_nothing_left

MakeWorld = Callable[..., Any]
SOON = timedelta(seconds=180)


@BOTH_AT_BROKER
def test_failing_message_is_dead_lettered_after_all_attempts(
    make_world: MakeWorld,
) -> None:
    world = make_world(delays=("2s", "3s"), max_retries=2)
    (origin,) = world.send(b"bad", partition_key="k", properties={"mine": "1"})
    with world.consumer() as consumer:
        attempts = []
        for number in (1, 2, 3):
            message = consumer.receive(SOON)
            attempts.append(consumer.attempt_of(message))
            consumer.reconsume_later(message, cause=ValueError(f"no {number}"))
        assert consumer.receive(timedelta(seconds=1)) is None

    assert [attempt.number for attempt in attempts] == [1, 2, 3]
    assert {attempt.origin for attempt in attempts} == {id_text(origin)}
    assert [attempt.cause and attempt.cause.message for attempt in attempts] == [
        None, "no 1", "no 2",
    ]  # fmt: skip
    (dead,) = world.dead_letters(1)
    assert (dead.data(), dead.partition_key()) == (b"bad", "k")
    properties = dead.properties()
    assert properties["mine"] == "1"
    assert properties["RECONSUMETIMES"] == "3"
    assert properties["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert properties["REDRIVE_CAUSE_MESSAGE"] == "no 3"
    assert_nothing_left(world)


@BOTH
@pytest.mark.parametrize("content", [b"payload", b"", None])
def test_everything_of_the_user_survives_a_hop(make_world: MakeWorld, content: bytes) -> None:
    world = make_world()
    world.send(
        content,
        partition_key="schlüssel",
        ordering_key="order",
        event_timestamp=1_700_000_000_123,
        properties={"tenant": "größe", "empty": "", "RECONSUMETIMES": "999"},
    )
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
        moved = consumer.receive(SOON)
        assert moved.topic_name() == str(world.policy.retry_topic)
        assert moved.has_null_value() == (content is None)
        assert moved.data() == (content or b"")
        assert (moved.partition_key(), moved.ordering_key()) == ("schlüssel", "order")
        assert moved.event_timestamp() == 1_700_000_000_123
        assert moved.properties()["tenant"] == "größe"
        assert moved.properties()["RECONSUMETIMES"] == "1"
        consumer.reconsume_later(moved, level=-1)
    (dead,) = world.dead_letters(1)
    assert dead.has_null_value() == (content is None)
    assert dead.data() == (content or b"")
    assert (dead.partition_key(), dead.ordering_key()) == ("schlüssel", "order")
    assert dead.event_timestamp() == 1_700_000_000_123
    assert {"tenant": "größe", "empty": ""}.items() <= dead.properties().items()
    assert_nothing_left(world)


@BOTH
def test_a_delay_a_level_and_dead_lettering_can_be_asked_for(make_world: MakeWorld) -> None:
    world = make_world(delays=("1h",))
    world.send(b"delay")
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON), delay=timedelta(seconds=2))
        consumer.reconsume_later(consumer.receive(SOON), level=1)
        message = consumer.receive(SOON)
        assert message.properties()["DELAY_TIME"] == "1000"
        consumer.reconsume_later(message, level=-1)
    (dead,) = world.dead_letters(1)
    assert dead.properties()["REDRIVE_DEAD_REASON"] == "Requested"
    assert "REDRIVE_CAUSE_TYPE" not in dead.properties()
    assert dead.properties()["RECONSUMETIMES"] == "3"


@BOTH
def test_a_retry_is_not_delivered_before_it_is_due(make_world: MakeWorld) -> None:
    world = make_world(delays=("1h",))
    world.send(b"later", b"soon")
    with world.consumer() as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
        consumer.reconsume_later(consumer.receive(SOON), delay=timedelta(seconds=2))
        assert consumer.receive(SOON).data() == b"soon"
        assert consumer.receive(timedelta(seconds=1)) is None


@BOTH
def test_a_wrong_way_to_ask_settles_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"x")
    with world.consumer() as consumer:
        message = consumer.receive(SOON)
        with pytest.raises(InvalidSpecError, match="not both"):
            consumer.reconsume_later(message, delay=timedelta(seconds=1), level=1)
    assert world.backlog(world.policy.topic) == 1


@BOTH
def test_in_flight_messages_of_closed_consumer_go_to_the_next(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"in-flight", b"handled", b"waiting")
    with world.consumer() as consumer:
        consumer.receive(SOON)
        consumer.acknowledge(consumer.receive(SOON))
    with world.consumer() as consumer:
        again = [consumer.receive(SOON) for _ in range(2)]
        assert sorted(message.data() for message in again) == [b"in-flight", b"waiting"]
        assert [message.redelivery_count() for message in again] == [0, 0]
        assert consumer.receive(timedelta(seconds=1)) is None


@BOTH_AT_BROKER
def test_run_retries_errors_and_dead_letters_by_rule(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"good", b"flaky", b"malformed")
    consumer = world.consumer()
    handled: list[bytes] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        if len(handled) == 4:
            consumer.stop()
        if message.data() == b"malformed":
            raise ValueError
        if message.data() == b"flaky" and handled.count(b"flaky") == 1:
            raise ConnectionError

    consumer.run(handle, rules=FailureRules(dead_letter_on=(ValueError,)))
    consumer.close()

    assert sorted(handled) == [b"flaky", b"flaky", b"good", b"malformed"]
    (dead,) = world.dead_letters(1)
    assert dead.properties()["REDRIVE_DEAD_REASON"] == "NotRetryable"
    assert "at " in dead.properties()["REDRIVE_CAUSE_TRACE"]
    assert_nothing_left(world)


@BOTH_AT_BROKER
def test_only_failed_messages_of_a_batch_are_retried(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1)
    world.send(*[f"{n}".encode() for n in range(6)])
    consumer = world.consumer()
    seen: list[bytes] = []

    def handle(messages: Sequence[Any]) -> list[Done | Exception | None]:
        assert len(messages) <= 4
        seen.extend(message.data() for message in messages)
        if len(seen) == 8:
            consumer.stop()
        outcomes: dict[bytes, Exception | None] = {b"3": None}
        if seen.count(b"5") == 1:
            outcomes[b"5"] = KeyError("odd one")
        return [outcomes.get(message.data(), Done()) for message in messages]

    consumer.run_batches(handle, size=4, explicit=True)
    consumer.close()

    (dead,) = world.dead_letters(1)
    assert dead.data() == b"3"
    assert sorted(seen) == sorted([*(f"{n}".encode() for n in range(6)), b"3", b"5"])
    assert_nothing_left(world)


@BOTH
def test_handed_back_message_returns_as_the_same_attempt(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.send(b"x")
    with world.consumer() as consumer:
        consumer.hand_back(consumer.receive(SOON))
        again = consumer.receive(SOON)
        assert (again.data(), consumer.attempt_of(again).number) == (b"x", 1)
        consumer.acknowledge(again)
        assert consumer.receive(timedelta(seconds=0.5)) is None
    assert_nothing_left(world)


@BOTH
def test_nothing_is_handed_out_between_pause_and_resume(make_world: MakeWorld) -> None:
    world = make_world()
    with world.consumer() as consumer:
        consumer.pause()
        world.send(b"x")
        assert consumer.receive(timedelta(seconds=1)) is None
        assert consumer.receive_batch(5, timedelta(seconds=1)) == []
        consumer.resume()
        assert [m.data() for m in consumer.receive_batch(1, SOON)] == [b"x"]


@BOTH
def test_a_stopped_consumer_hands_out_nothing(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"x")
    with world.consumer() as consumer:
        consumer.stop()
        with pytest.raises(ConsumerStoppedError, match="was stopped; make a new one"):
            consumer.receive(SOON)
        consumer.run(print)
    assert world.backlog(world.policy.topic) == 1


@BOTH
def test_a_changed_policy_file_decides_about_the_next_failure(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    world = make_world(delays=("2s",))
    file = tmp_path / "policy.json"
    file.write_text(codec.encode(world.policy))
    world.send(b"x")
    with world.consumer(PolicyFile(file)) as consumer:
        consumer.reconsume_later(consumer.receive(SOON))
        message = consumer.receive(SOON)  # in flight while the policy changes
        changed = replace(world.policy, max_retries=1, generation=7)
        (tmp_path / "new.json").write_text(codec.encode(changed))
        (tmp_path / "new.json").replace(file)
        for _ in range(180):  # it is looked at once a second
            if consumer.policy != changed:
                assert consumer.receive(timedelta(seconds=1)) is None
        assert consumer.policy == changed
        consumer.reconsume_later(message)
    (dead,) = world.dead_letters(1)
    assert dead.properties()["RECONSUMETIMES"] == "2"
    assert_nothing_left(world)


@BOTH
def test_negatively_acknowledged_message_is_dead_lettered(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=2)
    (origin,) = world.send(b"x")
    numbers: list[int] = []
    nack_delay = timedelta(seconds=1)
    with world.consumer(
        nack_delay=nack_delay, on_event=lambda event: numbers.append(event.attempt)
    ) as consumer:
        for redeliveries in range(3):
            message = consumer.receive(SOON)
            assert message.topic_name() == str(world.policy.topic)
            assert message.redelivery_count() == redeliveries
            assert consumer.attempt_of(message).number == redeliveries + 1
            consumer.negative_acknowledge(message, cause=ValueError("not here"))
        assert consumer.receive(timedelta(seconds=3)) is None
    (dead,) = world.dead_letters(1)
    properties = dead.properties()
    assert properties["RECONSUMETIMES"] == "3"
    assert properties["ORIGIN_MESSAGE_ID"] == id_text(origin)
    assert properties["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert properties["REDRIVE_CAUSE_MESSAGE"] == "not here"
    assert properties["REDRIVE_ATTEMPT"] == "3"
    assert numbers == [1, 2, 3]
    assert_nothing_left(world)


@BOTH
@pytest.mark.parametrize(
    "subscription_type", [SubscriptionType.EXCLUSIVE, SubscriptionType.FAILOVER]
)
def test_negative_acks_are_counted_if_the_broker_counts_none(
    make_world: MakeWorld, subscription_type: SubscriptionType
) -> None:
    world = make_world(max_retries=1, kind=subscription_type)
    world.send(b"bad", b"good")
    handled: list[bytes] = []
    with world.consumer(nack_delay=timedelta(seconds=0.5)) as consumer:
        while message := consumer.receive(
            SOON if handled.count(b"bad") < 2 or b"good" not in handled else timedelta(seconds=3)
        ):
            handled.append(message.data())
            if message.data() == b"good":
                consumer.acknowledge(message)
            else:
                consumer.negative_acknowledge(message)
    assert (handled.count(b"bad"), set(handled)) == (2, {b"bad", b"good"})
    (dead,) = world.dead_letters(1)
    assert (dead.data(), dead.properties()["RECONSUMETIMES"]) == (b"bad", "2")
    assert_nothing_left(world)


@BOTH
def test_ack_timeout_fails_the_attempt_and_late_calls_are_void(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=3)
    world.send(b"prompt", b"slow")
    events: list[Event] = []
    options = {"ack_timeout": timedelta(seconds=4), "on_event": events.append}
    with world.consumer(**options) as consumer:
        prompt = consumer.receive(SOON)
        consumer.acknowledge(prompt)  # in time, and its time ends while the other is late
        consumer.acknowledge(prompt)  # once more changes nothing
        late = [consumer.receive(SOON)]
        for number in (2, 3):
            late.append(consumer.receive(SOON))
            attempt = consumer.attempt_of(late[-1])
            assert attempt.number == number
            assert attempt.cause.type == "AckTimeoutError"
            assert late[-1].topic_name() == str(world.policy.retry_topic)
        consumer.acknowledge(late[0])
        consumer.reconsume_later(late[1], level=-1)
        consumer.acknowledge(late[2])  # in time
        assert consumer.receive(timedelta(seconds=1)) is None
    # In no order: a retried message may come again before the broker knows.
    assert Counter(event.event.value for event in events) == {
        "redrive.attempt_failed": 2,
        "redrive.retried": 2,
        "redrive.late_success": 1,
    }
    world.dead_letters(0)
    assert_nothing_left(world)


@BOTH
def test_message_of_a_refused_call_still_times_out(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=0)
    world.send(b"x")
    observed = Observed()
    with world.consumer(ack_timeout=timedelta(seconds=3), on_event=observed) as consumer:
        message = consumer.receive(SOON)
        with pytest.raises(InvalidSpecError, match="864000"):
            consumer.reconsume_later(message, delay=timedelta(days=11))
        observed.wait(consumer, "redrive.dead_lettered", 1)  # its time is over
        consumer.acknowledge(message)
    (dead,) = world.dead_letters(1)
    assert dead.properties()["REDRIVE_CAUSE_TYPE"] == "AckTimeoutError"


@BOTH
def test_a_consumer_that_is_refused_keeps_no_message_from_others(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.send(*[f"{n}".encode() for n in range(6)])
    with (
        pytest.raises(InvalidSpecError, match="an acknowledgement time-out must be positive"),
        world.consumer(ack_timeout=timedelta()),
    ):
        pass
    with world.consumer() as consumer:
        received = [consumer.receive(SOON) for _ in range(6)]
    assert None not in received


@BOTH
def test_handler_requests_override_the_failure_rules(
    make_world: MakeWorld,
) -> None:
    world = make_world(delays=("10d",), max_retries=1)
    world.send(b"busy", b"bad", b"always busy")
    handled: Counter[bytes] = Counter()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled[message.data()] += 1
        if message.data() == b"bad":
            raise DeadLetter("no such order") from LookupError("42")
        if handled.total() == 5:
            consumer.stop()
        if message.data() == b"always busy" or handled[message.data()] == 1:
            raise RetryLater(timedelta(seconds=1))

    with world.consumer() as consumer:
        consumer.run(handle, rules=FailureRules(retry_on=()))
    assert handled == {b"busy": 2, b"bad": 1, b"always busy": 2}
    dead = {letter.data(): letter.properties() for letter in world.dead_letters(2)}
    assert dead[b"bad"]["REDRIVE_DEAD_REASON"] == "Requested"
    assert dead[b"bad"]["REDRIVE_CAUSE_TYPE"] == "LookupError"
    assert dead[b"always busy"]["REDRIVE_DEAD_REASON"] == "RetriesExhausted"
    assert dead[b"always busy"]["REDRIVE_CAUSE_TYPE"] == "RetryLater"
    assert_nothing_left(world)


@BOTH
def test_negative_acknowledgement_is_reported_with_its_cause(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"x")
    events: list[Event] = []
    with world.consumer(on_event=events.append) as consumer:
        message = consumer.receive(SOON)
        consumer.negative_acknowledge(message, cause=ConnectionError())
    (event,) = events
    assert event.event == "redrive.negatively_acknowledged"
    assert (event.reason, event.attempt) == ("ConnectionError", 1)
    assert event.origin == event.message_id


@BOTH
def test_lambda_around_a_coroutine_ends_run(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=0)
    world.send(b"x")

    async def handle(_message: pulsar.Message) -> None:
        await asyncio.sleep(0)

    with world.consumer() as consumer, pytest.raises(NotRunError, match="AsyncRetryConsumer"):
        consumer.run(lambda message: handle(message))  # noqa: PLW0108 - hides the coroutine
    assert world.backlog(world.policy.topic) == 1
    world.dead_letters(0)
