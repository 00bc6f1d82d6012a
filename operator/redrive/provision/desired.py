"""Desired and observed state of a policy's topics; pure.

`desired` computes from a policy everything that must exist at the broker, and the ConfigMap.
`docs/reference/topic-policies.md` lists the topic policies as a table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self

from redrive.admin.internal_stats import BrokerSettings
from redrive.admin.model import Grant, NamespaceState, Schema, TopicSubscriptions
from redrive.admin.policies import (
    DELAYED_DELIVERY,
    CompactsAbove,
    Deduplicates,
    DelaysWithin,
    Holds,
    KeepsBacklog,
    LimitsBacklog,
    TopicPolicy,
    Ttl,
)
from redrive.api import Body
from redrive.api.permissions import Consent
from redrive.api.topology import DeadLetterTopic, RetryTopic
from redrive.kube import resources
from redrive.kube.resources import CONFIG_MAP_KEY, Key
from redrive.policy import codec, naming
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.provision.ownership import Owner, creating
from redrive.provision.request import Request

CONFIG_MAP_SUFFIX = "-redrive"

_CONSUME: frozenset[str] = frozenset({"consume"})
_PRODUCE: frozenset[str] = frozenset({"produce"})


class TopicRole(enum.StrEnum):
    """Role of a topic for its policy.

    Attributes:
        status_field: field of the policy's status with the name of the topic.
        holds_records: True if its messages are records of redrive: compacted, ordered, never
            adopted.
    """

    RETRY = "retry", "retryTopic"
    DEAD_LETTER = "dead-letter", "deadLetterTopic"
    LEDGER = "ledger", "ledgerTopic"
    """Records which messages Replays moved."""
    SEQUENCES = "sequences", "sequencesTopic"
    """Records which keys have dead letters."""

    status_field: str
    holds_records: bool

    def __new__(cls, name: str, status_field: str) -> Self:  # noqa: D102
        role = str.__new__(cls, name)
        role._value_ = name
        role.status_field = status_field
        role.holds_records = name in {"ledger", "sequences"}
        return role


class Grantee(enum.Enum):
    """Pulsar roles that get grants on topics of a policy."""

    CONSUMERS = enum.auto()
    READERS = enum.auto()
    """People and tools that read dead letters."""
    REPLAYS = enum.auto()
    INSPECTIONS = enum.auto()


GRANTS: Mapping[TopicRole, Mapping[Grantee, frozenset[str]]] = {
    TopicRole.RETRY: {
        Grantee.CONSUMERS: _PRODUCE | _CONSUME,
        # A Replay also searches this topic for messages that it moved earlier.
        Grantee.REPLAYS: _PRODUCE | _CONSUME,
        Grantee.INSPECTIONS: _CONSUME,
    },
    TopicRole.DEAD_LETTER: {
        Grantee.CONSUMERS: _PRODUCE,
        Grantee.READERS: _CONSUME,
        Grantee.REPLAYS: _CONSUME,
        Grantee.INSPECTIONS: _CONSUME,
    },
    TopicRole.LEDGER: {Grantee.REPLAYS: _PRODUCE | _CONSUME},
    TopicRole.SEQUENCES: {Grantee.CONSUMERS: _PRODUCE | _CONSUME},
}
"""Actions that a policy grants on each of its topics."""


@dataclass(frozen=True)
class DesiredTopic:
    """A topic that must exist.

    Attributes:
        subscription: must exist before the first message, because a topic without a subscription
            retains nothing.
        partitions: 0 means not partitioned, None as many as the source topic has.
        policies: topic policies that the topic must have.
        is_recorded: True if the status of the policy names the topic.
    """

    role: TopicRole
    name: TopicName
    subscription: str
    partitions: int | None
    policies: tuple[TopicPolicy, ...]
    is_recorded: bool = False

    def count_partitions(self, source: int) -> int:
        """Return the number of its partitions; *source* is that of the source topic."""
        return source if self.partitions is None else self.partitions


@dataclass(frozen=True)
class Desired:
    """Everything that a policy needs.

    Attributes:
        owner: the recorded owner of its topics.
        topics: in the order of `TopicRole`, the retry topic first. A policy that discards has no
            dead-letter topic, one without Replays no ledger.
        grants: the actions that roles need; further grants are kept.
        unused: dead-letter topic of a policy that discards, which may exist from before.
        tolerated: grants on *unused* that are kept if they exist.
        config_map: the ConfigMap of the consumers.
        creating: topics whose creation was recorded, which may exist without an owner.
        schema_topics: topics that may have the schema of the source topic.
    """

    policy: Policy
    owner: Owner
    topics: tuple[DesiredTopic, ...]
    grants: tuple[Grant, ...]
    config_map: Body
    creating: frozenset[str] = frozenset()
    unused: TopicName | None = None
    tolerated: tuple[Grant, ...] = ()
    schema_topics: frozenset[TopicName] = frozenset()

    def topic(self, role: TopicRole) -> DesiredTopic | None:
        """Return the topic of a role; None if the policy needs none."""
        return next((topic for topic in self.topics if topic.role is role), None)

    @property
    def retry(self) -> DesiredTopic:
        """Return the retry topic, which every policy needs."""
        return self.topics[0]

    def pairs(self, have: Observed) -> Iterator[tuple[DesiredTopic, TopicState | None]]:
        """Yield the desired and the observed state of each topic of the policy."""
        return ((topic, have.topics.get(topic.role)) for topic in self.topics)


def desired(request: Request, body: Body, cluster: str, release: tuple[int, ...] = ()) -> Desired:
    """Return the desired state of *body*, a RetryPolicy.

    Args:
        request: the resolved policy.
        body: owner of the ConfigMap.
        cluster: id of the Kubernetes cluster.
        release: version of the broker; empty if unknown.
    """
    policy, keeps = request.policy, request.policy.dead_letters
    topics = tuple(_topics(request, body.get("status") or {}, release))
    unused = None if keeps else request.spec.dead_letter_topic
    return Desired(
        policy=policy,
        owner=owner_of(request, cluster),
        topics=topics,
        grants=tuple(grant for t in topics for grant in _grants(t.role, t.name, request)),
        config_map=_config_map(policy, body),
        creating=creating(body),
        unused=unused,
        tolerated=() if unused is None else _grants(TopicRole.DEAD_LETTER, unused, request),
        schema_topics=frozenset(
            topic
            for topic in request.spec.permitted_topics
            if request.permissions.allows_schema_copy(policy.topic, topic)
        ),
    )


def owner_of(request: Request, cluster: str) -> Owner:
    """Return the owner that is recorded on the topics of a policy.

    Args:
        request: the resolved policy.
        cluster: id of the Kubernetes cluster.
    """
    _, uid = request.age
    policy = request.policy
    return Owner(cluster, request.key, uid, f"{policy.topic}/{policy.subscription}")


def _topics(
    request: Request, status: Mapping[str, Any], release: tuple[int, ...]
) -> Iterator[DesiredTopic]:
    policy, spec = request.policy, request.spec

    def topic(
        role: TopicRole,
        name: TopicName,
        subscription: str,
        partitions: int | None,
        policies: tuple[TopicPolicy, ...],
    ) -> DesiredTopic:
        is_recorded = status.get(role.status_field) == str(name)
        return DesiredTopic(role, name, subscription, partitions, policies, is_recorded)

    delays = delay_policy(request.shortest_delay, release)
    policies = retry_topic_policies(spec.retry, delays)
    yield topic(
        TopicRole.RETRY, policy.retry_topic, policy.subscription, spec.retry.partitions, policies
    )
    if policy.dead_letters:
        name, subscription = policy.dead_letter_topic, policy.dead_letter_subscription
        policies = dead_letter_topic_policies(spec.dead_letter)
        partitions = spec.dead_letter.partitions or 0
        yield topic(TopicRole.DEAD_LETTER, name, subscription, partitions, policies)
    records = (naming.LEDGER_SUBSCRIPTION, 0, record_topic_policies())
    if policy.dead_letters and request.connection.replay is not None:
        yield topic(TopicRole.LEDGER, policy.ledger_topic, *records)
    if policy.sequenced:
        yield topic(TopicRole.SEQUENCES, policy.sequences_topic, *records)


def config_map_of(policy: Body) -> Key:
    """Return the name of the ConfigMap of a RetryPolicy's consumers."""
    key = Key.of(policy)
    name = (policy["spec"].get("naming") or {}).get("configMap")
    return Key(key.namespace, name or f"{key.name}{CONFIG_MAP_SUFFIX}")


def _grants(role: TopicRole, topic: TopicName, request: Request) -> tuple[Grant, ...]:
    """Return the grants on a topic, one for each role: a broker would keep only the last of two."""
    replay, inspection = request.connection.replay, request.connection.inspection
    is_inspected = inspection is not None and (
        role is TopicRole.DEAD_LETTER or inspection.retry_topics is Consent.ALLOWED
    )
    keeps = request.policy.dead_letters or role is TopicRole.DEAD_LETTER
    grantees = {
        Grantee.CONSUMERS: request.spec.consumer_roles,
        Grantee.READERS: request.spec.dead_letter.reader_roles,
        Grantee.REPLAYS: (replay.role,) if replay is not None and keeps else (),
        Grantee.INSPECTIONS: (inspection.role,) if inspection and is_inspected else (),
    }
    merged: dict[str, frozenset[str]] = {}
    for grantee, actions in GRANTS[role].items():
        for name in grantees[grantee]:
            merged[name] = merged.get(name, frozenset()) | actions
    return tuple(Grant(topic, name, actions) for name, actions in merged.items())


def _config_map(policy: Policy, owner: Body) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            **config_map_of(owner)._asdict(),
            "labels": {**dict([resources.MANAGED]), resources.POLICY_LABEL: Key.of(owner).name},
            "ownerReferences": [resources.owner_reference(resources.POLICIES, owner)],
        },
        "data": {CONFIG_MAP_KEY: codec.encode(policy)},
    }


# A deleted idle topic would come back without its subscription, or not at all.
_STAYS = Holds("inactiveTopicPolicies", (("deleteWhileInactive", False),))
_RETENTION = "retention"
POLICIES_OF_FIELDS = frozenset({_RETENTION, LimitsBacklog.name, DelaysWithin.name})
"""Topic policies that a field of the spec or the release of the broker requires. They are withdrawn
when it no longer does."""
_RECORD_BYTES = 10 * 2**20
_MILLISECOND = timedelta(milliseconds=1)
COARSEST_TICK = timedelta(seconds=1)
"""The coarsest tick that a topic gets; the default of brokers."""
TICKS_PER_RUNG = 20
"""Ticks per shortest delay, which is 1 s at least: a retry may arrive one tick early. With 100 000
waiting messages, ticks of 1 s and of 20 ms cost a broker the same."""
BUCKETS_SINCE = (4, 1)
"""The release since which a broker keeps delays in buckets of half its own tick.

With a finer tick of the topic, due messages may wait for another message (observed with 4.2.4). On
these releases topics keep the tick of the broker.
"""
DELAYS = Holds(DELAYED_DELIVERY, (("active", True),))
"""Delayed delivery is active, with the precision and limit of the namespace and the broker."""


def inherited_policies(namespace: NamespaceState) -> dict[str, Any]:
    """Return the topic policies that *namespace* sets for a new topic, by their read name.

    A missing policy comes from the configuration of the broker. Its value is known once the topic
    exists.
    """
    policies: dict[str, Any] = {KeepsBacklog.read: namespace.backlog_quotas}
    if namespace.delayed_delivery is not None:
        policies[DELAYS.read] = namespace.delayed_delivery
    return policies


def policies_in_force(own: Mapping[str, Any], namespace: NamespaceState) -> dict[str, Any]:
    """Return the topic policies in force on a topic of *namespace*, whose *own* were read.

    A type of backlog quota that the topic does not set has the quota of the namespace.
    """
    quotas = {**namespace.backlog_quotas, **(own[KeepsBacklog.read] or {})}
    return {**own, KeepsBacklog.read: quotas}


def delay_limit(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the longest delay that the broker accepts, from a topic's *policies*; None: any."""
    limit = (policies.get(DELAYS.read) or {}).get("maxDeliveryDelayInMillis")
    if not isinstance(limit, int) or not 0 < limit < timedelta.max // _MILLISECOND:
        return None
    return timedelta(milliseconds=limit)


def earliness(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the time by which the broker may deliver early; None if it does not delay at all.

    Args:
        policies: topic policies in force, with the value of the broker.
    """
    delays = policies[DELAYS.read] or {}
    return delays.get("tickTime", 0) * _MILLISECOND if delays.get("active") else None


def delay_policy(shortest: timedelta, release: tuple[int, ...]) -> TopicPolicy:
    """Return the delayed-delivery policy of the retry topic.

    Args:
        shortest: the shortest delay of the policy.
        release: version of the broker; empty if unknown.
    """
    if not release or release >= BUCKETS_SINCE:
        return DELAYS
    return DelaysWithin(min(COARSEST_TICK, shortest / TICKS_PER_RUNG) // _MILLISECOND)


def retry_topic_policies(spec: RetryTopic, delays: TopicPolicy) -> tuple[TopicPolicy, ...]:
    """Return the policies of a retry topic: delayed, deduplicated and retained."""
    return (
        # From the start: the broker recognises only messages that it has remembered.
        Deduplicates(),
        Ttl(spec.ttl_seconds),
        delays,
        KeepsBacklog(),
        _STAYS,
    )


def record_topic_policies() -> tuple[TopicPolicy, ...]:
    """Return the policies of a topic of records: the latest record of each key is kept."""
    return (Ttl(0), KeepsBacklog(), CompactsAbove(_RECORD_BYTES), _STAYS)


def dead_letter_topic_policies(spec: DeadLetterTopic) -> tuple[TopicPolicy, ...]:
    """Return the policies of a dead-letter topic: deduplicated and retained."""
    policies: list[TopicPolicy] = [
        Deduplicates(),
        Ttl(spec.ttl_seconds),
        KeepsBacklog(),
        _STAYS,
    ]
    if spec.backlog_quota is not None:
        policies.append(LimitsBacklog(spec.backlog_quota.bytes))
    if spec.retention is not None:
        policies.append(Holds(_RETENTION, tuple(spec.retention.to_broker().items())))
    return tuple(policies)


@dataclass(frozen=True)
class TopicState:
    """Observed state of a topic; None stands for a value that was not read.

    Attributes:
        partitions: 0 if the topic is not partitioned.
        policies: topic policies in force, by their read name.
        originals: values set on the topic itself of the policies that must change, by
            `TopicPolicy.name`, unless recorded. On a topic that redrive created, only policies that
            a field of the spec requires.
        properties: see `ownership`.
        replicated_to: clusters that have the topic, its own included.
    """

    partitions: int
    subscriptions: TopicSubscriptions | None = None
    policies: Mapping[str, Any] | None = None
    properties: Mapping[str, str] | None = None
    replicated_to: frozenset[str] = frozenset()
    originals: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """Observed state of everything that a policy needs; None stands for a missing object.

    Attributes:
        source_properties: None if they were not read.
        source_schema: None if messages are plain bytes.
        topics: existing topics of the policy by their role.
        namespace: the Pulsar namespace of its topics.
        inherited: topic policies that a new topic gets from the namespace, by their read name.
            Policies of the broker's configuration are missing.
        settings: of the broker, for namespaces that set none.
        config_map: any ConfigMap with the name of the policy's.
        unused: earlier dead-letter topic of a policy that discards.
    """

    source_partitions: int = 0
    source_schema: Schema | None = None
    topics: Mapping[TopicRole, TopicState] = field(default_factory=dict)
    namespace: NamespaceState = field(default_factory=NamespaceState)
    inherited: Mapping[str, Any] = field(default_factory=dict)
    settings: BrokerSettings = field(default_factory=BrokerSettings)
    config_map: Body | None = None
    source_properties: Mapping[str, str] | None = None
    unused: TopicState | None = None
