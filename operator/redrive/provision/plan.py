"""What is wanted, what is there → the steps between them, as frozen values; pure.

The order is the broker's: a grant on a missing topic is refused, and it costs least when topics
are made first, then all rights are granted at once, then subscriptions are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from redrive.admin.model import Grant
from redrive.cluster.resources import Body
from redrive.policy.naming import TopicName
from redrive.provision.desired import Desired, DesiredTopic
from redrive.provision.facts import Observed, TopicState


@dataclass(frozen=True)
class CreateTopic:
    """Create a topic; 0 partitions means that it is not partitioned."""

    topic: TopicName
    partitions: int


@dataclass(frozen=True)
class SwitchOnDeduplication:
    """Have the broker drop what a producer sends twice."""

    topic: TopicName


@dataclass(frozen=True)
class SetGrants:
    """Set what roles may do: what they may do already, and what they need."""

    grants: tuple[Grant, ...]


@dataclass(frozen=True)
class CreateSubscription:
    """Create a subscription that begins with the first message."""

    topic: TopicName
    subscription: str


@dataclass(frozen=True)
class CreateConfigMap:
    """Create the ConfigMap for consumers."""

    body: Body


@dataclass(frozen=True)
class PatchConfigMap:
    """Bring our key of our ConfigMap to what it should hold."""

    body: Body


Step = (
    CreateTopic
    | SwitchOnDeduplication
    | SetGrants
    | CreateSubscription
    | CreateConfigMap
    | PatchConfigMap
)


def plan(desired: Desired, observed: Observed) -> tuple[Step, ...]:
    """Return what has to be done, in order; nothing where all is as it should be."""
    pairs = [(desired.retry, observed.retry)]
    if desired.dead_letter is not None:
        pairs.append((desired.dead_letter, observed.dead_letter))
    return (
        *_topics(desired, observed),
        *(SwitchOnDeduplication(want.name) for want, have in pairs if _lacks_memory(want, have)),
        *_grants(desired, observed),
        *(
            CreateSubscription(want.name, want.subscription)
            for want, have in pairs
            if have is None or want.subscription not in have.subscriptions
        ),
        *_config_map(desired.config_map, observed.config_map),
    )


def _topics(desired: Desired, observed: Observed) -> Iterator[CreateTopic]:
    if observed.retry is None:
        yield CreateTopic(desired.retry.name, observed.source_partitions)
    if desired.dead_letter is not None and observed.dead_letter is None:
        yield CreateTopic(desired.dead_letter.name, 0)


def _lacks_memory(want: DesiredTopic, have: TopicState | None) -> bool:
    return want.deduplicates and (have is None or not have.deduplicates)


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
