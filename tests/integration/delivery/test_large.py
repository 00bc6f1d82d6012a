"""Messages that are bigger than the broker takes as they are, and messages in chunks."""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pulsar
import pytest

from redrive.admin.model import read_stats
from redrive.delivery import connection, fetcher
from redrive.delivery.concurrency import Deadline
from redrive.delivery.reporting import Event, Name
from redrive.policy.model import SubscriptionType
from sandbox.pulsar import SUPERUSER
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.raw_entries import RawProducer, raw_producer
from tests.support.topics import tell
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., ProvisionedPolicy]


SOON = timedelta(seconds=180)


LARGEST = 5 * 1024 * 1024


BIG = 8_960_000


def noise(size: int) -> bytes:
    """Return *size* bytes that no compression makes smaller."""
    return random.Random(size).randbytes(size)  # noqa: S311 - the same in each run, no secret


def send(provisioned: ProvisionedPolicy, payload: bytes) -> None:
    """Produce to the source topic a message that must be compressed or chunked."""
    producer = provisioned.client(SUPERUSER).create_producer(
        str(provisioned.policy.topic),
        batching_enabled=False,
        chunking_enabled=True,
        compression_type=pulsar.CompressionType.LZ4,
    )
    producer.send(payload)
    producer.close()


def failing() -> RuntimeError:
    """An error whose description takes some thousand bytes."""
    error = RuntimeError("x" * 2_000)
    error.__cause__ = ValueError("y" * 5_000)
    return error


@pytest.mark.parametrize(
    "payload",
    [b"0123456789" * (BIG // 10), noise(BIG), noise(LARGEST - 900)],
    ids=["compressed", "in chunks", "too big with its cause"],
)
def test_a_large_message_is_retried_and_dead_lettered_whole(
    provision_policy: ProvisionPolicy, payload: bytes
) -> None:
    provisioned = provision_policy(max_retries=2)
    send(provisioned, payload)
    events: list[Event] = []
    consumer = provisioned.consumer(on_event=events.append)
    for number in (1, 2, 3):
        message = consumer.receive(SOON)
        assert message is not None
        assert message.data() == payload
        assert consumer.attempt_of(message).number == number
        consumer.reconsume_later(message, cause=failing())
    consumer.close()

    assert [event.event for event in events] == [Name.RETRIED, Name.RETRIED, Name.DEAD_LETTERED]
    [dead] = provisioned.dead_letters(1)
    assert dead.data() == payload
    assert {"REDRIVE_CAUSE_MESSAGE", "REDRIVE_CAUSE_TRACE"} <= dead.properties().keys()
    provisioned.wait_until_settled()


def test_large_messages_that_are_sent_on_side_by_side_all_arrive(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(max_retries=1)
    payloads = {noise(BIG + number) for number in range(6)}
    for payload in payloads:
        send(provisioned, payload)
    consumer = provisioned.consumer()
    waiting = [consumer.receive(SOON) for _ in payloads]
    with ThreadPoolExecutor(6) as workers:
        list(workers.map(consumer.reconsume_later, waiting))

    consumers = itertools.cycle([consumer, provisioned.consumer()])
    arrived: list[bytes] = []
    while set(arrived) != payloads:  # one may come twice, where a broker takes its time
        one = next(consumers)
        message = one.receive(SOON if not arrived else timedelta(seconds=1))
        if message is not None:
            one.acknowledge(message)
            arrived.append(message.data())
    assert set(arrived) == payloads


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
    provisioned.wait_until_settled()


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
    provisioned.wait_until_settled()
    if kind is SubscriptionType.SHARED:  # of the other no broker counts redeliveries
        topic = str(provisioned.policy.topic)
        late = {(Name.COPY_DROPPED, topic)}  # to a slow broker, which delivered it again
        reported = {(event.event, event.topic) for event in events}
        assert reported - late == {(Name.RECOVERED, topic)}


def test_message_settled_just_now_is_not_recovered(
    provision_policy: ProvisionPolicy, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0))
    provisioned = provision_policy()
    topic, subscription = str(provisioned.policy.topic), provisioned.policy.subscription
    client = provisioned.client(provisioned.role)
    first = client.subscribe(topic, subscription, pulsar.ConsumerType.Shared)
    fetching = fetcher.Fetcher([first])
    closing.callback(fetching.close, Deadline(10))
    provisioned.send(b"x")
    message = fetching.take(SOON.total_seconds())
    other = client.subscribe(topic, subscription, pulsar.ConsumerType.Shared)
    checks: list[None] = []

    def may_recover() -> bool:
        if not checks:  # at the last moment
            first.acknowledge(message)
        checks.append(None)
        return True

    fetching.recover(may_recover, lambda _: None, lambda *_: None)
    assert fetching.take(0) is None
    wait_until(lambda: len(checks) > 3)
    with pytest.raises(pulsar.Timeout):
        other.receive(2_000)


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
    provisioned.wait_until_settled()


def test_chunks_of_departed_consumer_need_an_unload(
    provision_policy: ProvisionPolicy, closing: ExitStack
) -> None:
    provisioned = provision_policy()
    topic, subscription = provisioned.policy.topic, provisioned.policy.subscription

    def stranded() -> int:
        return read_stats(tell(provisioned.broker, topic, "stats"))[subscription].stranded

    producer = closing.enter_context(raw_producer(provisioned.broker, topic))
    applications, departing = Applications(producer, 3), provisioned.consumer()
    applications.send(0, 2)
    wait_until(lambda: provisioned.given_out(topic) == 6)
    remaining = provisioned.consumer()
    departing.close()
    wait_until(lambda: stranded() == 6)
    applications.send(2, 3)
    producer.send(b"another")
    assert receive_all(remaining, 1) == {b"another"}
    wait_until(lambda: stranded() == provisioned.unsettled() == 9)
    provisioned.unload()
    assert receive_all(remaining, 3) == applications.contents
    provisioned.wait_until_settled()
    assert stranded() == 0
