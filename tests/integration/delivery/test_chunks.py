"""Messages in chunks: of many producers at a time, interrupted, and never completed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest

from redrive import Event
from redrive.delivery import connection, fetcher
from redrive.delivery.reporting import Name
from redrive.policy.model import SubscriptionType
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.raw_producer import RawProducer, raw_producer
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., ProvisionedPolicy]
SOON = timedelta(seconds=60)
CHUNKS = 3


class Applications:
    """Producers that each send one message in chunks, mixed with the chunks of the others."""

    def __init__(self, producer: RawProducer, count: int) -> None:
        self._producer = producer
        self.messages = {secrets.token_hex(8): secrets.token_bytes(3_000) for _ in range(count)}

    @property
    def contents(self) -> set[bytes]:
        return set(self.messages.values())

    def send(self, first: int = 0, end: int = CHUNKS) -> None:
        """Send the chunks from *first* to *end* of each message."""
        for index in range(first, end):
            for uuid, content in self.messages.items():
                part = content[index * 1_000 : (index + 1) * 1_000]
                self._producer.send_chunk(uuid, part, index, CHUNKS, len(content))


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def receive_all(consumer: object, count: int) -> set[bytes]:
    """Receive and acknowledge *count* messages."""
    contents = set[bytes]()
    while len(contents) < count:
        message = consumer.receive(SOON)  # type: ignore[attr-defined]
        assert message is not None, f"{len(contents)} of {count} messages"
        contents.add(message.data())
        consumer.acknowledge(message)  # type: ignore[attr-defined]
    return contents


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.FAILOVER])
def test_chunks_of_many_applications_are_all_put_together(
    provision_policy: ProvisionPolicy, closing: ExitStack, kind: SubscriptionType
) -> None:
    provisioned = provision_policy(kind=kind)
    producer = closing.enter_context(raw_producer(provisioned.broker, provisioned.policy.topic))
    applications = Applications(producer, 24)
    applications.send()
    consumer = provisioned.consumer()
    assert receive_all(consumer, 24) == applications.contents
    wait_until(lambda: not provisioned.unsettled())


@pytest.mark.parametrize("kind", [SubscriptionType.SHARED, SubscriptionType.FAILOVER])
def test_chunks_beyond_the_limit_come_again(
    provision_policy: ProvisionPolicy,
    closing: ExitStack,
    kind: SubscriptionType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_PENDING_CHUNKED", 5)
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0))
    provisioned = provision_policy(kind=kind)
    producer = closing.enter_context(raw_producer(provisioned.broker, provisioned.policy.topic))
    applications = Applications(producer, 24)
    applications.send()
    events: list[Event] = []
    consumer = provisioned.consumer(on_event=events.append)
    assert receive_all(consumer, 24) == applications.contents
    wait_until(lambda: not provisioned.unsettled())
    if kind is SubscriptionType.SHARED:  # of the other no broker counts redeliveries
        assert {(event.event, event.topic) for event in events} == {
            (Name.RECOVERED, str(provisioned.policy.topic))
        }


def test_chunks_before_and_after_an_unload_are_put_together(
    provision_policy: ProvisionPolicy, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0))
    provisioned = provision_policy()
    consumer = provisioned.consumer()
    with raw_producer(provisioned.broker, provisioned.policy.topic) as producer:
        applications = Applications(producer, 3)
        applications.send(0, 2)
    wait_until(lambda: provisioned.given_out(provisioned.policy.topic) == 6)
    provisioned.unload()
    producer = closing.enter_context(raw_producer(provisioned.broker, provisioned.policy.topic))
    applications._producer = producer  # noqa: SLF001
    applications.send(2, 3)
    assert receive_all(consumer, 3) == applications.contents
    wait_until(lambda: not provisioned.unsettled())


def test_chunks_of_a_dead_producer_leave_the_backlog(
    provision_policy: ProvisionPolicy, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0, 130.0))
    provisioned = provision_policy()
    producer = closing.enter_context(raw_producer(provisioned.broker, provisioned.policy.topic))
    dead, alive = Applications(producer, 12), Applications(producer, 12)
    dead.send(0, 2)
    alive.send()
    consumer = provisioned.consumer()
    assert receive_all(consumer, 12) == alive.contents
    wait_until(lambda: provisioned.unsettled() == 24)
    wait_until(lambda: not provisioned.unsettled(), 300)
    assert consumer.receive(0) is None
