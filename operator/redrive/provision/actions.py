"""Actions of provisioning as frozen values: `diff` chooses them, `apply` performs them.

The text of an action describes it in the past tense, for Events and logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from redrive.admin.errors import AdminError
from redrive.admin.model import RightsChange, Schema
from redrive.admin.policies import DELAYED_DELIVERY, TopicPolicy, Write
from redrive.api import Body
from redrive.kube.resources import TOPIC_OWNER
from redrive.policy.naming import TopicName


@dataclass(frozen=True)
class CreateTopic:
    """Create a topic with properties; 0 partitions means a topic that is not partitioned."""

    topic: TopicName
    partitions: int
    properties: Mapping[str, str]

    def __str__(self) -> str:
        return f"created {self.topic} with {self.partitions or 'no'} partitions"


@dataclass(frozen=True)
class Mark:
    """Set topic properties that record the owner and the additions of redrive."""

    topic: TopicName
    properties: Mapping[str, str]

    def __str__(self) -> str:
        if self.properties.get(TOPIC_OWNER) == "":
            return f"removed the owner from {self.topic}"
        if TOPIC_OWNER in self.properties:
            return f"recorded {self.properties[TOPIC_OWNER]} as owner of {self.topic}"
        return f"recorded on {self.topic.local} the additions of redrive"


@dataclass(frozen=True)
class AddPartitions:
    """Add partitions to a partitioned topic."""

    topic: TopicName
    partitions: int

    def __str__(self) -> str:
        return f"added partitions to {self.topic}: {self.partitions} in total"


@dataclass(frozen=True)
class RestorePartitions:
    """Recreate partitions that were deleted; their messages are lost."""

    topic: TopicName
    missing: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.missing))
        return f"recreated missing partitions of {self.topic}: {numbers}"


@dataclass(frozen=True)
class SetTopicPolicy:
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


@dataclass(frozen=True)
class RestoreTopicPolicy:
    """Perform one write that restores a topic policy to its value before redrive."""

    topic: TopicName
    policy: str
    write: Write

    def __str__(self) -> str:
        return f"restored {self.policy} of {self.topic.local}"


@dataclass(frozen=True)
class CopySchema:
    """Copy all versions of the source topic's schema, and record the latest.

    Attributes:
        schema: the latest version.
    """

    topic: TopicName
    source: TopicName
    schema: Schema

    def __str__(self) -> str:
        return f"copied the source topic's {self.schema.type} schema to {self.topic.local}"


@dataclass(frozen=True)
class ChangeRights:
    """Grant missing actions to roles and revoke redrive's surplus ones; keep grants of others."""

    changes: tuple[RightsChange, ...]

    def __str__(self) -> str:
        return ", ".join(line for change in self.changes for line in _in_words(change))


@dataclass(frozen=True)
class CreateSubscription:
    """Create a subscription that starts at the earliest message."""

    topic: TopicName
    subscription: str

    def __str__(self) -> str:
        return f"created subscription {self.subscription} on {self.topic.local}"


@dataclass(frozen=True)
class DeleteTopic:
    """Delete a topic and its messages."""

    topic: TopicName
    partitioned: bool

    def __str__(self) -> str:
        return f"deleted {self.topic}"


@dataclass(frozen=True)
class DeleteSubscription:
    """Delete a subscription and its backlog."""

    topic: TopicName
    subscription: str

    def __str__(self) -> str:
        return f"deleted subscription {self.subscription} on {self.topic.local}"


@dataclass(frozen=True)
class CreateConfigMap:
    """Create the ConfigMap of the consumers."""

    body: Body

    def __str__(self) -> str:
        return f"created ConfigMap {self.body['metadata']['name']}"


@dataclass(frozen=True)
class PatchConfigMap:
    """Update the label and the key of the ConfigMap that belong to redrive."""

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
"""An action that is one call about one topic."""
Action = OnTopic | CopySchema | ChangeRights | CreateConfigMap | PatchConfigMap


Refusable = CopySchema | SetTopicPolicy


@dataclass(frozen=True)
class Refused:
    """Action that the broker refused and without which the policy still works."""

    action: Refusable
    error: AdminError


def is_refusable(action: Action) -> TypeGuard[Refusable]:
    """Return True if a policy works, less well, even if the broker refuses *action*."""
    if isinstance(action, SetTopicPolicy):
        return action.policy.own == DELAYED_DELIVERY
    return isinstance(action, CopySchema)


def in_words(actions: Iterable[Action]) -> str:
    """Describe performed *actions* in one line."""
    return "; ".join(map(str, actions))


def _in_words(change: RightsChange) -> Iterator[str]:
    if change.give:
        yield f"granted {'+'.join(sorted(change.give))} on {change.topic.local} to {change.role}"
    if change.take:
        yield f"revoked {'+'.join(sorted(change.take))} on {change.topic.local} from {change.role}"
