"""Messages with binary keys and properties, as producers in other languages may send them."""

from __future__ import annotations

import codecs
import json
import threading
from base64 import b64decode
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pulsar
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from redrive import Event, Policy
from redrive.delivery.concurrency import Deadline
from redrive.delivery.forwarder import Producers
from redrive.delivery.reporting import Name
from redrive.messages import (
    MAX_PROPERTY,
    NO_VERSION,
    WriterSchemas,
    encode,
    id_text,
    ordering_key,
    partition_key,
    raw_properties,
    read_properties,
    schema_version,
    sequence_key,
    size,
)
from redrive.opentelemetry import Tracing
from redrive.policy.envelope import ENCODED, PAYLOAD_PREFIX
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.policy.verdict import DeadReason
from redrive.testing.broker import InMemoryMessage
from redrive.testing.consumers import InMemoryConsumer
from tests.support.consumers import AS_BASE64, NO_TEXT, message_with
from tests.support.hostile_metadata import NAMES, values

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=1, ladder=Ladder.from_fixed("5s")
)


class Binary(InMemoryMessage):
    """A message with a binary ordering key or property."""

    def ordering_key(self) -> str:
        return NO_TEXT.decode() if self.order else ""

    def properties(self) -> dict[str, str]:
        return {"tenant": NO_TEXT.decode()} if self.headers else {}


def send_binary(consumer: InMemoryConsumer, content: bytes, **fields: Any) -> None:  # noqa: ANN401
    broker = consumer.broker
    sent = Binary(POLICY.topic, pulsar.MessageId(-1, 0, 0), content, broker.clock.now(), **fields)
    broker.store(POLICY.topic, sent)


def test_binary_keys_are_read_as_base64() -> None:
    message = message_with(ordering_key=NO_TEXT, partition_key=NO_TEXT)
    assert ordering_key(message) == partition_key(message) == AS_BASE64
    message = message_with(ordering_key="größe", partition_key="k")
    assert (ordering_key(message), partition_key(message)) == ("größe", "k")
    message = message_with()
    assert ordering_key(message) == partition_key(message) == ""


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"ordering_key": "order", "partition_key": "partition"}, "order"),
        ({"partition_key": "partition"}, "partition"),
        ({}, ""),
    ],
)
def test_order_follows_the_ordering_key_first(fields: dict[str, str], key: str) -> None:
    assert sequence_key(message_with(**fields)) == key


@pytest.mark.parametrize(("more", "prefixed"), [(0, False), (1, True)])
def test_encoded_parts_beyond_a_property_precede_the_payload(more: int, *, prefixed: bool) -> None:
    frame = len(json.dumps({"properties": [[AS_BASE64, ""], [AS_BASE64 * 2, ""]]}))
    value = b"v" * ((MAX_PROPERTY - frame) // 4 * 3 + more)
    written = {NO_TEXT: b"", NO_TEXT * 2: value, b"plain": b"text"}
    properties, prefix = encode(written, {}, everything=False, null=False, encryption={})
    assert properties.pop("plain") == "text"
    parts = prefix if prefixed else properties.pop(ENCODED).encode()
    assert properties == ({PAYLOAD_PREFIX: f"{len(prefix)}"} if prefixed else {})
    assert b64decode(json.loads(parts)["properties"][1][1]) == value
    assert len(parts) == MAX_PROPERTY + (4 if prefixed else 0)


def test_each_schema_version_is_read_once() -> None:
    reads: list[tuple[str, int]] = []

    class Client:
        @property
        def _client(self) -> Client:
            return self

        def get_schema_info(self, topic: str, version: int) -> object:
            reads.append((topic, version))
            types = pulsar._pulsar  # noqa: SLF001 - no public API
            return types.SchemaInfo(types.SchemaType.JSON, "orders", f"{topic} {version}")

    schemas = WriterSchemas(cast("pulsar.Client", Client()))
    other = POLICY.topic.sibling("invoices")
    wanted = [(POLICY.topic, 0), (POLICY.topic, 1), (other, 0)]
    read = [schemas.get(*version) for version in wanted]
    assert [schema.schema_info().schema() for schema in read] == [f"{t} {v}" for t, v in wanted]
    assert [schemas.get(*version) for version in wanted] == read
    assert reads == [(str(topic), version) for topic, version in wanted]


def test_unreadable_property_makes_all_unreadable() -> None:
    assert read_properties(message_with(property=("a", "ä"))) == {"a": "ä"}
    assert read_properties(message_with(property=("a", NO_TEXT))) is None
    assert read_properties(message_with()) == {}


def test_hop_carries_binary_keys_as_base64() -> None:
    sent = []

    class Producer:
        def topic(self) -> str:
            return "orders"

        def last_sequence_id(self) -> int:
            return -1

        def send(self, content: bytes, **options: object) -> pulsar.MessageId:
            sent.append((content, options["ordering_key"], options["partition_key"]))
            return pulsar.MessageId(-1, 1, 1)

        def close(self) -> None:
            pass

    class Client:
        def get_topic_partitions(self, topic: str) -> list[str]:
            return [topic]

        def create_producer(self, _topic: str, **_options: object) -> Producer:
            return Producer()

    producers = Producers(cast("pulsar.Client", Client()), name="c")
    message = message_with(ordering_key=NO_TEXT, partition_key=NO_TEXT)
    producers.send(POLICY.retry_topic, message, {}, None)
    producers.close(Deadline(10))
    assert sent == [(b"x", AS_BASE64, AS_BASE64)]


def test_binary_ordering_key_keeps_messages_in_order() -> None:
    policy = replace(POLICY, ordered=True, subscription_type=SubscriptionType.KEY_SHARED)
    consumer = InMemoryConsumer(policy)
    for content in (b"1", b"2"):
        send_binary(consumer, content, order="binary")
    first = consumer.receive()
    assert first.data() == b"1"
    assert consumer.receive(timedelta(seconds=60)) is None
    consumer.acknowledge(first)
    assert consumer.receive().data() == b"2"


@pytest.mark.parametrize("traced", [False, True])
def test_message_with_a_property_of_bytes_is_dead_lettered(*, traced: bool) -> None:
    events: list[Event] = []
    options: dict[str, Any] = {"handle_again_when_unsent": True}
    if traced:
        options["tracing"] = Tracing(TracerProvider().get_tracer("test"))
    consumer = InMemoryConsumer(POLICY, on_event=events.append, **options)
    send_binary(consumer, b"binary", headers={"tenant": "binary"})
    consumer.send(b"text")
    handled: list[tuple[bytes, int]] = []

    def fail_at_first(message: pulsar.Message) -> None:
        handled.append((message.data(), consumer.attempt_of(message).number))
        if len(handled) == 1:
            raise LookupError

    consumer.run(fail_at_first)

    assert handled == [(b"binary", 1), (b"text", 1)]
    assert [(event.event, event.reason) for event in events] == [
        (Name.ATTEMPT_FAILED, "LookupError"),
        (Name.DEAD_LETTERED, DeadReason.NOT_COPYABLE),
    ]
    assert consumer.broker.unsettled() == []
    [letter] = consumer.dead_letters
    assert letter.data() == b"binary"
    [[name, value]] = json.loads(letter.properties()[ENCODED])["properties"]
    assert (b64decode(name), b64decode(value)) == (b"tenant", NO_TEXT)


def test_other_threads_decode_strictly_while_properties_are_read() -> None:
    refused = list[bool]()

    class Asking(Binary):
        def properties(self) -> dict[str, str]:
            def decode() -> None:
                with pytest.raises(UnicodeDecodeError):
                    NO_TEXT.decode()
                refused.append(True)

            other = threading.Thread(target=decode)
            other.start()
            other.join()
            return {"tenant": NO_TEXT.decode()}

    message = Asking(
        POLICY.topic, pulsar.MessageId(-1, 0, 0), b"", datetime(2026, 1, 1, tzinfo=UTC)
    )
    assert raw_properties(cast("pulsar.Message", message)) == {b"tenant": NO_TEXT}
    assert refused == [True]
    assert size(cast("pulsar.Message", message)) == len(b"tenant" + NO_TEXT)
    with pytest.raises(UnicodeDecodeError):
        NO_TEXT.decode()


def test_threads_leave_the_decoder_of_python_as_it_was() -> None:
    strict = codecs.lookup_error("strict")

    class Waiting(InMemoryMessage):
        """A message whose properties another thread asks for, too."""

        def properties(self) -> dict[str, str]:
            if not threads:
                other = threading.Thread(target=raw_properties, args=(self,))
                threads.append(other)
                other.start()
                other.join(0.2)  # it waits for this call
            return {}

    threads: list[threading.Thread] = []
    message = Waiting(
        POLICY.topic, pulsar.MessageId(-1, 0, 0), b"", datetime(2026, 1, 1, tzinfo=UTC)
    )
    try:
        raw_properties(cast("pulsar.Message", message))
        threads[0].join()
        assert codecs.lookup_error("strict") is strict
    finally:
        codecs.register_error("strict", strict)


@dataclass(frozen=True)
class Hostile(InMemoryMessage):
    """A message with arbitrary metadata of its producer, as the client shows it."""

    raw_keys: tuple[bytes, bytes] = (b"", b"")
    raw_properties: tuple[tuple[bytes, bytes], ...] = ()
    version: bytes = b""
    times: tuple[int, int] = (0, 0)

    def partition_key(self) -> str:
        return self.raw_keys[0].decode()

    def ordering_key(self) -> str:
        return self.raw_keys[1].decode()

    def properties(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.raw_properties}

    def schema_version(self) -> str:
        return self.version.decode()

    def publish_timestamp(self) -> int:
        return self.times[0]

    def event_timestamp(self) -> int:
        return self.times[1]


hostile_properties = st.lists(st.tuples(st.sampled_from(NAMES) | values, values), max_size=4)
hostile_fields = st.fixed_dictionaries(
    {
        "raw_keys": st.tuples(values, values),
        "raw_properties": hostile_properties.map(tuple),
        "version": st.binary(max_size=20) | st.just(b"0123456789abcdef") | st.just(b"\xff" * 8),
        "times": st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    }
)


@given(fields=hostile_fields, ordered=st.booleans())
def test_hostile_metadata_does_not_end_a_run(fields: dict[str, Any], *, ordered: bool) -> None:
    kind = SubscriptionType.KEY_SHARED if ordered else SubscriptionType.SHARED
    policy = replace(POLICY, ordered=ordered, subscription_type=kind)
    consumer = InMemoryConsumer(policy)
    broker = consumer.broker
    for topic in (policy.topic, policy.retry_topic):
        place = pulsar.MessageId(-1, 0, 0)
        broker.store(topic, Hostile(topic, place, b"hostile", broker.clock.now(), **fields))
    consumer.send(b"plain")
    handled: list[bytes] = []

    def fail_at_hostile(message: pulsar.Message) -> None:
        assert consumer.attempt_of(message).number >= 1
        version = schema_version(message)
        assert version is None or 0 <= version < 2**63
        handled.append(message.data())
        if message.data() == b"hostile":
            raise LookupError

    consumer.run(fail_at_hostile)

    assert handled.count(b"plain") == 1
    assert handled.count(b"hostile") >= 2
    stored = [*broker.unsettled(), *consumer.dead_letters]
    assert [message.content for message in stored] == [b"hostile"] * 2


@pytest.mark.parametrize(
    ("written", "version"),
    [
        (b"", None),
        ((5).to_bytes(8), 5),
        (b"\0" * 16, 0),
        (b"\xff" * 8, NO_VERSION),
        (b"0123456789abcdef", NO_VERSION),
    ],
)
def test_schema_version_of_any_size_is_read(written: bytes, version: int | None) -> None:
    message = Hostile(POLICY.topic, pulsar.MessageId(-1, 0, 0), b"", EPOCH, version=written)
    assert schema_version(cast("pulsar.Message", message)) == version


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        (pulsar.MessageId(-1, 5, 0), "5:0:-1"),
        (pulsar.MessageId(3, 5, 7), "5:7:3"),
        (pulsar.MessageId(3, 5, 7, 0), "5:7:3:0"),
    ],
)
def test_message_id_is_written_as_in_java(message_id: pulsar.MessageId, text: str) -> None:
    assert id_text(message_id) == text
