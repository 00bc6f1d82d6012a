"""Two worlds for one suite: a real broker, and the one in memory that users test with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import pulsar
import pytest

from redrive import (
    AsyncRetryConsumer,
    AsyncSimpleConsumer,
    Event,
    Policy,
    PolicyFile,
    RetryConsumer,
    SimpleConsumer,
)
from redrive.policy.envelope import for_replay
from redrive.policy.ladder import Ladder
from redrive.policy.model import SubscriptionType
from redrive.policy.naming import TopicName
from redrive.testing.broker import InMemoryBroker
from redrive.testing.consumers import (
    AsyncInMemoryConsumer,
    AsyncInMemorySimpleConsumer,
    InMemoryConsumer,
    InMemorySimpleConsumer,
)
from tests.support.consumers import SynchronousAdapter
from tests.support.provisioned_policy import provision_policy
from tests.support.waiting import wait_until

__all__ = ["provision_policy"]


class World(Protocol):
    """A policy with its topics."""

    @property
    def policy(self) -> Policy: ...

    def consumer(
        self,
        policy: PolicyFile | None = None,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> RetryConsumer:
        """Make a consumer of the policy, or of the one in a file."""

    def async_consumer(
        self,
        policy: PolicyFile | None = None,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> AsyncRetryConsumer:
        """Make the same for asyncio."""

    def simple_consumer(self, **options: Any) -> SimpleConsumer:  # noqa: ANN401 - see above
        """Make one for those who ask for messages."""

    def async_simple_consumer(self, **options: Any) -> AsyncSimpleConsumer:  # noqa: ANN401
        """Make the same for asyncio."""

    def send(self, *contents: bytes | None, **fields: Any) -> list[pulsar.MessageId]:  # noqa: ANN401
        """Produce to the source topic."""

    def dead_letters(self, count: int) -> list[pulsar.Message]:
        """Return exactly *count* dead letters."""

    def backlog(self, topic: TopicName) -> int:
        """Count unsettled messages of *topic*, once every consumer is closed."""

    def unload(self) -> None:
        """Have the broker deliver in-flight messages again, as after a topic has moved."""

    def replay(self) -> list[bytes]:
        """Move all dead letters to the retry topic in their order, as a Replay does."""

    def refuse(self, topic: TopicName) -> None:
        """Let consumers send nothing to *topic*; before they have sent anything."""

    def accept(self, topic: TopicName) -> None:
        """Let them send to it again."""


class InMemoryWorld:
    """The topics in memory."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._broker = InMemoryBroker(policy)

    def consumer(
        self,
        policy: PolicyFile | None = None,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> RetryConsumer:
        return InMemoryConsumer(policy or self.policy, broker=self._broker, **options)

    def async_consumer(
        self,
        policy: PolicyFile | None = None,
        **options: Any,  # noqa: ANN401 - as the consumer takes them
    ) -> AsyncRetryConsumer:
        return AsyncInMemoryConsumer(policy or self.policy, broker=self._broker, **options)

    def simple_consumer(self, **options: Any) -> SimpleConsumer:  # noqa: ANN401 - see World
        return InMemorySimpleConsumer(self.policy, broker=self._broker, **options)

    def async_simple_consumer(self, **options: Any) -> AsyncSimpleConsumer:  # noqa: ANN401
        return AsyncInMemorySimpleConsumer(self.policy, broker=self._broker, **options)

    def send(self, *contents: bytes | None, **fields: Any) -> list[pulsar.MessageId]:  # noqa: ANN401
        producer = InMemoryConsumer(self.policy, broker=self._broker)
        return [producer.send(content, **fields) for content in contents]

    def dead_letters(self, count: int) -> list[pulsar.Message]:
        assert len(self._broker.dead_letters) == count
        return list(self._broker.dead_letters)

    def backlog(self, topic: TopicName) -> int:
        return sum(message.topic == topic for message in self._broker.unsettled())

    def unload(self) -> None:
        self._broker.unload()

    def replay(self) -> list[bytes]:
        letters, self._broker.dead_letters = self._broker.dead_letters, []
        for letter in letters:
            properties = for_replay(letter.properties(), replay="shop/test", source="test")
            copy = replace(letter, headers=properties)
            self._broker.store(self.policy.retry_topic, copy)
        return [letter.data() for letter in letters]

    def refuse(self, topic: TopicName) -> None:
        self._broker.refused.add(topic)

    def accept(self, topic: TopicName) -> None:
        self._broker.refused.remove(topic)


class AsyncWorld:
    """A world whose consumers are asynchronous."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the world has it
        return getattr(self._world, name)

    def consumer(self, *arguments: Any, **named: Any) -> SynchronousAdapter:  # noqa: ANN401
        return SynchronousAdapter(self._world.async_consumer(*arguments, **named))

    def simple_consumer(self, **options: Any) -> SynchronousAdapter:  # noqa: ANN401 - see World
        return SynchronousAdapter(self._world.async_simple_consumer(**options))


MakeWorld = Callable[..., Any]


class Observed:
    """Collects the events of a consumer."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event.event.value)

    def wait(self, consumer: Any, event: str, count: int) -> None:  # noqa: ANN401 - see World
        """Receive nothing until that event has come *count* times."""
        while self.events.count(event) < count:
            assert consumer.receive(timedelta(seconds=1)) is None


def wait_until_settled(world: World, receive: Callable[[], object]) -> None:
    """Receive nothing until nothing is left of the source topic.

    A client that still reconnects sends no acknowledgement: a redelivered message is acknowledged
    again once it is received.
    """

    def is_settled() -> bool:
        assert not receive()
        return not world.backlog(world.policy.topic)

    wait_until(is_settled)


def assert_nothing_left(world: World) -> None:
    """Wait for acknowledgements of a consumer whose close has not waited for the broker."""
    policy = world.policy
    wait_until(lambda: world.backlog(policy.topic) == world.backlog(policy.retry_topic) == 0)


def facades(*names: str) -> pytest.MarkDecorator:
    """Run tests in worlds of both kinds of consumers.

    Args:
        names: worlds beside those of all tests. `memory-asyncio` is for all that the asynchronous
            consumers have too; a few tests prove in `broker-asyncio` that they reach a broker.
    """
    return pytest.mark.parametrize("make_world", ["memory", "broker", *names], indirect=True)


BOTH = facades("memory-asyncio")
BOTH_AT_BROKER = facades("memory-asyncio", "broker-asyncio")


@pytest.fixture(params=["memory", "broker"])
def make_world(request: pytest.FixtureRequest) -> MakeWorld:
    """Make a policy's topics; takes `delays`, `max_retries`, `dead_letters` and more."""
    make: Callable[..., World] = _in_memory
    if request.param.startswith("broker"):
        make = request.getfixturevalue("provision_policy")
    if request.param.endswith("asyncio"):
        return lambda **choices: AsyncWorld(make(**choices))
    return make


def _in_memory(  # noqa: PLR0913 - the choices of tests
    *,
    delays: tuple[str, ...] = ("1s",),
    max_retries: int = 16,
    dead_letters: bool = True,
    ordered: bool = False,
    sequenced: bool = False,
    kind: SubscriptionType = SubscriptionType.SHARED,
) -> World:
    return InMemoryWorld(
        Policy(
            topic=TopicName("shop", "prod", "orders"),
            subscription="fulfilment",
            max_retries=max_retries,
            dead_letters=dead_letters,
            ordered=ordered,
            sequenced=sequenced,
            subscription_type=kind,
            ladder=Ladder.from_delays(delays),
        )
    )
