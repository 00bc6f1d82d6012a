"""What is read from a broker and written to it, as values."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from redrive.errors import InvalidSpecError
from redrive.policy.naming import SYSTEM_TOPIC, TopicName


@dataclass(frozen=True)
class Grant:
    """All rights of a role on a topic from then on: a broker replaces those before.

    Attributes:
        actions: of `produce` and `consume`, the two that redrive grants, and whatever else the
            role had; an empty set revokes the role's rights there.
    """

    topic: TopicName
    role: str
    actions: frozenset[str]


@dataclass(frozen=True)
class RightsChange:
    """What is added to the rights of a role on a topic, and what is taken; all else stays.

    Raises:
        InvalidSpecError: it gives rights on a topic of Pulsar's own. Whoever may write there can
            stop a namespace. Taking rights back is always possible.
    """

    topic: TopicName
    role: str
    give: frozenset[str] = frozenset()
    take: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse rights that no role may have."""
        if self.give and self.topic.is_system:
            raise InvalidSpecError(
                SYSTEM_TOPIC, got=str(self.topic), remedy="name a topic of an application"
            )

    def on(self, actions: frozenset[str]) -> frozenset[str]:
        """Return what the role may do then, if it may do *actions* now."""
        return (actions | self.give) - self.take


@dataclass(frozen=True)
class Schema:
    """The schema of a topic's messages, as the broker reads and writes it."""

    type: str
    data: str
    properties: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies this schema."""
        written = json.dumps([self.type, self.data, sorted(self.properties.items())])
        return hashlib.sha256(written.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TopicMetadata:
    """What a broker keeps of a topic as a whole.

    Attributes:
        partitions: 0 where it is not partitioned.
        properties: as any administrator of the tenant has set them.
    """

    partitions: int
    properties: Mapping[str, str]


class TopicPermissions(Mapping[str, Mapping[str, frozenset[str]]]):
    """Topic → role → actions, each read when it is asked for.

    A namespace is read again and again while policies are provisioned there, and each time few of
    its topics matter.

    Args:
        written: the same as the broker's JSON.

    Raises:
        TypeError: it has another form.
    """

    def __init__(self, written: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
        if not all(isinstance(roles, dict) for roles in written.values()):
            msg = "rights are objects by topic and role"
            raise TypeError(msg)
        self._written = written

    def __getitem__(self, topic: str) -> Mapping[str, frozenset[str]]:
        """Return who may do what on a topic."""
        return {role: frozenset(actions) for role, actions in self._written[topic].items()}

    def __iter__(self) -> Iterator[str]:
        """Go through the topics on which rights were granted."""
        return iter(self._written)

    def __len__(self) -> int:
        """Return how many these are."""
        return len(self._written)


@dataclass(frozen=True)
class NamespaceState:
    """The topics of a Pulsar namespace, and the rights on them.

    Attributes:
        unpartitioned: the topics without partitions, and the single partitions of the others.
        partitioned: the partitioned topics.
        permissions: topic → role → actions, as granted on topics (not on the namespace).
        subscription_expiry_minutes: after how long the broker deletes an idle subscription, with
            all that it keeps; 0 is never.
        backlog_quotas: by type, as the broker writes them.
        delayed_delivery: as the broker writes it; None where the namespace sets nothing.
        replicated_to: the clusters that its topics are replicated to, this one among them, unless
            a topic has its own.
        enforces_schemas: whether a producer without a schema is refused by a topic that has one.
    """

    unpartitioned: frozenset[str]
    partitioned: frozenset[str]
    permissions: Mapping[str, Mapping[str, frozenset[str]]]
    subscription_expiry_minutes: int
    backlog_quotas: Mapping[str, Mapping[str, Any]]
    delayed_delivery: Mapping[str, Any] | None
    replicated_to: frozenset[str] = frozenset()
    enforces_schemas: bool = False

    def exists(self, topic: TopicName) -> bool:
        """Whether there is such a topic, partitioned or not."""
        return str(topic) in self.unpartitioned or str(topic) in self.partitioned

    def partitions(self, topic: TopicName) -> int:
        """Return how many partitions of *topic* are there; 0 if it is not partitioned.

        For a moment, while they are being made, that is fewer than the topic has.
        """
        if str(topic) not in self.partitioned:
            return 0
        numbers = itertools.count()
        return next(n for n in numbers if f"{topic}-partition-{n}" not in self.unpartitioned)


@dataclass(frozen=True)
class TopicSubscriptions:
    """The names of a topic's subscriptions: a partition keeps messages only for those on itself.

    Attributes:
        parts: what is on each partition, in order, or on the one topic without any; None where a
            partition is not there, though the topic has it.
    """

    parts: tuple[frozenset[str] | None, ...]

    def has(self, name: str) -> bool:
        """Whether a subscription is on every partition, so that no message is lost to it."""
        return all(names is not None and name in names for names in self.parts)

    def has_some_of(self, name: str) -> bool:
        """Whether a subscription is on some partition, if not on all."""
        return any(names is not None and name in names for names in self.parts)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all that are on some partition."""
        return frozenset(name for names in self.parts if names is not None for name in names)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the numbers of the partitions that are not there."""
        return tuple(number for number, names in enumerate(self.parts) if names is None)


@dataclass(frozen=True)
class TopicUsage:
    """Who uses a topic, and what it holds for one subscription.

    Attributes:
        producers: how many are connected; of a partitioned topic, where most are.
        uncounted: bytes stored where that subscription is not (in the topic, or in partitions of
            it): it is unknown how many messages it would have kept there. Acknowledged messages
            that are not trimmed yet are among them.
    """

    subscriptions: Mapping[str, SubscriptionStats]
    producers: int
    uncounted: int


@dataclass(frozen=True)
class SubscriptionStats:
    """How a subscription stands; of a partitioned topic, over all its partitions.

    Attributes:
        backlog: messages that are not acknowledged, those that wait for their time among them.
        delivered: messages sent to consumers, also again; a broker counts from 0 whenever it loads
            the topic.
        consumers: how many are connected, where most are.
        durable: whether it outlives its consumers; that of a reader does not.
        ack_holes: ranges of acknowledged messages behind one that is not, where most are: a broker
            persists so many of each partition, and forgets the others when it unloads it.
        oldest: when the oldest message of the backlog was published; None if there is none, or if
            that was not asked for.
        unacknowledged: messages that consumers have.
        bytes: of the backlog, about, in the partition where most are; 0 if not asked for.
    """

    backlog: int
    delivered: int
    consumers: int
    durable: bool
    ack_holes: int
    oldest: datetime | None
    unacknowledged: int = 0
    bytes: int = 0
