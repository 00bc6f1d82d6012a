"""What is wanted, what is there → the steps between them, as frozen values; pure.

A step as a string says, for people, what has been done once it is.

The order is the broker's: a grant on a missing topic is refused, and it costs least when topics
are made first, then all rights are granted at once, then subscriptions are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from redrive.admin.model import Grant
from redrive.admin.policies import TopicPolicy, Write
from redrive.cluster.resources import Body
from redrive.policy.naming import TopicName
from redrive.provision.desired import Desired, DesiredTopic, partitions_of_retry
from redrive.provision.facts import Observed


@dataclass(frozen=True)
class CreateTopic:
    """Create a topic; 0 partitions means that it is not partitioned."""

    topic: TopicName
    partitions: int

    def __str__(self) -> str:
        return f"created {self.topic} with {self.partitions or 'no'} partitions"


@dataclass(frozen=True)
class AddPartitions:
    """Have a partitioned topic grow."""

    topic: TopicName
    partitions: int

    def __str__(self) -> str:
        return f"added partitions to {self.topic}, {self.partitions} now"


@dataclass(frozen=True)
class SetTopicPolicy:
    """Make one write that a topic policy needs."""

    topic: TopicName
    policy: TopicPolicy
    write: Write

    def __str__(self) -> str:
        return f"set {self.policy} on {self.topic.local}"


@dataclass(frozen=True)
class SetGrants:
    """Set what roles may do: what they may do already, and what they need."""

    grants: tuple[Grant, ...]

    def __str__(self) -> str:
        return ", ".join(
            f"granted {'+'.join(sorted(grant.actions))} on {grant.topic.local} to {grant.role}"
            for grant in self.grants
        )


@dataclass(frozen=True)
class CreateSubscription:
    """Create a subscription that begins with the first message."""

    topic: TopicName
    subscription: str

    def __str__(self) -> str:
        return f"created subscription {self.subscription} on {self.topic.local}"


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


Step = (
    CreateTopic
    | AddPartitions
    | SetTopicPolicy
    | SetGrants
    | CreateSubscription
    | CreateConfigMap
    | PatchConfigMap
)


def in_words(steps: Iterable[Step]) -> str:
    """Describe *steps*, done, in one line."""
    return "; ".join(map(str, steps))


def plan(desired: Desired, observed: Observed) -> tuple[Step, ...]:
    """Return what has to be done, in order; nothing where all is as it should be."""
    pairs = [(desired.retry, observed.retry)]
    if desired.dead_letter is not None:
        pairs.append((desired.dead_letter, observed.dead_letter))
    return (
        *_topics(desired, observed),
        *(
            step
            for want, have in pairs
            for step in _topic_policies(want, observed.inherited if have is None else have.policies)
        ),
        *_grants(desired, observed),
        *(
            CreateSubscription(want.name, want.subscription)
            for want, have in pairs
            if have is None or want.subscription not in have.subscriptions
        ),
        *_config_map(desired.config_map, observed.config_map),
    )


def _topics(desired: Desired, observed: Observed) -> Iterator[CreateTopic | AddPartitions]:
    partitions = partitions_of_retry(desired, observed.source_partitions)
    if observed.retry is None:
        yield CreateTopic(desired.retry.name, partitions)
    if desired.dead_letter is not None and observed.dead_letter is None:
        yield CreateTopic(desired.dead_letter.name, 0)
    if observed.retry is not None and 0 < observed.retry.partitions < partitions:
        yield AddPartitions(desired.retry.name, partitions)


def _topic_policies(want: DesiredTopic, found: Mapping[str, Any]) -> Iterator[SetTopicPolicy]:
    for policy in want.policies:
        for write in policy.writes(found.get(policy.read)):
            yield SetTopicPolicy(want.name, policy, write)


def _grants(desired: Desired, observed: Observed) -> Iterator[SetGrants]:
    missing = []
    for grant in desired.grants:
        have = observed.permissions.get(str(grant.topic), {}).get(grant.role, frozenset())
        if not grant.actions <= have:
            # A grant replaces what the role had: whatever that was, it keeps it.
            missing.append(Grant(grant.topic, grant.role, grant.actions | have))
    if missing:
        yield SetGrants(tuple(missing))


def _config_map(want: Body, have: Body | None) -> Iterator[CreateConfigMap | PatchConfigMap]:
    if have is None:
        yield CreateConfigMap(want)
    elif not want["data"].items() <= (have.get("data") or {}).items():  # other keys are not ours
        yield PatchConfigMap(want)
