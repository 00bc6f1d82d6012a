"""The reader returns the same messages as the client, and continues where the client ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pulsar
import pytest

from redrive.auth.method import ShownCredentials
from redrive.messages import schema_version
from redrive.policy.naming import TopicName
from redrive.reading.entries import EntryReader
from redrive.reading.session import Session
from redrive.reading.stored import ReadMessage
from sandbox.pulsar import SUPERUSER, Broker
from tests.support.raw_entries import HARMFUL, store

MILLIS = 60_000
OLDEST = (-1, -1)
QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)


@pytest.fixture
def topic(broker: Broker, pulsar_namespace: str) -> TopicName:
    name = TopicName.parse_whole(f"persistent://{pulsar_namespace}/orders")
    broker.request("PUT", f"/admin/v2/persistent/{pulsar_namespace}/orders").check("create")
    return name


@contextmanager
def client_of(broker: Broker) -> Iterator[pulsar.Client]:
    authentication = pulsar.AuthenticationToken(broker.token(SUPERUSER))
    client = pulsar.Client(broker.service_url, authentication=authentication, logger=QUIET)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def reader_of(
    broker: Broker, topic: TopicName, *, role: str = SUPERUSER, ahead: int = 10
) -> Iterator[EntryReader]:
    shown = ShownCredentials("token", lambda: broker.token(role))
    reader = EntryReader(
        lambda: Session(broker.service_url, shown),
        str(topic),
        -1,
        OLDEST,
        name=f"reader-{secrets.token_hex(4)}",
        ahead=ahead,
    )
    try:
        yield reader
    finally:
        reader.close()


def shown(message: pulsar.Message | ReadMessage) -> tuple[object, ...]:
    """Return all that a message shows, and its id as other clients read it."""
    return (
        message.message_id().serialize(),
        message.data(),
        message.has_null_value(),
        message.properties(),
        message.partition_key(),
        message.ordering_key(),
        message.publish_timestamp(),
        message.event_timestamp(),
        schema_version(message),
        message.encryption_context() is None,
    )


def test_reader_returns_the_same_as_the_client(broker: Broker, topic: TopicName) -> None:
    contents = [None, b"", b"order", b"long " * 20_000, os.urandom(6_000_000)]
    with client_of(broker) as client:
        for number, compression in enumerate(
            [
                pulsar.CompressionType.NONE,
                pulsar.CompressionType.LZ4,
                pulsar.CompressionType.ZLib,
                pulsar.CompressionType.ZSTD,
                pulsar.CompressionType.SNAPPY,
            ]
        ):
            for batches in (False, True):
                producer = client.create_producer(
                    str(topic),
                    compression_type=compression,
                    batching_enabled=batches,
                    chunking_enabled=not batches,
                )
                for content in contents[: 4 if batches else 5]:
                    if not content and not batches and compression is pulsar.CompressionType.ZLib:
                        continue  # which the client writes, and can't read
                    producer.send_async(
                        content,
                        lambda *_: None,
                        properties={"id": str(number), "ключ": "значение"},
                        partition_key="k",
                        ordering_key="o",
                        event_timestamp=1_700,
                    )
                producer.flush()
        with_schema = client.create_producer(str(topic), schema=pulsar.schema.StringSchema())
        with_schema.send("text")
        expected = []
        by_client = client.create_reader(str(topic), pulsar.MessageId.earliest)
        while by_client.has_message_available():
            expected.append(shown(by_client.read_next(MILLIS)))

    with reader_of(broker, topic) as reader:
        read = [shown(reader.read_next(MILLIS)) for _ in expected]
        assert not reader.has_message_available()

    assert read == expected
    assert len(read) == 44


def test_reader_passes_over_harmful_entries(broker: Broker, topic: TopicName) -> None:
    with client_of(broker) as client:
        producer = client.create_producer(str(topic), batching_enabled=False)
        for entry in HARMFUL.values():
            store(broker, topic, [entry])
            producer.send(b"good")
        store(broker, topic, HARMFUL.values())  # and the topic ends with them
    with reader_of(broker, topic) as reader:
        read = []
        while (message := reader.next_stored(MILLIS)) is not None:
            read.append(message.data())
        assert not reader.has_message_available()
        with pytest.raises(pulsar.Timeout):
            reader.read_next(100)
    assert read == [b"good"] * len(HARMFUL)


def test_reader_resumes_after_an_unload(broker: Broker, topic: TopicName) -> None:
    count = 200
    with client_of(broker) as client:
        producer = client.create_producer(str(topic), batching_enabled=False)
        for number in range(count):
            producer.send_async(b"%d" % number, lambda *_: None)
        producer.flush()
    with reader_of(broker, topic, ahead=20) as reader:
        numbers: list[int] = []
        while len(set(numbers)) < count:
            numbers.append(int(reader.read_next(MILLIS).data()))
            if len(numbers) in {50, 120}:
                path = f"/admin/v2/persistent/{topic.namespace_name}/{topic.local}/unload"
                broker.request("PUT", path).check("unload")
    assert sorted(set(numbers)) == list(range(count))


def test_reader_without_right_is_refused_as_by_the_client(broker: Broker, topic: TopicName) -> None:
    with pytest.raises(pulsar.AuthorizationError), reader_of(broker, topic, role="stranger"):
        pass
    missing = TopicName(topic.tenant, topic.namespace, "missing")
    with pytest.raises(pulsar.TopicNotFound), reader_of(broker, missing):
        pass
