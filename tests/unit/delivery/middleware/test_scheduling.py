"""Key ordering, attempts, rate limits, and messages to dead-letter at their next failure."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive import Attempt, Policy, PolicyFile, RetryConsumer
from redrive.delivery.decisions import Attempts
from redrive.delivery.middleware.chain import DONE, Failure, Redeliver, Settlement
from redrive.delivery.middleware.scheduling import (
    REQUESTS_READ_EVERY_SECONDS,
    KeyOrdering,
    OneAttempt,
    RateLimiter,
)
from redrive.delivery.parts import Parts, SystemClock
from redrive.errors import InvalidSpecError
from redrive.messages import id_text
from redrive.policy import codec
from redrive.policy.envelope import DEAD_REASON, RECONSUMETIMES, Cause, Redaction
from redrive.policy.ladder import Ladder
from redrive.policy.model import BLOCKED_KEYS, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.verdict import Retry
from redrive.testing.broker import InMemoryBroker, InMemoryMessage, VirtualClock, VirtualTimer
from redrive.testing.consumers import InMemoryConsumer, InMemorySimpleConsumer
from tests.support.fake_client import FakeClient
from tests.support.waiting import awake_time

START = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


class Consumer:
    """A consumer that hands messages out in order, and again."""

    def __init__(self) -> None:
        self.incoming: deque[pulsar.Message] = deque()
        self.clock = VirtualClock(START)
        self.published: list[Any] = []
        parts = SimpleNamespace(
            incoming=self,
            clock=self.clock,
            outage_reporter=self,
            timer=partial(VirtualTimer, self.clock),
        )
        ordering = KeyOrdering(cast("Parts", parts), lambda: POLICY, by_topic=False)
        self.receive = ordering.receive(self._take)
        self.settle = ordering.settle(lambda _: None)
        self.ordering = ordering

    def _take(self, _: float | None) -> pulsar.Message | None:
        return self.incoming.popleft() if self.incoming else None

    def again(self, message: pulsar.Message, _: float) -> None:
        self.incoming.append(message)

    def hold_new(self, holder: object, *, held: bool) -> None:
        """No new message comes anyway."""

    def show(self, name: str, value: str) -> None:
        assert name == BLOCKED_KEYS
        self.published.append(json.loads(value or "[]"))

    def close(self) -> None:
        """Nothing is open."""

    def fail(self, message: pulsar.Message, attempt: int, seconds: float) -> None:
        """Retry a message after *seconds*."""
        cause = Cause.from_error(
            TimeoutError(), failed_at=START, consumer="c", attempt=attempt, redact=Redaction()
        )
        failed = Attempt(attempt - 1, f"{message.message_id()}", None, cause, None, "first")
        failure = Failure(failed, POLICY, TimeoutError(), cause, raised=True)
        self.settle(Settlement(message, Retry(timedelta(seconds=seconds), attempt), failure))
        self.incoming.append(message)

    def taken(self) -> list[bytes]:
        """Take all messages that are permitted."""
        taken = [message.data() for message in iter(lambda: self.receive(0), None)]
        self.clock.advance(timedelta())  # fires what is due
        return taken

    def handle(self, message: pulsar.Message, handler: Any) -> None:  # noqa: ANN401 - calls back
        self.ordering.handle(lambda _: [handler()])([message])


def of_key(number: int, key: str = "k") -> InMemoryMessage:
    message_id = pulsar.MessageId(0, 1, number, -1)
    topic = TopicName("shop", "prod", "orders")
    return InMemoryMessage(topic, message_id, b"%d" % number, START, key=key)


def test_key_waits_for_a_handler_of_a_settled_message() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2)])
    assert consumer.taken() == [b"1"]

    def time_out() -> None:
        consumer.settle(Settlement(first, DONE))
        assert consumer.taken() == []

    consumer.handle(first, time_out)
    assert consumer.taken() == [b"2"]


def test_redelivery_during_its_handler_waits_in_order() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2)])
    assert consumer.taken() == [b"1"]

    def give_back() -> None:
        consumer.settle(Settlement(first, Redeliver(counted=True, reason="asked")))
        consumer.incoming.append(of_key(1))
        assert consumer.taken() == []

    consumer.handle(first, give_back)
    second = consumer.receive(0)
    assert second is not None
    assert second.data() == b"2"
    consumer.handle(second, lambda: None)
    assert consumer.taken() == []
    consumer.settle(Settlement(second, DONE))
    assert consumer.taken() == [b"1"]


def test_retry_in_place_stays_first_of_its_key() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2)])
    assert consumer.taken() == [b"1"]
    consumer.handle(first, lambda: None)
    consumer.incoming.append(first)
    assert consumer.taken() == [b"1"]
    consumer.settle(Settlement(first, DONE))
    assert consumer.taken() == [b"2"]


def test_key_that_waits_long_is_published_until_it_is_free() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2), of_key(3)])
    assert consumer.taken() == [b"1"]
    consumer.fail(first, 1, seconds=9)
    assert consumer.published == []
    assert consumer.taken() == [b"1"]
    consumer.fail(first, 2, seconds=10)
    consumer.clock.advance(timedelta())
    [[key]] = consumer.published
    assert key.pop("keyHash") not in {"", "k"}
    assert key == {
        "sinceTime": "2026-01-01T00:00:00+00:00",
        "messageID": str(first.message_id()),
        "cause": "TimeoutError",
        "failures": 2,
        "behind": 2,
    }
    consumer.incoming.append(of_key(4))
    assert consumer.taken() == [b"1"]
    assert len(consumer.published) == 1
    consumer.clock.advance(timedelta(seconds=10))
    assert [key["behind"] for [key] in consumer.published] == [2, 3]
    consumer.settle(Settlement(first, DONE))
    consumer.clock.advance(timedelta(hours=1))
    assert consumer.published[2:] == [[]]


def test_keys_blocked_soon_after_another_are_published() -> None:
    consumer, messages = Consumer(), [of_key(number, f"k{number}") for number in range(30)]
    consumer.incoming.extend(messages)
    consumer.taken()
    for message in messages:
        consumer.fail(message, 1, seconds=3_600)
        consumer.clock.advance(timedelta(milliseconds=1))
    assert [len(keys) for keys in consumer.published] == [1]
    consumer.clock.advance(timedelta(hours=1))
    assert [len(keys) for keys in consumer.published] == [1, 20]
    for message in messages[:20]:
        consumer.settle(Settlement(message, DONE))
    consumer.clock.advance(timedelta(hours=1))
    assert [len(keys) for keys in consumer.published] == [1, 20, 10]


def test_key_that_waits_after_its_retry_is_published() -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.append(first)
    consumer.taken()
    consumer.fail(first, 1, seconds=1)
    consumer.clock.advance(timedelta(seconds=9))
    assert consumer.published == []
    consumer.clock.advance(timedelta(seconds=1))
    assert len(consumer.published) == 1


def test_message_whose_key_is_freed_meanwhile_is_taken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.append(first)
    assert consumer.taken() == [b"1"]
    consumer.fail(first, 1, seconds=10)
    assert consumer.taken() == [b"1"]
    (timer,) = consumer.clock.timers

    def settle_first() -> None:
        monkeypatch.undo()
        consumer.settle(Settlement(first, DONE))

    monkeypatch.setattr(timer, "reschedule", settle_first)  # called for the key of the second
    consumer.incoming.append(of_key(2))
    assert consumer.taken() == [b"2"]
    consumer.clock.advance(timedelta(seconds=10))
    assert consumer.published[1:] == [[]]


@pytest.mark.parametrize("number", [1, 2], ids=["in flight", "waiting"])
def test_redelivered_copy_does_not_overtake_its_key(number: int) -> None:
    consumer, first = Consumer(), of_key(1)
    consumer.incoming.extend([first, of_key(2), of_key(number)])
    assert consumer.taken() == [b"1"]
    consumer.settle(Settlement(first, DONE))
    assert consumer.taken() == [b"2"]


def test_retries_in_place_are_counted() -> None:
    ordered = replace(POLICY, ordered=True, subscription_type=SubscriptionType.KEY_SHARED)
    consumer, attempts = InMemoryConsumer(replace(ordered, max_retries=3)), list[Attempt]()
    consumer.send(b"x", partition_key="k")

    def fail(_message: pulsar.Message, attempt: Attempt) -> None:
        attempts.append(attempt)
        if len(attempts) <= 4:
            raise LookupError

    consumer.run(fail)
    assert [attempt.number for attempt in attempts] == [1, 2, 3, 4]
    assert len(consumer.dead_letters) == 1


GO = {"RECONSUMETIMES": "1", "ORIGIN_MESSAGE_ID": "12:34:0", "REAL_TOPIC": str(POLICY.topic)}
"""Properties as the client in Go writes them, equal for all messages of a batch."""


class Again:
    """An incoming that records messages to be handed out again."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def again(self, message: Any, _seconds: float) -> None:  # noqa: ANN401 - as the client has it
        self.messages.append(message)


class Desk:
    """Takes and handles messages one inside the other, as several threads do in parallel."""

    def __init__(self) -> None:
        self.broker = InMemoryBroker(POLICY)
        self.again = Again()
        incoming: Any = self.again
        self.one_attempt = OneAttempt(incoming, Attempts(lambda: POLICY, self.broker.clock))

    def message(self, **headers: str) -> Any:  # noqa: ANN401 - as the client has it
        """Store a message in the retry topic, and return it."""
        message = InMemoryMessage(
            POLICY.retry_topic, pulsar.MessageId.earliest, b"", self.broker.clock.now(),
            headers=GO | headers,
        )  # fmt: skip
        self.broker.store(POLICY.retry_topic, message)
        return self.broker.hand_out(self, None)

    def taken_beside(self, at_work: Any, *messages: Any, settled: bool) -> list[Any]:  # noqa: ANN401
        """Return the *messages* that are taken while a handler has *at_work*."""
        waiting, taken = list(messages), list[Any]()
        take = self.one_attempt.take(lambda: [waiting.pop(0)])

        call = self.one_attempt.at_work.begin((self, 0, 0.0, [at_work]))
        if settled:
            self.one_attempt.at_work.note_settlement(at_work)
        while waiting:
            try:
                taken.extend(take())
            except IndexError:  # the last was put off
                break
        self.one_attempt.at_work.end(call)
        assert sorted([*taken, *self.again.messages], key=id) == sorted(messages, key=id)
        return taken


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_messages_of_one_origin_are_handled_in_parallel(desk: Desk) -> None:
    first, second = desk.message(), desk.message()
    assert desk.taken_beside(first, second, settled=False) == [second]


def test_next_attempt_waits_for_late_handler_and_siblings_do_not(desk: Desk) -> None:
    slow, sibling = desk.message(), desk.message()
    following = desk.message(REDRIVE_FIRST_ID="1:2:3")
    retry = desk.message(REDRIVE_FIRST_ID=f"2:{slow.message_id().entry_id()}:-1")
    others = [sibling, following]
    assert desk.taken_beside(slow, retry, *others, settled=True) == others
    assert desk.again.messages == [retry]
    desk.again.messages.clear()
    assert desk.taken_beside(sibling, retry, settled=True) == [retry]


def test_message_being_handled_is_not_taken_twice(desk: Desk) -> None:
    message = desk.message()
    assert desk.taken_beside(message, message, settled=False) == []


def test_retries_of_a_go_batch_are_handled_in_parallel() -> None:
    client, handled, done = FakeClient(), list[bytes](), threading.Event()
    contents = [b"%d" % number for number in range(40)]

    def handle(message: pulsar.Message) -> None:
        time.sleep(0.02)
        handled.append(message.data())
        if len(handled) == len(contents):
            consumer.stop()
            done.set()

    with RetryConsumer(client.as_pulsar(), POLICY) as consumer:
        client.deliver(POLICY.retry_topic, *contents, properties=GO)
        with awake_time() as passed:
            consumer.run(handle, workers=8)
            assert passed() < 20  # 0.1 s; with one a second 30 s
    assert done.is_set()
    assert sorted(handled) == sorted(contents)


takings = st.lists(
    st.tuples(st.integers(1, 50), st.floats(0, 10), st.floats(0, 3)), min_size=1, max_size=50
)


class Watch:
    """A clock that a rate limit can advance."""

    def __init__(self, rate: float | None) -> None:
        self.clock = VirtualClock(datetime(2026, 1, 1, tzinfo=UTC))
        self.limiter = RateLimiter(rate, self.clock, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    def take(self, count: int = 1, took: float = 0) -> float:
        """Take *count* messages that come after *took* seconds; return the time."""

        def take() -> list[int]:
            self.sleep(took)
            return [0] * count

        assert self.limiter.take(take)() == [0] * count
        return self.clock.monotonic()


@given(st.floats(0.1, 1_000), takings)
def test_rate_limit_spaces_messages_by_their_share(
    rate: float, takings: list[tuple[int, float, float]]
) -> None:
    watch, ahead = Watch(rate), None
    for count, idle, took in takings:
        watch.sleep(idle)
        begins = watch.take(count, took)
        if ahead is not None:
            before, begun = ahead
            assert begins - begun >= before / rate - 1e-5
        ahead = (count, begins)


def test_rate_limit_does_not_catch_up_after_idle_time() -> None:
    watch = Watch(2)
    assert [watch.take() for _ in range(3)] == [0.0, 0.5, 1.0]
    watch.sleep(999)
    assert [watch.take() for _ in range(3)] == [1_000.0, 1_000.5, 1_001.0]


def test_missing_rate_limit_delays_nothing() -> None:
    watch = Watch(None)
    assert [watch.take(1_000) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_threads_share_one_rate_limit() -> None:
    limiter, moments = RateLimiter(20, SystemClock(), time.sleep), []

    def take() -> list[int]:
        moments.append(time.monotonic())
        return [0]

    threads = [threading.Thread(target=limiter.take(take)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(moments) == 5
    assert all(after - before >= 0.049 for before, after in itertools.pairwise(moments))


@pytest.mark.parametrize("rate", [0, -1])
def test_rate_limit_of_zero_is_refused(rate: float) -> None:
    with pytest.raises(InvalidSpecError, match="use pause"):
        Watch(rate)


SLOW_POLICY = Policy(
    "persistent://shop/prod/orders",
    "fulfilment",
    max_retries=16,
    ladder=Ladder.from_fixed("70s"),  # the requests are read every minute
)
ORDERED = replace(SLOW_POLICY, subscription_type=SubscriptionType.KEY_SHARED, ordered=True)


class Policies:
    """The policy file of a consumer."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.path, self.policy = folder / "policy.json", policy
        self.path.write_text(codec.encode(policy), encoding="utf-8")

    def end_now(self, origin: str) -> None:
        new = self.path.with_suffix(".new")
        policy = replace(self.policy, dead_letter_now=frozenset({origin}))
        new.write_text(codec.encode(policy), encoding="utf-8")
        new.replace(self.path)


@pytest.mark.parametrize("policy", [SLOW_POLICY, ORDERED], ids=["shared", "per key"])
def test_named_message_is_dead_at_its_next_failure(tmp_path: Path, policy: Policy) -> None:
    policies = Policies(tmp_path, policy)
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison", partition_key="k"))
    for _ in range(20):
        consumer.send(b"good", partition_key="k")
    began, handled = consumer.broker.clock.now(), []

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"poison":
            if consumer.broker.clock.now() - began >= timedelta(minutes=2):
                policies.end_now(origin)
            raise ValueError
        handled.append(consumer.broker.clock.now() - began)

    consumer.run(handle)
    (letter,) = consumer.dead_letters
    assert letter.properties()[DEAD_REASON] == "Requested"
    assert letter.properties()[RECONSUMETIMES] == "3"
    assert len(handled) == 20
    assert all(when < timedelta(minutes=3) for when in handled)
    assert (min(handled) >= timedelta(minutes=2)) is policy.ordered
    assert consumer.broker.unsettled() == []


def test_request_ends_the_wait_of_a_blocked_key(tmp_path: Path) -> None:
    policies = Policies(tmp_path, replace(ORDERED, ladder=Ladder.from_fixed("2h")))
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison", partition_key="k"))
    consumer.send(b"behind", partition_key="k")
    consumer.send(b"other", partition_key="other")
    began, handled = consumer.broker.clock.now(), {}

    def handle(message: pulsar.Message) -> None:
        if message.data() == b"poison":
            raise ValueError
        if message.data() == b"other":  # the poison has failed
            policies.end_now(origin)
        handled[message.data()] = consumer.broker.clock.now() - began

    consumer.run(handle)
    (letter,) = consumer.dead_letters
    assert letter.properties()[DEAD_REASON] == "Requested"
    assert letter.properties()[RECONSUMETIMES] == "2"
    assert handled[b"behind"] <= timedelta(seconds=REQUESTS_READ_EVERY_SECONDS)
    assert consumer.broker.unsettled() == []


def test_negatively_acknowledged_message_is_dead_if_named(tmp_path: Path) -> None:
    policies = Policies(tmp_path, SLOW_POLICY)
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison"))
    consumer.negative_acknowledge(consumer.receive())
    assert consumer.dead_letters == []
    consumer.advance(timedelta(minutes=2))
    policies.end_now(origin)
    consumer.negative_acknowledge(consumer.receive())
    (letter,) = consumer.dead_letters
    assert letter.properties()[DEAD_REASON] == "Requested"


def test_message_of_simple_consumer_is_dead_if_named(tmp_path: Path) -> None:
    policies = Policies(tmp_path, SLOW_POLICY)
    consumer = InMemorySimpleConsumer(PolicyFile(policies.path))
    origin = id_text(consumer.send(b"poison"))
    policies.end_now(origin)
    consumer.advance(timedelta(minutes=1))
    (message,) = consumer.receive(1, invisible=10)
    consumer.fail(message, cause=ValueError())
    assert [letter.properties()[DEAD_REASON] for letter in consumer.dead_letters] == ["Requested"]


def test_named_message_is_retried_without_dead_letters(tmp_path: Path) -> None:
    policies = Policies(tmp_path, replace(SLOW_POLICY, dead_letters=False))
    consumer = InMemoryConsumer(PolicyFile(policies.path))
    policies.end_now(id_text(consumer.send(b"poison")))
    consumer.advance(timedelta(minutes=1))
    calls = []

    def handle(message: pulsar.Message) -> None:
        calls.append(message)
        raise ValueError

    consumer.run(handle)
    assert len(calls) == 17
