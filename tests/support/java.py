"""Pulsar's Java client, that of the sandbox's Pulsar distribution, see `sandbox.java`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JJavaError

from redrive.policy.model import Policy

RECEIVE = timedelta(seconds=60)
_YES = (True,)  # a positional argument in Java


class JavaRefusedError(Exception):
    """An exception of the Java client; the text has its class and message."""


@dataclass(frozen=True)
class Message:
    """A message at a Java consumer."""

    handle: Any
    value: Any
    id: str
    topic: str
    key: str
    ordering_key: bytes
    event_time: int
    properties: dict[str, str]


@dataclass
class JavaClient:
    """A client of one role, which closes its consumers and producers with it."""

    gateway: JavaGateway
    service_url: str
    token: str
    _opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        """Create the client, which connects on first use."""
        self.api = self.gateway.jvm.org.apache.pulsar.client.api
        authentication = self.api.AuthenticationFactory.token(self.token)
        builder = self.api.PulsarClient.builder().serviceUrl(self.service_url)
        self.pulsar: Any = builder.authentication(authentication).build()
        # Without waiting: the client's threads end after two seconds.
        self._opened.callback(self.pulsar.closeAsync)

    def close(self) -> None:
        """Close everything."""
        self._opened.close()

    def json(self) -> Any:  # noqa: ANN401 - an object of Java
        """Return the JSON schema of a small class on the client's class path."""
        name = "org.apache.pulsar.common.policies.data.RetentionPolicies"
        return self.api.Schema.JSON(self.gateway.jvm.java.lang.Class.forName(name))

    def record(self, kind: str, definition: str) -> Any:  # noqa: ANN401 - an object of Java
        """Return the schema of records with an Avro *definition*.

        Args:
            kind: `AVRO` or `JSON`.
        """
        common = self.gateway.jvm.org.apache.pulsar.common.schema
        info = common.SchemaInfo.builder().name("").type(getattr(common.SchemaType, kind))
        info = info.schema(definition.encode()).properties(self.gateway.jvm.java.util.HashMap())
        return self.api.Schema.generic(info.build())

    def send(self, topic: str, schema: Any, value: Any, key: str = "") -> str:  # noqa: ANN401 - Java
        """Produce one message with *schema*; return its id."""
        producer = self.pulsar.newProducer(schema).topic(topic).create()
        message = producer.newMessage().value(value)
        sent: str = (message.key(key) if key else message).send().toString()
        producer.close()
        return sent

    def retrying_consumer(
        self,
        policy: Policy,
        *,
        schema: Any = None,  # noqa: ANN401 - an object of Java
        names: Sequence[str] = ("retry", "dead-letter"),
    ) -> Consumer:
        """Consume like the program in docs/reference/java.md.

        Args:
            names: the topics that are set explicitly.

        Raises:
            JavaRefusedError: the subscription was refused.
        """
        letters = self.api.DeadLetterPolicy.builder().maxRedeliverCount(policy.max_retries)
        if "retry" in names:
            letters = letters.retryLetterTopic(str(policy.retry_topic))
        if "dead-letter" in names:
            letters = letters.deadLetterTopic(str(policy.dead_letter_topic))
        builder = self._consumer(str(policy.topic), policy.subscription, schema)
        builder = builder.enableRetry(*_YES).isAckReceiptEnabled(*_YES)
        return self._subscribe(builder.deadLetterPolicy(letters.build()))

    def consumer(
        self,
        topic: str,
        subscription: str,
        schema: Any = None,  # noqa: ANN401 - an object of Java
        *,
        private_key: Path | None = None,
    ) -> Consumer:
        """Consume without retries; *private_key* decrypts messages.

        Raises:
            JavaRefusedError: the subscription was refused.
        """
        builder = self._consumer(topic, subscription, schema)
        if private_key is not None:
            builder = builder.defaultCryptoKeyReader(private_key.as_uri())
        return self._subscribe(builder)

    def _consumer(self, topic: str, subscription: str, schema: Any) -> Any:  # noqa: ANN401 - Java
        topics = self.gateway.new_array(self.gateway.jvm.java.lang.String, 1)
        topics[0] = topic
        builder = self.pulsar.newConsumer(schema or self.api.Schema.BYTES)
        builder = builder.topic(topics).subscriptionName(subscription)
        return builder.subscriptionType(self.api.SubscriptionType.Shared)

    def _subscribe(self, builder: Any) -> Consumer:  # noqa: ANN401 - an object of Java
        with _refusals():
            consumer = Consumer(self.gateway, builder.subscribe())
        self._opened.callback(consumer.close)
        return consumer


@dataclass(frozen=True)
class Consumer:
    """A Java consumer."""

    gateway: JavaGateway
    handle: Any

    def receive(self) -> Message:
        """Return the next message; fail if none comes soon."""
        seconds = self.gateway.jvm.java.util.concurrent.TimeUnit.SECONDS
        received = self.handle.receive(int(RECEIVE.total_seconds()), seconds)
        assert received is not None, f"nothing came within {RECEIVE}"
        return Message(
            received,
            received.getValue(),
            received.getMessageId().toString(),
            received.getTopicName(),
            received.getKey() or "",
            bytes(received.getOrderingKey() or b""),
            received.getEventTime(),
            dict(received.getProperties()),
        )

    def reconsume_later(
        self,
        message: Message,
        delay: timedelta = timedelta(seconds=1),
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Retry *message* by the policy; dead-letter it if its retries are used up.

        The copy has *properties* besides those of the message.

        Raises:
            JavaRefusedError: it could not be sent to either topic.
        """
        unit = self.gateway.jvm.java.util.concurrent.TimeUnit.SECONDS
        custom = self.gateway.jvm.java.util.HashMap()
        for name, value in properties.items():
            custom.put(name, value)
        with _refusals():
            self.handle.reconsumeLater(message.handle, custom, int(delay.total_seconds()), unit)

    def acknowledge(self, message: Message) -> None:
        """Settle *message*."""
        self.handle.acknowledge(message.handle)

    def close(self) -> None:
        """Close the consumer; a second call has no effect."""
        self.handle.close()


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except Py4JJavaError as error:
        raise JavaRefusedError(str(error.java_exception.toString())) from error
