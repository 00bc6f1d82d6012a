"""Actions of provisioning as frozen values that carry their call; pure but for the calls.

`diff` chooses actions, and `apply` performs them in order. After a crash the next reconcile
performs the remaining ones. `BrokerWrites` and `ObjectWrites` list all writes of provisioning. The
text of an action describes it in the past tense, for Events and logs.
"""

# ruff: noqa: ARG002, D102  methods of protocols are documented where they are implemented

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from redrive.admin.errors import (
    AdminConflictError,
    AdminError,
    AdminForbiddenError,
    BrokerRefusedError,
    UnsupportedError,
)
from redrive.admin.model import RightsChange, Schema
from redrive.admin.policies import DELAYED_DELIVERY, TopicPolicy, Write
from redrive.api import Body
from redrive.kube import resources
from redrive.kube.resources import TOPIC_OWNER, Key, Resource
from redrive.policy.naming import PARTITION_SUFFIX, TopicName
from redrive.provision import ownership
from redrive.reasons import Reason


class BrokerWrites(Protocol):
    """The writes that provisioning may make at a broker, and the reads that they need."""

    async def create_topic(
        self, topic: TopicName, partitions: int, properties: Mapping[str, str]
    ) -> None: ...
    async def delete_topic(self, topic: TopicName, *, partitioned: bool) -> None: ...
    async def set_properties(self, topic: TopicName, properties: Mapping[str, str]) -> None: ...
    async def add_partitions(self, topic: TopicName, partitions: int) -> None: ...
    async def restore_partitions(self, topic: TopicName) -> None: ...
    async def set_topic_policy(
        self, topic: TopicName, policy: TopicPolicy | str, write: Write
    ) -> None: ...
    async def put_schema(self, topic: TopicName, schema: Schema) -> None: ...
    async def create_subscription(self, topic: TopicName, name: str) -> None: ...
    async def delete_subscription(self, topic: TopicName, name: str) -> None: ...
    async def policy_of_new_topic(self, topic: TopicName, policy: TopicPolicy) -> Any: ...  # noqa: ANN401
    async def schemas(self, topic: TopicName) -> tuple[Schema, ...]: ...
    async def topics(self, namespace: str) -> tuple[frozenset[str], frozenset[str]]: ...
    async def partitions(self, topic: TopicName) -> int: ...


class ObjectWrites(Protocol):
    """The writes of objects that provisioning may make through actions."""

    async def create(self, resource: Resource, body: Body) -> Body: ...
    async def patch(self, resource: Resource, key: Key, patch: Body) -> Body: ...


class Targets(NamedTuple):
    """The targets of calls.

    Attributes:
        grant: changes grants, together with other callers that announced theirs.
        kubernetes: None skips ConfigMaps.
    """

    broker: BrokerWrites
    grant: Callable[[Sequence[RightsChange]], Awaitable[None]]
    kubernetes: ObjectWrites | None


@dataclass
class Applied:
    """Results of actions.

    Attributes:
        done: actions that changed something, in order.
        refused: actions that the broker refused.
        in_force: topic policies of new topics by their read name, where the value was unknown
            before.
    """

    done: list[Action] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    in_force: dict[str, Any] = field(default_factory=dict)


async def apply(planned: Iterable[Action], on: Targets) -> Applied:
    """Perform *planned* actions in order, and return the results.

    Raises:
        AdminError, KubernetesError: an action failed; the actions before it are performed.
        StrayPartition: a topic has the name of a partition; see there.
    """
    applied = Applied()
    for action in planned:
        if await action.perform(on, applied):
            applied.done.append(action)
    return applied


@dataclass(frozen=True)
class Action(ABC):
    """One action; its class is a label of metrics."""

    @property
    def is_refusable(self) -> bool:
        """Return True if a policy works, less well, even if the broker refuses the action."""
        return False

    @abstractmethod
    async def perform(self, on: Targets, applied: Applied) -> bool:
        """Perform the action, and return True if it changed something."""


@dataclass(frozen=True)
class TopicAction(Action):
    """One call to the broker about a topic, which changes something unless it fails."""

    topic: TopicName

    @abstractmethod
    async def call(self, broker: BrokerWrites) -> None:
        """Make the call."""

    async def perform(self, on: Targets, applied: Applied) -> bool:
        await self.call(on.broker)
        return True


@dataclass(frozen=True)
class CreateTopic(TopicAction):
    """Create a topic with properties; 0 partitions means a topic that is not partitioned."""

    partitions: int
    properties: Mapping[str, str]

    def __str__(self) -> str:
        return f"created {self.topic} with {self.partitions or 'no'} partitions"

    async def call(self, broker: BrokerWrites) -> None:
        async with _naming_strays(self.topic, broker):
            await broker.create_topic(self.topic, self.partitions, self.properties)


@dataclass(frozen=True)
class Mark(TopicAction):
    """Set topic properties that record the owner and the additions of redrive."""

    properties: Mapping[str, str]

    def __str__(self) -> str:
        if self.properties.get(TOPIC_OWNER) == "":
            return f"removed the owner from {self.topic}"
        if TOPIC_OWNER in self.properties:
            return f"recorded {self.properties[TOPIC_OWNER]} as owner of {self.topic}"
        return f"recorded on {self.topic.local} the additions of redrive"

    async def call(self, broker: BrokerWrites) -> None:
        await broker.set_properties(self.topic, self.properties)


@dataclass(frozen=True)
class AddPartitions(TopicAction):
    """Add partitions to a partitioned topic."""

    partitions: int

    def __str__(self) -> str:
        return f"added partitions to {self.topic}: {self.partitions} in total"

    async def call(self, broker: BrokerWrites) -> None:
        async with _naming_strays(self.topic, broker):
            await broker.add_partitions(self.topic, self.partitions)


@dataclass(frozen=True)
class RestorePartitions(TopicAction):
    """Recreate partitions that were deleted; their messages are lost."""

    missing: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.missing))
        return f"recreated missing partitions of {self.topic}: {numbers}"

    async def call(self, broker: BrokerWrites) -> None:
        await broker.restore_partitions(self.topic)


@dataclass(frozen=True)
class SetTopicPolicy(Action):
    """Perform one write of a topic policy.

    Attributes:
        write: None if it depends on the value in force after the topic is created. `apply` then
            reads that value, and writes nothing if it is sufficient.
    """

    topic: TopicName
    policy: TopicPolicy
    write: Write | None

    def __str__(self) -> str:
        return f"set {self.policy} on {self.topic.local}"

    @property
    def is_refusable(self) -> bool:
        return self.policy.own == DELAYED_DELIVERY

    async def perform(self, on: Targets, applied: Applied) -> bool:
        """Set the policy; first read the value in force if the write depends on it.

        The broker, or a proxy that authorizes calls, may forbid both.
        """
        topic, policy, write = self.topic, self.policy, self.write
        try:
            if write is None:
                in_force = await on.broker.policy_of_new_topic(topic, policy)
                applied.in_force[policy.read] = in_force
                write = next(policy.writes(in_force), None)
                if write is None:
                    return False
                await on.broker.set_topic_policy(topic, policy, write)
                applied.in_force[policy.read] = write.body
            else:
                await on.broker.set_topic_policy(topic, policy, write)
        except (AdminForbiddenError, BrokerRefusedError, UnsupportedError) as error:
            if not self.is_refusable:
                raise
            applied.refused.append(Refused(self, error))
            return False
        return True


@dataclass(frozen=True)
class RestoreTopicPolicy(TopicAction):
    """Perform one write that restores a topic policy to its value before redrive."""

    policy: str
    write: Write

    def __str__(self) -> str:
        return f"restored {self.policy} of {self.topic.local}"

    async def call(self, broker: BrokerWrites) -> None:
        await broker.set_topic_policy(self.topic, self.policy, self.write)


@dataclass(frozen=True)
class CopySchema(Action):
    """Copy all versions of the source topic's schema, and record the latest.

    Attributes:
        schema: the latest version.
    """

    topic: TopicName
    source: TopicName
    schema: Schema

    def __str__(self) -> str:
        return f"copied the source topic's {self.schema.type} schema to {self.topic.local}"

    is_refusable = True

    async def perform(self, on: Targets, applied: Applied) -> bool:
        """Copy missing versions in order; refusals do not fail the policy.

        After a refusal the remaining versions are still tried: most consumers need the latest.
        """
        refused = None
        existing = await on.broker.schemas(self.topic)
        for version in await on.broker.schemas(self.source):
            if version not in existing:
                try:
                    await on.broker.put_schema(self.topic, version)
                except (AdminConflictError, BrokerRefusedError) as error:
                    refused = refused or Refused(self, error)
        if refused is not None:
            applied.refused.append(refused)
            return False
        fingerprint = {ownership.SCHEMA: self.schema.fingerprint}
        await on.broker.set_properties(self.topic, fingerprint)
        return True


@dataclass(frozen=True)
class ChangeRights(Action):
    """Grant missing actions to roles and revoke redrive's surplus ones; keep grants of others."""

    changes: tuple[RightsChange, ...]

    def __str__(self) -> str:
        return ", ".join(line for change in self.changes for line in _in_words(change))

    async def perform(self, on: Targets, applied: Applied) -> bool:
        await on.grant(self.changes)
        return True


@dataclass(frozen=True)
class CreateSubscription(TopicAction):
    """Create a subscription that starts at the earliest message."""

    subscription: str

    def __str__(self) -> str:
        return f"created subscription {self.subscription} on {self.topic.local}"

    async def call(self, broker: BrokerWrites) -> None:
        await broker.create_subscription(self.topic, self.subscription)


@dataclass(frozen=True)
class DeleteTopic(TopicAction):
    """Delete a topic and its messages."""

    partitioned: bool

    def __str__(self) -> str:
        return f"deleted {self.topic}"

    async def call(self, broker: BrokerWrites) -> None:
        await broker.delete_topic(self.topic, partitioned=self.partitioned)


@dataclass(frozen=True)
class DeleteSubscription(TopicAction):
    """Delete a subscription and its backlog."""

    subscription: str

    def __str__(self) -> str:
        return f"deleted subscription {self.subscription} on {self.topic.local}"

    async def call(self, broker: BrokerWrites) -> None:
        await broker.delete_subscription(self.topic, self.subscription)


@dataclass(frozen=True)
class CreateConfigMap(Action):
    """Create the ConfigMap of the consumers."""

    body: Body

    def __str__(self) -> str:
        return f"created ConfigMap {self.body['metadata']['name']}"

    async def perform(self, on: Targets, applied: Applied) -> bool:
        if on.kubernetes is None:
            return False
        await on.kubernetes.create(resources.CONFIG_MAPS, self.body)
        return True


@dataclass(frozen=True)
class PatchConfigMap(Action):
    """Update the label and the key of the ConfigMap that belong to redrive."""

    body: Body

    def __str__(self) -> str:
        return f"updated ConfigMap {self.body['metadata']['name']}"

    async def perform(self, on: Targets, applied: Applied) -> bool:
        if on.kubernetes is None:
            return False
        body = self.body
        ours = {"metadata": {"labels": body["metadata"]["labels"]}, "data": body["data"]}
        await on.kubernetes.patch(resources.CONFIG_MAPS, Key.of(body), ours)
        return True


Refusable = CopySchema | SetTopicPolicy


@dataclass(frozen=True)
class Refused:
    """Action that the broker refused and without which the policy still works."""

    action: Refusable
    error: AdminError


def in_words(actions: Iterable[object]) -> str:
    """Describe performed *actions* in one line."""
    return "; ".join(map(str, actions))


def _in_words(change: RightsChange) -> Iterator[str]:
    if change.give:
        yield f"granted {'+'.join(sorted(change.give))} on {change.topic.local} to {change.role}"
    if change.take:
        yield f"revoked {'+'.join(sorted(change.take))} on {change.topic.local} from {change.role}"


@asynccontextmanager
async def _naming_strays(topic: TopicName, broker: BrokerWrites) -> AsyncIterator[None]:
    """Name the stray topic if the broker refuses to create partitions: its answer does not.

    Raises:
        StrayPartition: a topic has the name of a partition that should be created.
    """
    try:
        yield
    except AdminConflictError as error:
        topics, partitioned = await broker.topics(topic.namespace_name)
        count = await broker.partitions(topic) if str(topic) in partitioned else 0
        indexes = (int(match[1]) for match in map(PARTITION_SUFFIX.search, topics) if match)
        strays = {str(topic.partition(index)) for index in indexes if index >= count} & topics
        if not strays:
            raise
        raise Reason.STRAY_PARTITION.error(
            f"the broker cannot create the partitions of {topic}: another topic has the name of a "
            "partition",
            got=min(strays),
            remedy="process or move its messages and delete it; stop the client that uses the "
            "partition name, because it would create the topic again",
        ) from error
