"""Actions that change the broker, and their execution.

What can be done for a policy, as frozen values: `diff` chooses, `apply` does.

An action as a string says what has been done, once it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from redrive.admin.model import RightsChange, Schema
from redrive.admin.policies import DELAYED_DELIVERY, TopicPolicy, Write
from redrive.api import Body
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import TopicName


@dataclass(frozen=True)
class CreateTopic:
    """Create a topic with properties; 0 partitions means that it is not partitioned."""

    topic: TopicName
    partitions: int
    properties: Mapping[str, str]

    def __str__(self) -> str:
        return f"created {self.topic} with {self.partitions or 'no'} partitions"


@dataclass(frozen=True)
class Mark:
    """Set properties of a topic, which tell whose it is and what redrive added to it."""

    topic: TopicName
    properties: Mapping[str, str]

    def __str__(self) -> str:
        if self.properties.get(TOPIC_OWNER) == "":
            return f"took the mark off {self.topic}"
        if TOPIC_OWNER in self.properties:
            return f"marked {self.topic} as kept by {self.properties[TOPIC_OWNER]}"
        return f"noted on {self.topic.local} what redrive added"


@dataclass(frozen=True)
class AddPartitions:
    """Have a partitioned topic grow."""

    topic: TopicName
    partitions: int

    def __str__(self) -> str:
        return f"added partitions to {self.topic}, {self.partitions} now"


@dataclass(frozen=True)
class RestorePartitions:
    """Create partitions again that were deleted; what they held is gone."""

    topic: TopicName
    missing: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.missing))
        return f"created missing partitions of {self.topic} again: {numbers}"


@dataclass(frozen=True)
class SetTopicPolicy:
    """Make one write that a topic policy needs.

    Attributes:
        write: None where that follows from what is in force once the topic exists: it is read
            then, and nothing is written where that is enough.
    """

    topic: TopicName
    policy: TopicPolicy
    write: Write | None

    def __str__(self) -> str:
        return f"set {self.policy} on {self.topic.local}"


@dataclass(frozen=True)
class RestoreTopicPolicy:
    """Make one write by which a topic has a policy of its own, or none, as before redrive."""

    topic: TopicName
    policy: str
    write: Write

    def __str__(self) -> str:
        return f"restored {self.policy} of {self.topic.local}"


@dataclass(frozen=True)
class CopySchema:
    """Give a topic all versions of the source topic's schema, then note which was the newest.

    Attributes:
        schema: the newest.
    """

    topic: TopicName
    source: TopicName
    schema: Schema

    def __str__(self) -> str:
        return f"copied the source topic's {self.schema.type} schema to {self.topic.local}"


@dataclass(frozen=True)
class ChangeRights:
    """Give roles what they need, and take what they need no more; what others gave stays."""

    changes: tuple[RightsChange, ...]

    def __str__(self) -> str:
        return ", ".join(line for change in self.changes for line in _in_words(change))


@dataclass(frozen=True)
class CreateSubscription:
    """Create a subscription that begins with the first message."""

    topic: TopicName
    subscription: str

    def __str__(self) -> str:
        return f"created subscription {self.subscription} on {self.topic.local}"


@dataclass(frozen=True)
class DeleteTopic:
    """Delete a topic with all that it holds."""

    topic: TopicName
    partitioned: bool

    def __str__(self) -> str:
        return f"deleted {self.topic}"


@dataclass(frozen=True)
class DeleteSubscription:
    """Delete a subscription with its backlog."""

    topic: TopicName
    subscription: str

    def __str__(self) -> str:
        return f"deleted subscription {self.subscription} on {self.topic.local}"


@dataclass(frozen=True)
class CreateConfigMap:
    """Create the ConfigMap for consumers."""

    body: Body

    def __str__(self) -> str:
        return f"created ConfigMap {self.body['metadata']['name']}"


@dataclass(frozen=True)
class PatchConfigMap:
    """Bring our key of our ConfigMap to what it should hold."""

    body: Body

    def __str__(self) -> str:
        return f"updated ConfigMap {self.body['metadata']['name']}"


OnTopic = (
    CreateTopic
    | Mark
    | AddPartitions
    | RestorePartitions
    | SetTopicPolicy
    | RestoreTopicPolicy
    | CreateSubscription
    | DeleteTopic
    | DeleteSubscription
)
"""What is one call about one topic."""
Action = OnTopic | CopySchema | ChangeRights | CreateConfigMap | PatchConfigMap


Refusable = CopySchema | SetTopicPolicy


def is_refusable(action: Action) -> TypeGuard[Refusable]:
    """Whether a policy works without *action*, if not as well, where the broker refuses it."""
    if isinstance(action, SetTopicPolicy):
        return action.policy.own == DELAYED_DELIVERY
    return isinstance(action, CopySchema)


def in_words(actions: Iterable[Action]) -> str:
    """Describe *actions*, done, in one line."""
    return "; ".join(map(str, actions))


def _in_words(change: RightsChange) -> Iterator[str]:
    if change.give:
        yield f"granted {'+'.join(sorted(change.give))} on {change.topic.local} to {change.role}"
    if change.take:
        yield f"revoked {'+'.join(sorted(change.take))} on {change.topic.local} of {change.role}"
