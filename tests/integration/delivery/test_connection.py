"""Consumers that lose their connection to the broker, or all permits, and are renewed."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import jwt
import pulsar
import pytest

import redrive
from redrive import BroadcastConsumer, Event, RetryConsumer, SimpleConsumer
from redrive.delivery import arrivals, connection, fetcher, in_flight
from redrive.delivery.reporting import Name
from redrive.policy.envelope import ENCODED, NOT_COPIED
from redrive.policy.model import SubscriptionType
from redrive.reading.positions import encode_nested
from sandbox.process import free_port
from sandbox.pulsar import Broker
from tests.support.brokers import WithholdingProxy, proxy_of
from tests.support.documented import PROBES, block
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.raw_entries import RawEntry, numbers, store
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., ProvisionedPolicy]
SOON = timedelta(seconds=60)
Consumer = RetryConsumer | SimpleConsumer | BroadcastConsumer
ENCRYPTED = encode_nested(13, encode_nested(1, b"key") + encode_nested(2, b"value"))
UNDECOMPRESSED = RawEntry(numbers(in_batch=60_000, compression=2, uncompressed=10), b"no zlib")
UNDECRYPTED = RawEntry(ENCRYPTED + numbers(in_batch=60_000), b"secret")
LARGEST = RawEntry(ENCRYPTED + numbers(in_batch=2**31 - 1), b"secret")
OTHERS = [b"%d" % number for number in range(20)]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


@pytest.fixture
def proxy(broker: Broker, closing: ExitStack) -> WithholdingProxy:
    return closing.enter_context(proxy_of(broker.port))


def connect(
    proxy: WithholdingProxy, token: str | Callable[[], str], closing: ExitStack
) -> pulsar.Client:
    client = pulsar.Client(
        f"pulsar://127.0.0.1:{proxy.port}",
        authentication=pulsar.AuthenticationToken(token),
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
    )
    closing.callback(client.close)
    return client


def open_retry(client: pulsar.Client, provisioned: ProvisionedPolicy, **options: Any) -> Consumer:  # noqa: ANN401
    return RetryConsumer(client, provisioned.policy, **options)


def open_simple(client: pulsar.Client, provisioned: ProvisionedPolicy, **options: Any) -> Consumer:  # noqa: ANN401
    return SimpleConsumer(client, provisioned.policy, **options)


def open_broadcast(
    client: pulsar.Client,
    provisioned: ProvisionedPolicy,
    **options: Any,  # noqa: ANN401
) -> Consumer:
    return BroadcastConsumer(client, str(provisioned.policy.topic), **options)


@pytest.mark.parametrize(
    ("open_", "partitions"),
    [(open_retry, 0), (open_retry, 3), (open_simple, 0), (open_broadcast, 3)],
)
def test_lost_connection_shows_until_it_is_back(
    provision_policy: ProvisionPolicy,
    proxy: WithholdingProxy,
    closing: ExitStack,
    open_: Callable[..., Consumer],
    partitions: int,
) -> None:
    provisioned = provision_policy(partitions=partitions)
    client = connect(proxy, provisioned.broker.token(provisioned.role), closing)
    events: list[Event] = []
    consumer = open_(client, provisioned, on_event=events.append, disconnect_timeout=1)
    closing.callback(consumer.close)
    topics = {provisioned.policy.topic, provisioned.policy.retry_topic}
    if open_ is open_broadcast:
        topics.remove(provisioned.policy.retry_topic)
    assert consumer.connected

    proxy.refuses = True
    proxy.cut()
    wait_until(lambda: not consumer.connected)
    wait_until(lambda: len(events) == len(topics))
    assert {event.event for event in events} == {Name.DISCONNECTED}
    assert {event.topic for event in events} == set(map(str, topics))

    proxy.refuses = False
    wait_until(lambda: consumer.connected)
    wait_until(lambda: len(events) == 2 * len(topics))
    assert {event.event for event in events[len(topics) :]} == {Name.RECONNECTED}

    consumer.close()
    assert not consumer.connected


@pytest.mark.parametrize("partitions", [0, 2])
def test_lost_connection_loses_messages_only_before_the_first(
    provision_policy: ProvisionPolicy,
    proxy: WithholdingProxy,
    closing: ExitStack,
    partitions: int,
) -> None:
    """The client continues behind the last message of a partition, or else at its end."""
    provisioned = provision_policy(partitions=partitions)
    client = connect(proxy, provisioned.broker.token(provisioned.role), closing)
    topic = provisioned.policy.topic
    consumer = closing.enter_context(BroadcastConsumer(client, str(topic)))
    parts = [topic.partition(number) for number in range(partitions)] or [topic]

    def send(content: bytes) -> list[bytes]:
        for part in parts:
            provisioned.send(content, topic=part)
        return [content] * len(parts)

    def send_without_connection(content: bytes) -> list[bytes]:
        proxy.refuses = True
        proxy.cut()
        wait_until(lambda: not consumer.connected)
        sent = send(content)
        proxy.refuses = False
        wait_until(lambda: consumer.connected)
        return sent

    def received(count: int) -> list[bytes]:
        messages = [consumer.receive(SOON) for _ in range(count)]
        return [message.data() for message in messages if message]

    send_without_connection(b"lost")
    first = send(b"first")
    assert received(len(parts)) == first
    late = send_without_connection(b"late")
    assert received(len(parts)) == late


@pytest.mark.parametrize("partitions", [0, 2])
def test_message_settled_without_connection_is_not_repeated(
    provision_policy: ProvisionPolicy,
    proxy: WithholdingProxy,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    partitions: int,
) -> None:
    monkeypatch.setattr(in_flight, "REMEMBERED_SECONDS", 1.0)
    provisioned = provision_policy(partitions=partitions)
    client = connect(proxy, provisioned.broker.token(provisioned.role), closing)
    events: list[Event] = []
    consumer = RetryConsumer(client, provisioned.policy, on_event=events.append)
    closing.callback(consumer.close)
    incoming = consumer._processor.parts.incoming  # noqa: SLF001 - what it knows of the connection

    def is_lost_for(seconds: float) -> bool:
        return incoming.disconnected_since < time.monotonic() - seconds

    provisioned.send(*(b"%d" % number for number in range(20)))
    messages = [consumer.receive(SOON) for _ in range(20)]
    proxy.refuses = True
    proxy.cut()
    wait_until(lambda: is_lost_for(0.5))
    for message in messages:
        consumer.acknowledge(message)
    provisioned.send(b"next")
    wait_until(lambda: is_lost_for(3))
    # Until a slow broker delivers again.
    monkeypatch.setattr(arrivals, "REDELIVERED_SECONDS", 600.0)
    received: list[bytes] = []

    def have_all_come() -> bool:
        message = consumer.receive(timedelta(seconds=1))
        if message is not None:
            received.append(message.data())
            consumer.acknowledge(message)
        return len(events) + len(received) == 21

    proxy.refuses = False
    wait_until(have_all_come)
    assert received == [b"next"]
    assert {event.event for event in events} == {Name.COPY_DROPPED}
    wait_until(lambda: not provisioned.unsettled(partitions))


def test_expired_token_is_reported_while_run_waits(
    provision_policy: ProvisionPolicy, proxy: WithholdingProxy, closing: ExitStack
) -> None:
    provisioned = provision_policy()

    def token(expires: float) -> str:
        claims = {"sub": provisioned.role, "exp": time.time() + expires}
        return jwt.encode(claims, provisioned.broker.token_key.read_bytes(), algorithm="HS256")

    tokens = [token(3_600)]
    events: list[Event] = []
    handled: list[bytes] = []
    consumer = RetryConsumer(
        connect(proxy, lambda: tokens[-1], closing), provisioned.policy,
        on_event=events.append, disconnect_timeout=2,
    )  # fmt: skip
    closing.callback(consumer.close)
    running = threading.Thread(
        target=consumer.run, args=(lambda message: handled.append(message.data()),)
    )
    running.start()
    provisioned.send(b"before")
    wait_until(lambda: handled == [b"before"])
    assert consumer.connected

    tokens.append(token(-60))
    proxy.cut()
    wait_until(lambda: len(events) == 2)
    assert {event.event for event in events} == {Name.DISCONNECTED}
    assert not consumer.connected
    assert running.is_alive()
    consumer.stop()
    running.join()


def test_probes_of_the_guide_follow_the_connection(
    provision_policy: ProvisionPolicy,
    proxy: WithholdingProxy,
    closing: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provisioned = provision_policy()
    client = connect(proxy, provisioned.broker.token(provisioned.role), closing)
    consumers: list[RetryConsumer] = []
    port = free_port()

    def open_(client: pulsar.Client, _: object) -> RetryConsumer:
        consumers.append(RetryConsumer(client, provisioned.policy))
        return consumers[-1]

    def answer() -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as response:
                return int(response.status)
        except urllib.error.HTTPError as refused:
            return refused.code
        except urllib.error.URLError:
            return 0

    monkeypatch.setattr(redrive, "PolicyFile", lambda: None)
    monkeypatch.setattr(redrive, "RetryConsumer", open_)
    program = block(PROBES, "Serve probes", "python").replace("8080", str(port))
    handled: list[bytes] = []
    names = {"client": client, "handle": lambda message: handled.append(message.data())}
    running = threading.Thread(target=exec, args=(compile(program, "probes", "exec"), names))
    running.start()
    wait_until(lambda: answer() == 200)
    proxy.refuses = True
    proxy.cut()
    wait_until(lambda: answer() == 503)
    proxy.refuses = False
    wait_until(lambda: answer() == 200)
    provisioned.send(b"x")
    wait_until(lambda: handled == [b"x"])
    consumers[0].stop()
    running.join(60)
    assert not running.is_alive()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a second instead of a minute."""
    monkeypatch.setattr(fetcher, "_RECOVER_AFTER_SECONDS", (1.0, 1.0, 1.0))
    monkeypatch.setattr(connection, "_FIRST_PAUSE", 1.0)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("kind", "partitions", "entry"),
    [
        (SubscriptionType.SHARED, 2, UNDECOMPRESSED),
        (SubscriptionType.KEY_SHARED, 0, UNDECRYPTED),
        (SubscriptionType.EXCLUSIVE, 0, LARGEST),
    ],
)
def test_entry_that_takes_all_permits_stops_no_consumer(
    provision_policy: ProvisionPolicy, kind: SubscriptionType, partitions: int, entry: RawEntry
) -> None:
    provisioned = provision_policy(kind=kind, partitions=partitions)
    topic = provisioned.policy.topic.partition(0) if partitions else provisioned.policy.topic
    provisioned.send(b"first", topic=topic, partition_key="key")
    store(provisioned.broker, topic, [entry])
    provisioned.send(*OTHERS, topic=topic, partition_key="key")
    consumer = provisioned.consumer(prefetch=1)
    handled: list[bytes] = []

    def handle(message: pulsar.Message) -> None:
        handled.append(message.data())
        if handled[-1] == OTHERS[-1]:
            consumer.stop()

    stopping = threading.Timer(120, consumer.stop)
    stopping.start()
    consumer.run(handle)
    stopping.cancel()
    assert handled == [b"first", *OTHERS]
    wait_until(lambda: provisioned.backlog(topic) == 0)
    for dead_letter in provisioned.dead_letters(int(entry is not UNDECOMPRESSED)):
        properties = dead_letter.properties()
        assert dead_letter.data() == entry.content
        assert properties[NOT_COPIED] == "Undecryptable"
        assert json.loads(properties[ENCODED])["encryption"] == {
            "keys": [["key", "dmFsdWU="]], "algorithm": "", "param": "",
            "compression": 0, "uncompressedSize": 0,
            "batchSize": 60_000 if entry is UNDECRYPTED else 2**31 - 1,
        }  # fmt: skip


@pytest.mark.usefixtures("soon")
def test_entries_of_another_key_stay_and_stop_no_consumer(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    one, batch = RawEntry(ENCRYPTED), RawEntry(ENCRYPTED + numbers(in_batch=1_000))
    store(provisioned.broker, provisioned.policy.topic, [one, one, batch, batch])
    provisioned.send(*OTHERS)
    consumer = provisioned.simple_consumer()
    handled: list[bytes] = []
    while len(handled) < len(OTHERS):
        for message in consumer.receive(10, 60, timeout=120):
            handled.append(message.data())
            consumer.acknowledge(message)
    assert handled == OTHERS
    wait_until(lambda: provisioned.backlog(provisioned.policy.topic) == 4)
    assert provisioned.dead_letters(0) == []
