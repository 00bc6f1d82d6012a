"""The topics, subscriptions and rights of one policy, created by REST as by the operator."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pulsar
import pytest

from redrive import (
    AsyncRetryConsumer,
    AsyncSimpleConsumer,
    Policy,
    PolicyFile,
    RetryConsumer,
    SimpleConsumer,
)
from redrive.policy import naming
from redrive.policy.envelope import for_replay
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, Scheme, TopicName
from sandbox.pulsar import SUPERUSER, Broker
from tests.support.namespaces import PolicyNamespace, grant_all
from tests.support.topics import await_deduplication, drain, enable_deduplication, path, stats, tell
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class ProvisionedPolicy:
    """A policy with its topics, and a consumer role with exactly the required rights."""

    broker: Broker
    policy: Policy
    role: str
    closing: ExitStack

    def client(self, role: str) -> pulsar.Client:
        """A client of *role*, open until the test ends."""
        client = pulsar.Client(
            self.broker.service_url,
            authentication=pulsar.AuthenticationToken(self.broker.token(role)),
            logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        )
        self.closing.callback(_close, client)
        return client

    def consumer(
        self,
        policy: PolicyFile | None = None,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> RetryConsumer:
        """A consumer with the consumer role's own token, closed when the test ends."""
        consumer = RetryConsumer(self.client(self.role), policy or self.policy, **options)
        self.closing.callback(consumer.close)
        return consumer

    def async_consumer(
        self,
        policy: PolicyFile | None = None,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> AsyncRetryConsumer:
        """The same for asyncio; whoever enters it leaves it."""
        return AsyncRetryConsumer(self.client(self.role), policy or self.policy, **options)

    def simple_consumer(
        self,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> SimpleConsumer:
        """A `SimpleConsumer` with the consumer role's own token, closed when the test ends."""
        consumer = SimpleConsumer(self.client(self.role), self.policy, **options)
        self.closing.callback(consumer.close)
        return consumer

    def async_simple_consumer(
        self,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> AsyncSimpleConsumer:
        """The same for asyncio; whoever enters it leaves it."""
        return AsyncSimpleConsumer(self.client(self.role), self.policy, **options)

    def send(
        self,
        *contents: bytes | None,
        topic: TopicName | None = None,
        **fields: Any,  # noqa: ANN401 - as the client takes them
    ) -> list[pulsar.MessageId]:
        """Produce to the source topic, or to *topic*, like an application."""
        producer = self.client(SUPERUSER).create_producer(str(topic or self.policy.topic))
        ids = [producer.send(content, **fields) for content in contents]
        producer.close()
        return ids

    def dead_letters(self, count: int) -> list[pulsar.Message]:
        """Return exactly *count* dead letters; fail if fewer or more come."""
        dead = self.client(SUPERUSER).subscribe(
            str(self.policy.dead_letter_topic),
            DEAD_LETTER_SUBSCRIPTION,
            consumer_type=pulsar.ConsumerType.Shared,
        )
        messages = [dead.receive(timeout_millis=180_000) for _ in range(count)]
        with pytest.raises(pulsar.Timeout):
            dead.receive(timeout_millis=300)
        dead.close()
        return messages

    def backlog(self, topic: TopicName) -> int:
        """Return the number of unacknowledged messages of *topic* in the policy's subscription."""
        count: int = stats(self.broker, topic, self.policy.subscription)["msgBacklog"]
        return count

    def given_out(self, topic: TopicName) -> int:
        """Return the number of delivered and unacknowledged messages of *topic*."""
        count: int = stats(self.broker, topic, self.policy.subscription)["unackedMessages"]
        return count

    def unsettled(self, partitions: int = 0) -> int:
        """Return the number of unacknowledged messages of the source and the retry topic."""
        topics = (self.policy.topic, self.policy.retry_topic)
        if not partitions:
            return sum(map(self.backlog, topics))
        return sum(self.backlog(topic.partition(n)) for topic in topics for n in range(partitions))

    def wait_until_settled(self, seconds: float = 180.0) -> None:
        """Wait until no message is unsettled; else fail with the cursors of both topics."""
        try:
            wait_until(lambda: not self.unsettled(), seconds)
        except AssertionError as error:
            for topic in (self.policy.topic, self.policy.retry_topic):
                cursors = tell(self.broker, topic, "internalStats")["cursors"]
                error.add_note(f"{topic}: {cursors[self.policy.subscription]}")
            raise

    def unload(self) -> None:
        """Move the consumed topics: the broker redelivers in-flight messages."""
        for topic in (self.policy.topic, self.policy.retry_topic):
            self.broker.request("PUT", f"{path(topic)}/unload").check(f"unload {topic}")

    def replay(self) -> list[bytes]:
        """Move all dead letters to the retry topic in their order, like a Replay."""
        client = self.client(SUPERUSER)
        producer = client.create_producer(str(self.policy.retry_topic), batching_enabled=False)
        moved = []
        for letter in self.drain_dead_letters(client, acknowledge=True):
            producer.send(
                letter.data(),
                partition_key=letter.partition_key(),
                properties=for_replay(letter.properties(), replay="shop/test", source="test"),
            )
            moved.append(letter.data())
        return moved

    def drain_dead_letters(
        self, client: pulsar.Client, *, acknowledge: bool = False
    ) -> Generator[pulsar.Message]:
        """Return all dead letters, and acknowledge them on request."""
        topic = self.policy.dead_letter_topic
        return drain(self.broker, client, topic, DEAD_LETTER_SUBSCRIPTION, acknowledge=acknowledge)

    def refuse(self, topic: TopicName) -> None:
        """Take from the consumer role the right to produce to *topic*."""
        if topic in self._consumed:
            self.grant(topic, "consume")
        else:
            url = f"{path(topic)}/permissions/{self.role}"
            self.broker.request("DELETE", url).check(f"revoke rights on {topic}")

    def accept(self, topic: TopicName) -> None:
        """Grant the right again."""
        kept = ("consume",) if topic in self._consumed else ()
        self.grant(topic, *kept, "produce")

    @property
    def _consumed(self) -> tuple[TopicName, ...]:
        return self.policy.retry_topic, self.policy.sequences_topic

    def grant(self, topic: TopicName, *actions: str) -> None:
        """Grant the consumer role exactly *actions* on *topic*."""
        grant_all(self.broker, self.role, {topic: actions})

    def create(self, topic: TopicName, subscription: str, partitions: int) -> None:
        """Create *topic*, partitioned if it has any, with a subscription from its first message."""
        kind = "/partitions" if partitions else ""
        self.broker.request("PUT", f"{path(topic)}{kind}", partitions or None).check(
            f"create {topic}"
        )
        self.broker.request(
            "PUT", f"{path(topic)}/subscription/{subscription}", {"ledgerId": -1, "entryId": -1}
        ).check(f"subscribe {topic}")


def _close(client: pulsar.Client) -> None:
    with suppress(pulsar.AlreadyClosed):  # some tests close theirs
        client.close()


ProvisionPolicy = Callable[..., ProvisionedPolicy]


@pytest.fixture
def provision_policy(
    broker: Broker, policy_namespace: PolicyNamespace
) -> Iterator[ProvisionPolicy]:
    """Create a policy's topics, subscriptions and rights; see `_provision_policy` for arguments."""
    with ExitStack() as closing:

        def provision_policy(**choices: Any) -> ProvisionedPolicy:  # noqa: ANN401 - passed on
            return _provision_policy(broker, policy_namespace, closing, **choices)

        yield provision_policy


def _provision_policy(  # noqa: PLR0913 - options of tests
    broker: Broker,
    namespace: PolicyNamespace,
    closing: ExitStack,
    *,
    topic: str = "orders",
    delays: Sequence[str] = ("1s",),
    max_retries: int = 16,
    dead_letters: bool = True,
    ordered: bool = False,
    sequenced: bool = False,
    scheme: Scheme = Scheme.PULSAR,
    kind: SubscriptionType = SubscriptionType.SHARED,
    partitions: int = 0,
    retry_partitions: int | None = None,
    dead_letter_partitions: int = 0,
    retry_rights: Sequence[str] = ("consume", "produce"),
) -> ProvisionedPolicy:
    source, subscription = namespace.source(topic), "fulfilment"
    policy = Policy(
        topic=source,
        subscription=subscription,
        retry_topic=naming.retry_topic(source, subscription, scheme),
        dead_letter_topic=naming.dead_letter_topic(source, subscription, scheme),
        subscription_type=kind,
        max_retries=max_retries,
        dead_letters=dead_letters,
        ordered=ordered,
        sequenced=sequenced,
        ladder=Ladder.from_delays(delays),
        name="shop/orders",
    )
    provisioned = ProvisionedPolicy(broker, policy, f"consumer-{secrets.token_hex(4)}", closing)
    of_retry = partitions if retry_partitions is None else retry_partitions
    provisioned.create(policy.retry_topic, policy.subscription, of_retry)
    provisioned.create(policy.dead_letter_topic, DEAD_LETTER_SUBSCRIPTION, dead_letter_partitions)
    for deduplicated in (policy.retry_topic, policy.dead_letter_topic):
        enable_deduplication(broker, deduplicated)
    provisioned.create(policy.topic, policy.subscription, partitions)
    rights: dict[TopicName, Sequence[str]] = {
        policy.topic: ["consume"],
        policy.retry_topic: retry_rights,
        policy.dead_letter_topic: ["produce"],
    }
    if sequenced:
        provisioned.create(policy.sequences_topic, naming.LEDGER_SUBSCRIPTION, 0)
        rights[policy.sequences_topic] = ["consume", "produce"]
    namespace.topics.extend(rights)
    grant_all(broker, provisioned.role, rights)
    await_deduplication(broker, policy.retry_topic, of_retry)
    await_deduplication(broker, policy.dead_letter_topic, dead_letter_partitions)
    return provisioned
