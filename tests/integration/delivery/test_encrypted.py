"""Encrypted messages stay encrypted on their way through retry and dead-letter topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pulsar
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from redrive import (
    AsyncRetryProducer,
    BroadcastConsumer,
    Crypto,
    InvalidSpecError,
    RetryProducer,
    SimpleConsumer,
)

ProvisionPolicy = Callable[..., Any]
SOON = timedelta(seconds=180)
SECRET = b"4929 1234 5678 9012"


@pytest.fixture
def crypto(tmp_path: Path) -> Crypto:
    private = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    files = {
        "public.pem": private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        "private.pem": private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        ),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return Crypto("orders", tmp_path / "public.pem", tmp_path / "private.pem")


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
    with pytest.raises(InvalidSpecError, match="which can't be read"):
        Crypto("orders", tmp_path / "missing.pem")
    with pytest.raises(InvalidSpecError, match="set key= to the name"):
        Crypto("", crypto.public_key)
    with pytest.raises(InvalidSpecError, match="without a private key"):
        provision_policy().consumer(crypto=Crypto("orders", crypto.public_key))
