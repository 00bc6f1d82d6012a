"""Guarantees of `run` to handlers, at a broker and in memory, also with hostile metadata."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pulsar
import pulsar.schema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive import Attempt, BroadcastConsumer, Event, FailureRules
from redrive.delivery.arrivals import EarlyRetries
from redrive.delivery.consumers import simple
from redrive.delivery.middleware.outage_breaker import OutageBreaker
from redrive.delivery.reporting import Name
from redrive.policy.model import OutageLimits, SubscriptionType
from sandbox.pulsar import SUPERUSER
from tests.contract.delivery.conftest import BOTH, assert_nothing_left
from tests.support.hostile_metadata import metadata, single
from tests.support.raw_entries import RawEntry, in_batch, numbers, store
from tests.support.topics import drain
from tests.support.waiting import wait_until

MakeWorld = Callable[..., Any]
SOON = timedelta(seconds=180)
ProvisionPolicy = Callable[..., Any]
SECOND = timedelta(seconds=1)
MINUTE = 60 * SECOND
entries = st.lists(
    st.tuples(metadata, st.none() | st.lists(single, min_size=1, max_size=3)),
    min_size=20,
    max_size=20,
)
Drawn = list[tuple[bytes, list[bytes] | None]]
some_examples = settings(
    max_examples=2, suppress_health_check=list(HealthCheck), deadline=None, database=None
)


def test_a_handler_gets_the_attempt_if_it_takes_one(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1)
    world.send(b"x")
    numbers: list[int] = []
    consumer = world.consumer()

    def handle(_message: Any, attempt: Attempt) -> None:  # noqa: ANN401 - the client has no types
        numbers.append(attempt.number)
        if attempt.number == 1:
            raise ConnectionError
        consumer.stop()

    consumer.run(handle)
    consumer.close()
    assert numbers == [1, 2]
    assert_nothing_left(world)


def test_a_handler_may_close_its_consumer(make_world: MakeWorld) -> None:
    world = make_world()
    world.send(b"1", b"2")
    consumer = world.consumer()
    handled: list[bytes] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        consumer.close()

    consumer.run(handle)
    assert handled == [b"1"]
    wait_until(lambda: world.backlog(world.policy.topic) == 1)
    with world.consumer() as following:
        message = following.receive(SOON)
        assert message.data() == b"2"
        following.acknowledge(message)
    assert_nothing_left(world)


@BOTH
def test_rules_apply_to_causes_and_members_of_groups(
    make_world: MakeWorld,
) -> None:
    world = make_world(delays=("10d",))
    world.send(b"from", b"group", b"other")
    handled: list[bytes] = []
    consumer = world.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        if len(handled) == 3:
            consumer.stop()
        if message.data() == b"from":
            raise RuntimeError from LookupError("no such order")
        if message.data() == b"group":
            raise ExceptionGroup("two", [LookupError("no such order"), LookupError("nor this")])
        raise RuntimeError

    consumer.run(handle, rules=FailureRules(dead_letter_on=(LookupError,)))
    consumer.close()
    dead = {letter.data() for letter in world.dead_letters(2)}
    assert dead == {b"from", b"group"}
    assert world.backlog(world.policy.retry_topic) == 1


class Panic(BaseException):
    """A panic in Rust, as PyO3 raises it."""


@pytest.mark.parametrize("error", [Panic(), asyncio.CancelledError()], ids=["panic", "cancelled"])
@BOTH
def test_handler_failure_that_is_no_exception_stops_no_run(
    make_world: MakeWorld, error: BaseException
) -> None:
    world = make_world(max_retries=1)
    world.send(b"bad", b"good")
    calls: Counter[bytes] = Counter()
    consumer = world.consumer()

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        calls[message.data()] += 1
        if calls.total() == 3:
            consumer.stop()
        if message.data() == b"bad":
            raise error

    consumer.run(handle, workers=2)
    consumer.close()
    assert calls == {b"bad": 2, b"good": 1}
    (dead,) = world.dead_letters(1)
    assert dead.data() == b"bad"
    assert_nothing_left(world)


@BOTH
def test_outage_uses_up_no_retry_and_a_probe_ends_it(make_world: MakeWorld) -> None:
    world = make_world(max_retries=1, delays=("10d",))
    world.send(*[f"{number}".encode() for number in range(30)])
    events: list[Event] = []
    failures: Counter[bytes] = Counter()
    handled: set[bytes] = set()
    limits = OutageLimits(max_probe_interval=1)
    consumer = world.consumer(on_event=events.append, middleware=[OutageBreaker(limits)])

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        if failures.total() < 13:  # ten before the outage is seen, and three probes
            failures[message.data()] += 1
            raise ConnectionError
        handled.add(message.data())
        if len(handled) == 21:
            consumer.stop()

    consumer.run(handle)
    consumer.close()
    counts = Counter(event.event for event in events)
    assert (counts[Name.ATTEMPT_FAILED], counts[Name.RETRIED], counts[Name.HELD]) == (9, 9, 4)
    assert (counts[Name.OUTAGE_BEGAN], counts[Name.OUTAGE_ENDED]) == (1, 1)
    world.dead_letters(0)
    wait_until(lambda: world.backlog(world.policy.topic) == 0)
    assert world.backlog(world.policy.retry_topic) == 9


class Order(pulsar.schema.Record):  # type: ignore[misc]  # the client has no types
    """The type of the messages of the source topic."""

    number = pulsar.schema.Integer(required=True)


@BOTH
def test_handler_gets_decoded_values_others_are_dead_lettered(
    make_world: MakeWorld,
) -> None:
    world = make_world(max_retries=1)
    orders = pulsar.schema.JsonSchema(Order)
    handled: list[tuple[int, int]] = []

    def handle(message: pulsar.Message) -> None:
        number = message.value().number
        attempt = consumer.attempt_of(message).number
        handled.append((number, attempt))
        if len(handled) == 2:
            consumer.stop()
        if attempt == 1:
            raise ConnectionError

    with world.consumer(schema=orders) as consumer:
        world.send(b"\xff no order", orders.encode(Order(number=7)))
        consumer.run(handle, rules=FailureRules(retry_on=(ConnectionError,)))
    assert handled == [(7, 1), (7, 2)]
    (dead,) = world.dead_letters(1)
    assert dead.data() == b"\xff no order"


@BOTH
def test_simple_consumer_gets_decoded_values(make_world: MakeWorld) -> None:
    world = make_world()
    orders = pulsar.schema.JsonSchema(Order)
    with world.simple_consumer(schema=orders) as consumer:
        world.send(orders.encode(Order(number=7)))
        (message,) = consumer.receive(1, timedelta(minutes=1), SOON)
        assert message.value().number == 7
        consumer.acknowledge(message)
    assert_nothing_left(world)


class Sent:
    """The messages of some entries, by their contents; every second entry is to fail."""

    def __init__(self, drawn: Drawn) -> None:
        self.entries: list[RawEntry] = []
        self.contents: set[bytes] = set()
        self.failing: set[bytes] = set()
        for index, (fields, singles) in enumerate(drawn):
            contents = [b"%d/%d" % (index, place) for place in range(len(singles or [b""]))]
            if singles is None:
                self.entries.append(RawEntry(fields, contents[0]))
            else:
                batch = b"".join(map(in_batch, contents, singles))
                self.entries.append(RawEntry(fields + numbers(in_batch=len(singles)), batch))
            self.contents.update(contents)
            self.failing.update(contents if index % 2 else ())
        self.handled: set[bytes] = set()

    @property
    def is_through(self) -> bool:
        return self.handled == self.contents

    def handle(self, message: pulsar.Message) -> None:
        """Fail some messages."""
        content = message.data()
        assert content in self.contents
        self.handled.add(content)
        if content in self.failing:
            raise LookupError


def run(world: Any, sent: Sent) -> None:  # noqa: ANN401
    with world.consumer() as consumer:

        def handle(message: pulsar.Message) -> None:
            try:
                sent.handle(message)
            finally:
                if sent.is_through:
                    consumer.stop()

        consumer.run(handle, workers=4)


def run_batches(world: Any, sent: Sent) -> None:  # noqa: ANN401
    with world.consumer() as consumer:

        def handle(messages: Sequence[pulsar.Message]) -> list[LookupError | None]:
            results: list[LookupError | None] = []
            for message in messages:
                try:
                    sent.handle(message)
                    results.append(None)
                except LookupError as error:
                    results.append(error)
            if sent.is_through:
                consumer.stop()
            return results

        consumer.run_batches(handle, size=10, wait=SECOND)


def receive(world: Any, sent: Sent) -> None:  # noqa: ANN401
    with world.consumer() as consumer:
        while not sent.is_through:
            message = consumer.receive(MINUTE)
            try:
                sent.handle(message)
            except LookupError as error:
                consumer.reconsume_later(message, cause=error)
            else:
                consumer.acknowledge(message)


def run_with_asyncio(world: Any, sent: Sent) -> None:  # noqa: ANN401
    async def consume() -> None:
        async with world.async_consumer() as consumer:

            async def handle(message: pulsar.Message) -> None:
                try:
                    sent.handle(message)
                finally:
                    if sent.is_through:
                        consumer.stop()

            await consumer.run(handle)

    asyncio.run(consume())


def receive_simply(world: Any, sent: Sent) -> None:  # noqa: ANN401
    unsent: set[str] = set()

    def observe(event: Event) -> None:
        if event.event is Name.UNSENT:
            unsent.add(event.message_id)

    with world.simple_consumer(on_event=observe) as consumer:
        while not sent.is_through:
            for message in consumer.receive(10, 600 * SECOND, SECOND):
                try:
                    sent.handle(message)
                except LookupError:
                    consumer.change_invisible_duration(message, simple.MIN_INVISIBLE)
                else:
                    consumer.acknowledge(message)
        wait_until(lambda: consumer.in_flight <= len(unsent))


@pytest.mark.parametrize(
    ("consume", "kind", "retried"),
    [
        (run, SubscriptionType.SHARED, False),
        (run, SubscriptionType.SHARED, True),
        (run, SubscriptionType.KEY_SHARED, False),
        (run_batches, SubscriptionType.SHARED, False),
        (receive, SubscriptionType.KEY_SHARED, False),
        (run_with_asyncio, SubscriptionType.SHARED, False),
        (receive_simply, SubscriptionType.SHARED, False),
    ],
)
def test_hostile_metadata_is_handled_or_dead_lettered(
    provision_policy: ProvisionPolicy,
    consume: Callable[[Any, Sent], None],
    kind: SubscriptionType,
    monkeypatch: pytest.MonkeyPatch,
    *,
    retried: bool,
) -> None:
    monkeypatch.setattr(simple, "MIN_INVISIBLE", 0.1 * SECOND)
    seconds_left = EarlyRetries.seconds_left
    monkeypatch.setattr(EarlyRetries, "seconds_left", lambda *drawn: min(0.1, seconds_left(*drawn)))
    world = provision_policy(kind=kind, max_retries=0)
    topic, name = world.policy.topic, world.policy.subscription
    if retried:
        topic = world.policy.retry_topic

    @some_examples
    @given(entries)
    def check(drawn: Drawn) -> None:
        sent = Sent(drawn)
        store(world.broker, topic, sent.entries)
        consume(world, sent)
        assert sent.is_through
        client = world.client(SUPERUSER)
        letters = list(world.drain_dead_letters(client, acknowledge=True))
        held = {
            message.data() for message in drain(world.broker, client, topic, name, acknowledge=True)
        }
        assert len(letters) + len(held & sent.failing) >= len(sent.failing)

    check()


def test_client_acknowledges_entry_it_cannot_decompress(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    consumer = provisioned.consumer()
    undecodable = RawEntry(numbers(compression=2, uncompressed=10), b"no zlib")
    entries = (undecodable, RawEntry(b"", b"readable"))
    store(provisioned.broker, provisioned.policy.topic, entries)
    message = consumer.receive()
    assert message.data() == b"readable"
    consumer.acknowledge(message)
    wait_until(lambda: provisioned.backlog(provisioned.policy.topic) == 0)
    assert provisioned.dead_letters(0) == []


def test_hostile_metadata_ends_no_broadcast(provision_policy: ProvisionPolicy) -> None:
    world = provision_policy()
    with BroadcastConsumer(world.client(SUPERUSER), str(world.policy.topic)) as consumer:

        @some_examples
        @given(entries)
        def check(drawn: Drawn) -> None:
            sent = Sent(drawn)
            store(world.broker, world.policy.topic, sent.entries)
            while not sent.is_through:
                with suppress(LookupError):
                    sent.handle(consumer.receive(MINUTE))

        check()
