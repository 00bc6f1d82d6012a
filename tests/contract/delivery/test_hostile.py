"""Whatever metadata a producer writes, each message is handled, or dead-lettered; no run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pulsar
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redrive import BroadcastConsumer, Event
from redrive.delivery.arrivals import EarlyRetries
from redrive.delivery.consumers import simple
from redrive.delivery.reporting import Name
from redrive.policy.model import SubscriptionType
from sandbox.pulsar import SUPERUSER
from tests.support.hostile_metadata import metadata, single
from tests.support.raw_entries import RawEntry, in_batch, numbers, store
from tests.support.subscriptions import drain
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
SECOND, SOON = timedelta(seconds=1), timedelta(seconds=60)
entries = st.lists(
    st.tuples(metadata, st.none() | st.lists(single, min_size=1, max_size=3)),
    min_size=20,
    max_size=20,
)
Drawn = list[tuple[bytes, list[bytes] | None]]
some_examples = settings(
    max_examples=2, suppress_health_check=list(HealthCheck), deadline=None, database=None
)


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
            message = consumer.receive(SOON)
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
                    sent.handle(consumer.receive(SOON))

        check()
