"""Encrypted messages stay encrypted. Messages that cannot be copied become dead letters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest

from redrive import (
    AsyncRetryProducer,
    BroadcastConsumer,
    Crypto,
    Event,
    InvalidSpecError,
    RetryProducer,
    SimpleConsumer,
)
from redrive.delivery import processor
from redrive.delivery.reporting import Name
from redrive.messages import id_text
from redrive.policy.verdict import DeadReason
from redrive.reading.positions import encode_nested
from tests.support.documented import original
from tests.support.key_pairs import key_pair
from tests.support.provisioned_policy import ProvisionedPolicy
from tests.support.raw_entries import SCHEMA_VERSION, RawProducer, raw_producer

SOON = timedelta(seconds=180)
SECRET = b"4929 1234 5678 9012"
ProvisionPolicy = Callable[..., ProvisionedPolicy]
RAW = {b"order": b"7", b"customer": b"M\xfcller", b"\xff\xfe": b"\x00"}
UNKNOWN_VERSION = encode_nested(SCHEMA_VERSION, (77).to_bytes(8, "big"))


@pytest.fixture
def crypto(tmp_path: Path) -> Crypto:
    return Crypto("orders", *key_pair(tmp_path))


def stored(provisioned: Any, topic: object) -> list[bytes]:  # noqa: ANN401 - see conftest
    """Return the stored contents of *topic*; check that the key has encrypted each message."""
    reader = provisioned.client("superuser").create_reader(
        str(topic),
        pulsar.MessageId.earliest,
        crypto_failure_action=pulsar.ConsumerCryptoFailureAction.CONSUME,
    )
    messages = []
    while reader.has_message_available():
        message = reader.read_next(10_000)
        context = message.encryption_context()
        assert context is not None
        assert [key.key for key in context.keys()] == ["orders"]  # noqa: SIM118 - no mapping
        messages.append(message.data())
    return messages


def test_encrypted_message_stays_encrypted_on_every_hop(
    provision_policy: ProvisionPolicy, crypto: Crypto
) -> None:
    provisioned = provision_policy(max_retries=1)
    policy = provisioned.policy
    with RetryProducer(provisioned.client("superuser"), str(policy.topic), crypto=crypto) as sends:
        sends.send(SECRET, partition_key="k")
    handled = []
    consumer = provisioned.consumer(crypto=crypto)

    def fail(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        handled.append(message.data())
        if len(handled) == 2:
            consumer.stop()
        raise ConnectionError

    consumer.run(fail)
    assert handled == [SECRET, SECRET]
    for topic in (policy.topic, policy.retry_topic, policy.dead_letter_topic):
        (content,) = stored(provisioned, topic)
        assert SECRET not in content


def test_every_consumer_decrypts_and_producer_encrypts(
    provision_policy: ProvisionPolicy, crypto: Crypto
) -> None:
    provisioned = provision_policy()
    client, topic = provisioned.client("superuser"), str(provisioned.policy.topic)

    async def send() -> None:
        async with AsyncRetryProducer(client, topic, crypto=crypto) as producer:
            await producer.send(SECRET)

    with BroadcastConsumer(client, topic, crypto=crypto) as everything:
        asyncio.run(send())
        assert everything.receive().data() == SECRET
    with SimpleConsumer(client, provisioned.policy, crypto=crypto) as simple:
        (message,) = simple.receive(1, timedelta(minutes=1), SOON)
        assert message.data() == SECRET
    assert all(SECRET not in content for content in stored(provisioned, topic))


def test_keys_that_can_not_be_used_are_refused_at_once(
    provision_policy: ProvisionPolicy, crypto: Crypto, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpecError, match="a readable file in PEM"):
        Crypto("orders", tmp_path / "missing.pem")
    with pytest.raises(InvalidSpecError, match="set key= to the name"):
        Crypto("", crypto.public_key)
    with pytest.raises(InvalidSpecError, match="without a private key"):
        provision_policy().consumer(crypto=Crypto("orders", crypto.public_key))


def unreadable(producer: RawProducer, number: int) -> None:
    producer.send(b"%d" % number, properties={**RAW, b"number": b"%d" % number})


def of_unknown_schema(producer: RawProducer, number: int) -> None:
    producer.send(b"%d" % number, UNKNOWN_VERSION, properties={b"number": b"%d" % number})


@pytest.mark.parametrize(
    ("send", "reason"), [(unreadable, "Unreadable"), (of_unknown_schema, "SchemaNotFound")]
)
def test_messages_without_copies_do_not_stop_others(
    provision_policy: ProvisionPolicy,
    monkeypatch: pytest.MonkeyPatch,
    send: Callable[[RawProducer, int], None],
    reason: str,
) -> None:
    monkeypatch.setattr(processor, "MAX_UNSENT", 20)
    provisioned = provision_policy(delays=("1h",))
    count = processor.MAX_UNSENT + 3
    with raw_producer(provisioned.broker, provisioned.policy.topic) as producer:
        for number in range(count):
            send(producer, number)
        for number in range(30):
            producer.send(b"good %d" % number)
    handled = set[bytes]()
    events: list[Event] = []

    def handle(message: Any) -> None:  # noqa: ANN401 - the client publishes no types
        if not message.data().startswith(b"good"):
            raise LookupError
        handled.add(message.data())

    consumer = provisioned.consumer(on_event=events.append)
    running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 4})
    running.start()
    provisioned.wait_until_settled()
    consumer.close()
    running.join()

    assert handled == {b"good %d" % number for number in range(30)}
    assert {event.event for event in events} == {Name.ATTEMPT_FAILED, Name.DEAD_LETTERED}
    dead_letters = provisioned.dead_letters(count)
    assert {original(dead_letter)[2] for dead_letter in dead_letters} == {
        b"%d" % n for n in range(count)
    }
    for dead_letter in dead_letters:
        properties, _, payload = original(dead_letter)
        assert properties[b"number"] == payload
        assert reason != "Unreadable" or RAW.items() <= properties.items()
        assert dead_letter.properties()["REDRIVE_NOT_COPIED"] == reason
        assert dead_letter.properties()["REDRIVE_DEAD_REASON"] == DeadReason.NOT_COPYABLE
        assert dead_letter.properties()["REDRIVE_CAUSE_TYPE"] == "LookupError"
    assert (
        len({dead_letter.properties()["REDRIVE_SOURCE_MESSAGE_ID"] for dead_letter in dead_letters})
        == count
    )


@pytest.mark.parametrize(
    ("properties", "key", "payload"),
    [
        ({"big": "x" * 5_242_300}, "customer-7", b"x"),
        ({"big": "x" * 2_621_000}, "k" * 2_621_300, None),
    ],
    ids=["properties", "key without payload"],
)
def test_message_with_metadata_too_big_is_dead_lettered_whole(
    provision_policy: ProvisionPolicy, properties: dict[str, str], key: str, payload: bytes | None
) -> None:
    provisioned = provision_policy()
    [message_id] = provisioned.send(payload, properties=properties, partition_key=key)
    consumer = provisioned.consumer()
    message = consumer.receive(60)
    assert message is not None
    consumer.reconsume_later(message, cause=ValueError("no"))
    [dead_letter] = provisioned.dead_letters(1)
    raw, restored_key, restored = original(dead_letter)
    assert raw[b"big"] == properties["big"].encode()
    assert (restored_key, restored) == (key, payload)
    assert dead_letter.properties()["REDRIVE_NOT_COPIED"] == "TooBig"
    assert dead_letter.properties()["REDRIVE_SOURCE_MESSAGE_ID"] == id_text(message_id)
    provisioned.wait_until_settled()


def test_large_value_that_is_no_text_precedes_the_payload(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    value = b"\xff" * 100_000
    with raw_producer(provisioned.broker, provisioned.policy.topic) as producer:
        producer.send(b"content", UNKNOWN_VERSION, properties={b"big": value, b"small": b"1"})
    consumer = provisioned.consumer()
    message = consumer.receive(60)
    assert message is not None
    consumer.reconsume_later(message, level=-1)
    [dead_letter] = provisioned.dead_letters(1)
    raw, _, payload = original(dead_letter)
    assert (raw[b"big"], raw[b"small"], payload) == (value, b"1", b"content")
    assert dead_letter.properties()["REDRIVE_NOT_COPIED"] == "Unreadable"
    assert dead_letter.properties()["REDRIVE_DEAD_REASON"] == DeadReason.REQUESTED
    provisioned.wait_until_settled()


def test_uncopyable_message_waits_for_a_refused_dead_letter(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy()
    provisioned.refuse(provisioned.policy.dead_letter_topic)
    with raw_producer(provisioned.broker, provisioned.policy.topic) as producer:
        unreadable(producer, 7)
    events: list[Event] = []
    consumer = provisioned.consumer(on_event=events.append)
    message = consumer.receive(60)
    assert message is not None
    consumer.reconsume_later(message)
    assert [(event.event, event.reason) for event in events] == [(Name.UNSENT, "NotSent")]
    assert provisioned.unsettled() == 1
    provisioned.accept(provisioned.policy.dead_letter_topic)
    provisioned.wait_until_settled()
    assert original(provisioned.dead_letters(1)[0])[0].items() >= RAW.items()


def test_message_without_copy_is_retried_in_place_if_discarding(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(dead_letters=False, max_retries=2)
    with raw_producer(provisioned.broker, provisioned.policy.topic) as producer:
        unreadable(producer, 7)
    events: list[Event] = []
    consumer = provisioned.consumer(on_event=events.append)
    for number in (1, 2, 3):
        message = consumer.receive(60)
        assert message is not None
        assert consumer.attempt_of(message).number == number
        consumer.reconsume_later(message)
    assert [event.event for event in events] == [
        Name.RETRIED_IN_PLACE, Name.RETRIED_IN_PLACE, Name.DISCARDED
    ]  # fmt: skip
    provisioned.wait_until_settled()
