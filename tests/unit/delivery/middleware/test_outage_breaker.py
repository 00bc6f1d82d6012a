"""Outages pause a consumer, in virtual time, and use up no retry."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pulsar
import pytest

from redrive import DeadLetter, FailureRules, Policy, PolicyFile, RetryLater
from redrive.delivery import reporting
from redrive.delivery.middleware.outage_breaker import OutageBreaker
from redrive.delivery.reporting import Event, Name, OutageProducer
from redrive.errors import InvalidSpecError
from redrive.policy import codec
from redrive.policy.ladder import Ladder
from redrive.policy.model import OUTAGE, OutageLimits, SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)

POLICY = Policy(
    TopicName("shop", "prod", "orders"),
    "fulfilment",
    max_retries=3,
    ladder=Ladder.from_fixed("1s"),
    outage_breaker=OutageLimits(),
)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


class Warehouse:
    """A dependency of handlers: down for an interval in the time of its consumer."""

    def __init__(self, down: timedelta, up: timedelta) -> None:
        self.down, self.up = down, up
        self.handled: list[str] = []
        self.calls: list[tuple[timedelta, str]] = []
        self.events: list[Event] = []

    def serve(self, consumer: Any) -> None:  # noqa: ANN401 - of any kind
        self.clock, self.began = consumer.broker.clock, consumer.broker.clock.now()

    @property
    def now(self) -> timedelta:
        passed: timedelta = self.clock.now() - self.began
        return passed

    def handle(self, message: pulsar.Message) -> None:
        content = message.data().decode()
        self.calls.append((self.now, content))
        if self.down <= self.now < self.up:
            raise ConnectionError
        self.handled.append(content)

    def events_named(self, name: Name) -> list[Event]:
        return [event for event in self.events if event.event is name]

    @property
    def burnt(self) -> int:
        return len(self.events_named(Name.ATTEMPT_FAILED))


def down_for(hours: float) -> Warehouse:
    return Warehouse(timedelta(), timedelta(hours=hours))


def consumer_of(
    warehouse: Warehouse,
    policy: Policy | PolicyFile = POLICY,
    **options: Any,  # noqa: ANN401 - as the consumer takes them
) -> InMemoryConsumer:
    consumer = InMemoryConsumer(policy, on_event=warehouse.events.append, **options)
    warehouse.serve(consumer)
    return consumer


def send(consumer: Any, count: int, **fields: Any) -> list[str]:  # noqa: ANN401
    contents = [f"{number}" for number in range(count)]
    for content in contents:
        consumer.send(content.encode(), **fields)
    return contents


def test_outage_of_an_hour_costs_nine_attempts() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    contents = send(consumer, 1_000)
    consumer.run(warehouse.handle)
    assert warehouse.burnt == OutageLimits().min_messages - 1
    assert consumer.dead_letters == []
    assert sorted(warehouse.handled) == sorted(contents)
    assert consumer.broker.unsettled() == []
    assert [
        len(warehouse.events_named(name)) for name in (Name.OUTAGE_BEGAN, Name.OUTAGE_ENDED)
    ] == [1, 1]
    assert consumer.outages == ()


def test_probes_are_single_with_back_off_until_success() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    send(consumer, 1_000)
    consumer.run(warehouse.handle)
    probes = [moment for moment, _ in warehouse.calls if timedelta() < moment]
    apart = [later - before for before, later in itertools.pairwise(probes)]
    in_outage = [gap for gap, moment in zip(apart, probes, strict=False) if moment < HOUR]
    assert probes[0] == SECOND
    assert all(SECOND <= gap <= 30 * SECOND for gap in in_outage)
    assert all(gap >= 15 * SECOND for gap in in_outage[6:])
    first_success = next(moment for moment in probes if moment >= HOUR)
    assert first_success - HOUR <= 30 * SECOND


def test_each_probe_is_another_message() -> None:
    warehouse = down_for(0)
    consumer = consumer_of(warehouse)
    contents = send(consumer, 40)

    def handle(message: pulsar.Message) -> None:
        if int(message.data()) < 20:
            raise ConnectionError
        warehouse.handle(message)

    consumer.run(handle)
    assert sorted(warehouse.handled) == sorted(contents[20:])
    assert sorted(letter.data() for letter in consumer.dead_letters) == sorted(
        content.encode() for content in contents[:20]
    )


def test_single_failing_message_is_no_outage() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse, replace(POLICY, max_retries=50))
    consumer.send(b"poison")
    consumer.run(warehouse.handle)
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(consumer.dead_letters) == 1


@pytest.mark.parametrize("topic", ["source", "retry"])
def test_outage_counts_messages_that_share_an_origin(topic: str) -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    carried = {"ORIGIN_MESSAGE_ID": "12:34:0", "RECONSUMETIMES": "1", "REDRIVE_FIRST_ID": "1:1:-1"}
    if topic == "source":  # an application copies the properties of a message
        contents = send(consumer, 300, properties=carried)
    else:  # a batch that was retried by a client in Go
        del carried["REDRIVE_FIRST_ID"]
        producer = InMemoryConsumer(POLICY)
        contents = send(producer, 300, properties=carried)
        for message in producer.broker.unsettled():
            consumer.broker.store(POLICY.retry_topic, message)
    consumer.run(warehouse.handle)
    assert warehouse.burnt == OutageLimits().min_messages - 1
    assert sorted(warehouse.handled) == sorted(contents)
    assert consumer.dead_letters == []


def test_one_failure_in_twenty_never_pauses_a_consumer() -> None:
    warehouse, luck = down_for(0), random.Random(0)  # noqa: S311 - a simulation
    consumer = consumer_of(warehouse)
    contents = send(consumer, 5_000)

    def handle(message: pulsar.Message) -> None:
        if luck.random() < 0.05:
            raise ConnectionError
        warehouse.handle(message)

    consumer.run(handle)
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(warehouse.handled) + len(consumer.dead_letters) == len(contents)


@pytest.mark.parametrize(
    ("error", "rules"),
    [
        (DeadLetter("wrong"), FailureRules()),
        (RetryLater(SECOND), FailureRules()),
    ],
)
def test_requested_retry_or_dead_letter_is_no_outage(error: Exception, rules: FailureRules) -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    send(consumer, 100)

    def handle(_message: pulsar.Message) -> None:
        raise error

    consumer.run(handle, rules=rules)
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(consumer.dead_letters) == 100


@pytest.mark.parametrize(("successes", "dead_letters"), [(0, 9), (100, 49)])
def test_faulty_release_pauses_before_its_backlog_is_dead(
    successes: int, dead_letters: int
) -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    contents = send(consumer, 1_000)

    def handle(message: pulsar.Message) -> None:
        if int(message.data()) < successes:
            return
        try:
            warehouse.handle(message)
        except ConnectionError:
            raise KeyError("items") from None

    consumer.run(handle, rules=FailureRules(dead_letter_on=(KeyError,)))
    (began,) = warehouse.events_named(Name.OUTAGE_BEGAN)
    assert began.reason == "KeyError"
    assert len(consumer.dead_letters) == dead_letters
    assert len(warehouse.handled) == len(contents) - successes - dead_letters


@pytest.mark.parametrize(("successes", "dead_letters"), [(0, 9), (100, 16)])
def test_short_ladder_dead_letters_few_before_the_pause(successes: int, dead_letters: int) -> None:
    """Each message has all its attempts before the next one arrives."""
    warehouse = down_for(0)
    consumer = consumer_of(warehouse, replace(POLICY, max_retries=2))
    send(consumer, successes)
    consumer.run(warehouse.handle)
    warehouse.up = warehouse.now + HOUR
    while not warehouse.events_named(Name.OUTAGE_BEGAN):
        assert warehouse.now < warehouse.up
        send(consumer, 1)
        consumer.run(warehouse.handle)
    assert len(consumer.dead_letters) == dead_letters


def test_malformed_messages_among_others_pause_nothing() -> None:
    warehouse = down_for(0)
    consumer = consumer_of(warehouse)
    send(consumer, 1_000)

    def handle(message: pulsar.Message) -> None:
        if int(message.data()) % 3 == 0:
            raise ValueError
        warehouse.handle(message)

    consumer.run(handle, rules=FailureRules(dead_letter_on=(ValueError,)))
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(consumer.dead_letters) == 334


def test_malformed_messages_in_a_row_are_all_dead_lettered() -> None:
    warehouse = down_for(0)
    consumer = consumer_of(warehouse)
    contents = send(consumer, 300)

    def handle(message: pulsar.Message) -> None:
        if int(message.data()) < 60:
            raise ValueError
        warehouse.handle(message)

    consumer.run(handle, rules=FailureRules(dead_letter_on=(ValueError,)))
    assert warehouse.events_named(Name.OUTAGE_BEGAN)
    assert len(consumer.dead_letters) == 60
    assert len(warehouse.handled) == len(contents) - 60


def test_ignored_not_retryable_failures_pause_nothing() -> None:
    warehouse = down_for(0)
    policy = replace(POLICY, outage_breaker=OutageLimits(count_not_retryable=False))
    consumer = consumer_of(warehouse, policy)
    send(consumer, 100)

    def handle(_message: pulsar.Message) -> None:
        raise ValueError

    consumer.run(handle, rules=FailureRules(dead_letter_on=(ValueError,)))
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(consumer.dead_letters) == 100


def test_dead_lettered_probe_is_followed_by_another() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    contents = send(consumer, 100)

    def handle(message: pulsar.Message) -> None:
        if 30 <= int(message.data()) < 40:
            raise ValueError
        warehouse.handle(message)

    consumer.run(handle, rules=FailureRules(dead_letter_on=(ValueError,)))
    assert len(consumer.dead_letters) == 10
    assert len(warehouse.handled) == len(contents) - 10


def test_outage_pauses_only_its_own_dependency() -> None:
    warehouse = down_for(1)
    breaker = OutageBreaker(dependency=lambda message: message.properties()["region"])
    consumer = consumer_of(warehouse, middleware=[breaker])
    began = warehouse.clock.now()
    for number in range(200):
        region = "north" if number % 2 else "south"
        consumer.send(f"{number}".encode(), properties={"region": region})
    south: list[timedelta] = []

    def handle(message: pulsar.Message) -> None:
        if message.properties()["region"] == "north":
            warehouse.handle(message)
        else:
            south.append(warehouse.clock.now() - began)

    consumer.run(handle)
    assert (len(south), max(south)) == (100, timedelta())
    assert len(warehouse.handled) == 100
    (event,) = warehouse.events_named(Name.OUTAGE_BEGAN)
    assert event.reason == "ConnectionError"


def test_outages_beyond_the_dependency_limit_share_one_circuit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("redrive.delivery.middleware.outage_breaker.MAX_DEPENDENCIES", 2)
    warehouse = down_for(1)
    breaker = OutageBreaker(dependency=lambda message: message.properties()["region"])
    consumer = consumer_of(warehouse, middleware=[breaker])
    for number in range(200):
        region = f"region-{number // 40}"
        consumer.send(f"{number}".encode(), properties={"region": region})
    consumer.run(warehouse.handle)
    assert consumer.dead_letters == []
    assert len(warehouse.handled) == 200
    assert len(warehouse.events_named(Name.OUTAGE_BEGAN)) == 3
    assert consumer.outages == ()


def test_cause_rule_excludes_failures_from_outages() -> None:
    warehouse = down_for(1)
    breaker = OutageBreaker(cause=lambda error: None if isinstance(error, OSError) else "other")
    consumer = consumer_of(warehouse, middleware=[breaker])
    send(consumer, 50)
    consumer.run(warehouse.handle)
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(consumer.dead_letters) == 50


def not_utf8(_: object) -> str:
    return b"\xe9".decode()


def returning(value: object) -> Callable[[object], Any]:
    return lambda _: value


def broken(_: object) -> type:
    raise OSError


HOSTILE = type("Hostile", (), {"__class__": property(broken)})()
BROKEN_RULES = [not_utf8, *map(returning, (None, 3, [], {}, b"north", asyncio.sleep, HOSTILE))]


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_broken_dependency_rule_counts_as_one_dependency(rule: Callable[[object], Any]) -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse, middleware=[OutageBreaker(dependency=rule)])
    contents = send(consumer, 50)
    consumer.run(warehouse.handle)
    assert sorted(warehouse.handled, key=int) == contents
    assert len(warehouse.events_named(Name.OUTAGE_ENDED)) == 1
    assert consumer.dead_letters == []


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_broken_cause_rule_names_no_cause(rule: Callable[[object], Any]) -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse, middleware=[OutageBreaker(cause=rule)])
    send(consumer, 50)
    consumer.run(warehouse.handle)
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert len(consumer.dead_letters) == 50


def test_cause_that_is_not_utf8_is_shown_replaced() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse, middleware=[OutageBreaker(cause=returning("caf\udce9"))])
    send(consumer, 50)
    consumer.run(warehouse.handle)
    (event,) = warehouse.events_named(Name.OUTAGE_BEGAN)
    assert event.reason == "caf?"


class AsyncRule:
    """A rule whose result would have to be awaited."""

    async def __call__(self, _: object) -> str:
        return "region"


@pytest.mark.parametrize(
    "rules",
    [{"cause": "OSError"}, {"dependency": 3}, {"cause": asyncio.sleep}, {"cause": AsyncRule()}],
)
def test_outage_rule_that_is_no_function_is_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match="a rule of an outage breaker must be a function"):
        OutageBreaker(**rules)


@pytest.mark.parametrize("limits", [5, {"window": 5}, "x"])
def test_outage_limits_of_another_type_are_refused(limits: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidSpecError, match="limits must be of the type OutageLimits"):
        OutageBreaker(limits)


def test_failures_count_again_after_the_longest_pause() -> None:
    warehouse = down_for(100)
    limits = OutageLimits(max_pause=HOUR)
    consumer = consumer_of(warehouse, replace(POLICY, outage_breaker=limits))
    send(consumer, 100)
    consumer.run(warehouse.handle)
    assert len(consumer.dead_letters) == 100
    assert HOUR <= warehouse.now < 2 * HOUR
    assert [event.event for event in warehouse.events if event.event.startswith("redrive.outage")]
    assert len(warehouse.events_named(Name.OUTAGE_IGNORED)) == 1
    assert consumer.outages == ()


def test_success_after_an_ignored_outage_arms_the_breaker() -> None:
    warehouse = down_for(2)
    consumer = consumer_of(warehouse, replace(POLICY, outage_breaker=OutageLimits(max_pause=HOUR)))
    send(consumer, 100)
    consumer.run(warehouse.handle)
    consumer.advance(3 * HOUR - warehouse.now)
    send(consumer, 1)
    consumer.run(warehouse.handle)
    warehouse.up = 4 * HOUR
    consumer.broker.dead_letters.clear()
    send(consumer, 100)
    consumer.run(warehouse.handle)
    assert len(warehouse.events_named(Name.OUTAGE_BEGAN)) == 2
    assert consumer.dead_letters == []


def test_ignore_outages_resumes_the_consumer() -> None:
    warehouse = down_for(100)
    consumer = consumer_of(warehouse)
    send(consumer, 100)

    def handle(message: pulsar.Message) -> None:
        if warehouse.now > 10 * SECOND and consumer.outages:
            assert [outage.cause for outage in consumer.outages] == ["ConnectionError"]
            consumer.ignore_outages()
        warehouse.handle(message)

    consumer.run(handle)
    assert len(consumer.dead_letters) == 100
    assert warehouse.now < timedelta(minutes=2)


def test_policy_ignores_outages_and_arms_the_breaker_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(codec.encode(POLICY), encoding="utf-8")
    warehouse = down_for(100)
    consumer = consumer_of(warehouse, PolicyFile(path))
    send(consumer, 100)

    def handle(message: pulsar.Message) -> None:
        if warehouse.now > 10 * SECOND and consumer.outages:
            write(path, replace(POLICY, ignore_outages=True))
        warehouse.handle(message)

    consumer.run(handle)
    assert len(consumer.dead_letters) == 100
    assert warehouse.now < timedelta(minutes=2)
    write(path, POLICY)
    warehouse.up = warehouse.now + HOUR
    send(consumer, 100)
    consumer.run(warehouse.handle)
    assert len(warehouse.events_named(Name.OUTAGE_BEGAN)) == 2
    assert len(consumer.dead_letters) == 100


def write(path: Path, policy: Policy) -> None:
    new = path.with_suffix(".new")
    new.write_text(codec.encode(policy), encoding="utf-8")
    new.replace(path)


def test_breaker_added_to_the_policy_later_takes_effect(
    tmp_path: Path,
) -> None:
    path = tmp_path / "policy.json"
    path.write_text(codec.encode(replace(POLICY, outage_breaker=None)), encoding="utf-8")
    warehouse = down_for(100)
    consumer = consumer_of(warehouse, PolicyFile(path))
    send(consumer, 100)
    consumer.run(warehouse.handle)
    assert len(consumer.dead_letters) == 100
    write(path, POLICY)
    warehouse.up = warehouse.now + HOUR
    send(consumer, 100)
    consumer.run(warehouse.handle)
    assert len(consumer.dead_letters) == 100
    assert len(warehouse.events_named(Name.OUTAGE_BEGAN)) == 1


def test_messages_of_a_key_keep_their_order_in_an_outage() -> None:
    warehouse = down_for(1)
    policy = replace(POLICY, ordered=True, subscription_type=SubscriptionType.KEY_SHARED)
    consumer = consumer_of(warehouse, policy)
    contents = [f"{number}" for number in range(200)]
    for content in contents:
        consumer.send(content.encode(), partition_key=f"{int(content) % 20}")
    consumer.run(warehouse.handle)
    assert consumer.dead_letters == []
    for key in range(20):
        of_key = [content for content in warehouse.handled if int(content) % 20 == key]
        assert of_key == [content for content in contents if int(content) % 20 == key]


def test_ack_timeout_stops_while_a_message_is_held() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse, ack_timeout=timedelta(minutes=1))
    send(consumer, 100)
    consumer.run(warehouse.handle)
    assert {event.reason for event in warehouse.events_named(Name.ATTEMPT_FAILED)} == {
        "ConnectionError"
    }
    assert len(warehouse.handled) == 100


def test_batch_failures_during_an_outage_are_held() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    send(consumer, 1_000)

    def handle(messages: Any) -> list[Exception | None]:  # noqa: ANN401
        try:
            for message in messages:
                warehouse.handle(message)
        except ConnectionError as error:
            return [error] * len(messages)
        return [None] * len(messages)

    consumer.run_batches(handle, size=500)
    assert warehouse.burnt == OutageLimits().min_messages - 1
    assert consumer.dead_letters == []
    assert len(set(warehouse.handled)) == 1_000


def test_repeated_send_counts_its_failure_once() -> None:
    warehouse = down_for(0)
    limits = OutageLimits(min_messages=2)
    consumer = consumer_of(warehouse, replace(POLICY, outage_breaker=limits))
    consumer.broker.refused.add(POLICY.retry_topic)
    contents = send(consumer, 8)
    failed = set(contents[-2:])

    def handle(message: pulsar.Message) -> None:
        if message.data().decode() in failed:
            failed.remove(message.data().decode())
            raise ConnectionError
        warehouse.handle(message)

    consumer.run(handle)
    assert len(warehouse.events_named(Name.UNSENT)) > 8
    consumer.broker.refused.clear()
    consumer.run(handle)
    assert warehouse.events_named(Name.OUTAGE_BEGAN) == []
    assert sorted(warehouse.handled) == contents


async def test_asyncio_consumer_pauses_in_an_outage() -> None:
    warehouse = down_for(1)
    consumer = AsyncInMemoryConsumer(POLICY, on_event=warehouse.events.append)
    warehouse.serve(consumer)
    contents = send(consumer, 300)

    async def handle(message: pulsar.Message) -> None:
        warehouse.handle(message)

    async with consumer:
        await consumer.run(handle)
        assert consumer.outages == ()
    assert sorted(warehouse.handled) == sorted(contents)
    assert warehouse.burnt == OutageLimits().min_messages - 1


def test_simple_consumer_gets_single_probes_in_an_outage() -> None:
    consumer = InMemorySimpleConsumer(POLICY)
    send(consumer, 100)
    invisible = timedelta(seconds=10)
    assert len(consumer.receive(20, invisible)) == 20
    consumer.advance(invisible)
    assert [outage.cause for outage in consumer.outages] == ["InvisibleDurationEndedError"]
    (probe,) = consumer.receive(20, invisible, timedelta(minutes=1))
    assert consumer.receive(20, invisible, timedelta(seconds=5)) == []
    consumer.acknowledge(probe)
    assert consumer.outages == ()
    assert len(consumer.receive(100, invisible, SECOND)) == 99


def test_held_messages_are_redelivered_after_close() -> None:
    warehouse = down_for(1)
    with consumer_of(warehouse) as consumer:
        send(consumer, 100)
        for _ in range(40):
            message = consumer.receive(timedelta())
            if message is None:
                break
            consumer.reconsume_later(message, cause=ConnectionError())
        assert consumer.outages != ()
    assert len(consumer.broker.unsettled()) == 100


def test_unsettled_probe_is_followed_by_another() -> None:
    warehouse = down_for(1)
    consumer = consumer_of(warehouse)
    send(consumer, 100)
    received: list[Callable[[], bytes]] = []
    while not consumer.outages:
        consumer.reconsume_later(consumer.receive(), cause=ConnectionError())
    received = [consumer.receive().data, consumer.receive().data]
    assert received[0]() != received[1]()
    assert warehouse.now <= timedelta(minutes=1)


PUBLISHING_POLICY = Policy(TopicName("shop", "prod", "orders"), "billing")


class Producer:
    """A producer that records its close."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class SilentClient:
    """A client whose broker answers the first call once *answers* is set, others immediately."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.producers: queue.SimpleQueue[Producer] = queue.SimpleQueue()
        self._silent = True

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, _topic: str, **_options: object) -> Producer:
        producer, silent, self._silent = Producer(), self._silent, False
        self.producers.put(producer)
        if silent:
            assert self.answers.wait(30)
        return producer


def test_outage_is_shown_despite_an_unanswered_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "OPEN_SECONDS", 0.1)
    client = SilentClient()
    producer = OutageProducer(cast("pulsar.Client", client), PUBLISHING_POLICY)
    producer.show(OUTAGE, "ConnectionError")
    late = client.producers.get(timeout=30)
    producer.show(OUTAGE, "TimeoutError")
    shown = client.producers.get(timeout=30)  # the broker has still not answered the first time
    client.answers.set()
    assert late.closed.wait(30)
    assert not shown.closed.is_set()
    producer.close()
    assert shown.closed.wait(30)


class RefusingClient(SilentClient):
    """A client whose broker refuses the first calls."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.answers.set()
        self.refusals = refusals
        self.refused = threading.Event()

    def create_producer(self, _topic: str, **_options: object) -> Producer:
        if self.refusals:
            self.refusals -= 1
            self.refused.set()
            raise pulsar.ConnectError
        return super().create_producer(_topic, **_options)


def test_outage_is_shown_once_the_broker_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "REPEAT_SECONDS", 0.01)
    client = RefusingClient(3)
    producer = OutageProducer(cast("pulsar.Client", client), PUBLISHING_POLICY)
    producer.show(OUTAGE, "ConnectionError")
    shown = client.producers.get(timeout=30)
    assert not shown.closed.is_set()
    (record,) = (r for r in caplog.records if r.levelno >= logging.WARNING)
    assert record.getMessage().endswith("not published to the operator: ConnectError")
    producer.close()
    assert shown.closed.wait(30)


class ClosedClient(SilentClient):
    """A client that its program has closed."""

    def create_producer(self, _topic: str, **_options: object) -> Producer:
        raise pulsar.AlreadyClosed


def test_closed_client_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], object]] = []
    monkeypatch.setattr(reporting, "in_background", calls.append)
    producer = OutageProducer(cast("pulsar.Client", ClosedClient()), PUBLISHING_POLICY)
    producer.show(OUTAGE, "ConnectionError")
    (change,) = calls
    change()  # ends


def test_closed_consumer_repeats_no_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def begin(call: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=call, daemon=True))
        threads[-1].start()

    monkeypatch.setattr(reporting, "in_background", begin)
    client = RefusingClient(9)
    producer = OutageProducer(cast("pulsar.Client", client), PUBLISHING_POLICY)
    producer.show(OUTAGE, "ConnectionError")
    assert client.refused.wait(30)
    producer.close()
    (thread,) = threads
    thread.join(10)
    assert not thread.is_alive()
    assert client.refusals == 8


class LimitedClient:
    """A client of a topic that may have so many producers; it records their opening and closing."""

    def __init__(self, limit: int) -> None:
        self.log: list[str] = []
        self._free = limit

    def get_topic_partitions(self, topic: str) -> list[str]:
        return [topic]

    def create_producer(self, _topic: str, properties: dict[str, str]) -> SimpleNamespace:
        if not self._free:
            raise pulsar.ProducerBusy
        self._free -= 1
        self.log.append(f"open {properties[OUTAGE]}")
        return SimpleNamespace(close=partial(self._close, properties[OUTAGE]))

    def _close(self, text: str) -> None:
        self._free += 1
        self.log.append(f"close {text}")


@pytest.mark.parametrize(
    ("limit", "change"), [(2, ["open b", "close a"]), (1, ["close a", "open b"])]
)
def test_outage_stays_published_while_its_text_changes(
    limit: int, change: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Callable[[], object]] = []
    monkeypatch.setattr(reporting, "in_background", calls.append)
    client = LimitedClient(limit)
    producer = OutageProducer(cast("pulsar.Client", client), PUBLISHING_POLICY)
    for text in "ab":
        producer.show(OUTAGE, text)
        calls.pop()()
    producer.close()
    calls.pop()()
    producer.show(OUTAGE, "c")
    assert calls == []
    assert client.log == ["open a", *change, "close b"]


def test_outage_is_shown_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "in_background", lambda call: call())
    client = LimitedClient(2)
    producer = OutageProducer(cast("pulsar.Client", client), PUBLISHING_POLICY)
    producer.show(OUTAGE, "a")
    producer.close()
    assert client.log == ["open a", "close a"]
