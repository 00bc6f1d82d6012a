"""Messages whose keys and properties are no text, as producers in other languages may send them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pulsar
import pytest
from opentelemetry.sdk.trace import TracerProvider

from redrive import Event, Policy
from redrive.copying import reading
from redrive.delivery.bounded import Deadline
from redrive.delivery.retrying.producers import Producers
from redrive.delivery.telemetry.events import Name
from redrive.opentelemetry import Tracing
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing import InMemoryConsumer
from redrive.testing.broker import InMemoryMessage
from tests.support.messages import AS_BASE64, NO_TEXT, message_with

POLICY = Policy(
    TopicName("shop", "prod", "orders"), "billing", max_retries=1, ladder=Ladder.from_fixed("5s")
)


class Binary(InMemoryMessage):
    """A message whose ordering key, or whose property, is no text."""

    def ordering_key(self) -> str:
        return NO_TEXT.decode() if self.order else ""

    def properties(self) -> dict[str, str]:
        return {"tenant": NO_TEXT.decode()} if self.headers else {}


def send_binary(consumer: InMemoryConsumer, content: bytes, **fields: Any) -> None:  # noqa: ANN401
    broker = consumer.broker
    sent = Binary(POLICY.topic, pulsar.MessageId(-1, 0, 0), content, broker.clock.now(), **fields)
    broker.store(POLICY.topic, sent)


def test_keys_that_are_no_text_are_read_as_base64_as_java_writes_them() -> None:
    message = message_with(ordering_key=NO_TEXT, partition_key=NO_TEXT)
    assert reading.ordering_key(message) == reading.partition_key(message) == AS_BASE64
    message = message_with(ordering_key="größe", partition_key="k")
    assert (reading.ordering_key(message), reading.partition_key(message)) == ("größe", "k")
    message = message_with()
    assert reading.ordering_key(message) == reading.partition_key(message) == ""


def test_properties_are_all_or_none() -> None:
    assert reading.properties(message_with(property=("a", "ä"))) == {"a": "ä"}
    assert reading.properties(message_with(property=("a", NO_TEXT))) is None
    assert reading.properties(message_with()) == {}


def test_a_hop_of_a_message_whose_keys_are_no_text_carries_them_as_base64() -> None:
    sent = []

    class Producer:
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


def test_ordered_messages_wait_for_each_other_by_a_key_that_is_no_text() -> None:
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
def test_a_message_whose_properties_are_no_text_fails_without_ending_run(*, traced: bool) -> None:
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

    began = consumer.broker.clock.now()
    consumer.run(fail_at_first)

    assert handled == [(b"binary", 1), (b"text", 1), (b"binary", 2)]
    assert consumer.broker.clock.now() - began == timedelta(seconds=5)
    told = [(event.event, event.reason) for event in events]
    assert told == [(Name.ATTEMPT_FAILED, "LookupError"), (Name.UNSENT, "Unreadable")]
    assert consumer.broker.unsettled() == consumer.dead_letters == []
