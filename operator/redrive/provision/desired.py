"""Desired and observed state of a policy's topics; pure.

`desired` computes from a policy everything that must exist at the broker, and the ConfigMap.
`docs/reference/topic-policies.md` lists the topic policies as a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from redrive.admin.model import Grant, NamespaceState, Schema, TopicSubscriptions
from redrive.admin.policies import (
    DELAYED_DELIVERY,
    CompactsAbove,
    Deduplicates,
    DelaysWithin,
    Holds,
    KeepsBacklog,
    LimitsBacklog,
    Quotas,
    TopicPolicy,
    Ttl,
)
from redrive.api import Body
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


@dataclass(frozen=True)
class DesiredTopic:
    """A topic that must exist.

    Attributes:
        subscription: must exist before the first message, because a topic without a subscription
            retains nothing.
        policies: topic policies that the topic must have.
    """

    name: TopicName
    subscription: str
    policies: tuple[TopicPolicy, ...]


@dataclass(frozen=True)
class Desired:
    """Everything that a policy needs.

    Attributes:
        owner: the recorded owner of its topics.
        retry_partitions: of the retry topic; None means as many as the source topic has.
        dead_letter: None if the policy discards.
        ledger: record of the messages that Replays moved; None if no Replay can run.
        dead_letter_partitions: of the dead-letter topic; 0 means not partitioned.
        grants: the actions that roles need; further grants are kept.
        unused: dead-letter topic of a policy that discards, which may exist from before.
        tolerated: grants on *unused* that are kept if they exist.
        config_map: the ConfigMap of the consumers.
        creating: topics whose creation was recorded, which may exist without an owner.
        had_ledger: True if the status names the ledger.
        sequences: keys that have dead letters; None if sequences are not kept.
        had_sequences: True if the status names that topic.
        schema_topics: topics that may have the schema of the source topic.
    """

    policy: Policy
    owner: Owner
    retry: DesiredTopic
    retry_partitions: int | None
    dead_letter: DesiredTopic | None
    grants: tuple[Grant, ...]
    config_map: Body
    creating: frozenset[str] = frozenset()
    dead_letter_partitions: int = 0
    unused: TopicName | None = None
    tolerated: tuple[Grant, ...] = ()
    ledger: DesiredTopic | None = None
    had_ledger: bool = False
    sequences: DesiredTopic | None = None
    had_sequences: bool = False
    schema_topics: frozenset[TopicName] = frozenset()

    @property
    def sets_tick(self) -> bool:
        """Return True if the retry topic gets a tick of its own."""
        return any(isinstance(policy, DelaysWithin) for policy in self.retry.policies)

    @property
    def records(self) -> tuple[DesiredTopic, ...]:
        """Return the topics whose messages are records of redrive."""
        return tuple(filter(None, (self.ledger, self.sequences)))

    def pairs(self, have: Observed) -> Iterator[tuple[DesiredTopic, TopicState | None]]:
        """Yield the desired and the observed state of each topic of the policy."""
        yield self.retry, have.retry
        if self.dead_letter is not None:
            yield self.dead_letter, have.dead_letter
        if self.ledger is not None:
            yield self.ledger, have.ledger
        if self.sequences is not None:
            yield self.sequences, have.sequences


def partitions_of_retry(wanted: Desired, source: int) -> int:
    """Return the number of partitions of the retry topic; *source* is that of the source topic.

    0 means that a topic is not partitioned.
    """
    return source if wanted.retry_partitions is None else wanted.retry_partitions


def desired(request: Request, body: Body, cluster: str, release: tuple[int, ...] = ()) -> Desired:
    """Return the desired state of *body*, a RetryPolicy.

    Args:
        request: the resolved policy.
        body: owner of the ConfigMap.
        cluster: id of the Kubernetes cluster.
        release: version of the broker; empty if unknown.
    """
    policy, keeps = request.policy, request.policy.dead_letters
    status = body.get("status") or {}
    on_dead_letter = _united(_dead_letter_grants(request))
    return Desired(
        policy=policy,
        owner=owner_of(request, cluster),
        retry=_retry(request, release),
        retry_partitions=request.spec.retry.partitions,
        dead_letter=_dead_letter(request),
        ledger=_ledger(request),
        had_ledger=status.get("ledgerTopic") == str(policy.ledger_topic),
        sequences=_sequences(policy),
        had_sequences=status.get("sequencesTopic") == str(policy.sequences_topic),
        grants=(
            *_united(_retry_grants(request)),
            *(on_dead_letter if keeps else ()),
            *_ledger_grants(request),
            *_sequences_grants(request),
        ),
        config_map=_config_map(policy, body),
        creating=creating(body),
        dead_letter_partitions=request.spec.dead_letter.partitions or 0,
        unused=None if keeps else request.spec.dead_letter_topic,
        tolerated=() if keeps else on_dead_letter,
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


def _retry(request: Request, release: tuple[int, ...]) -> DesiredTopic:
    policy, spec = request.policy, request.spec
    delays = delay_policy(request.shortest_delay, release)
    policies = retry_topic_policies(spec.retry, delays)
    return DesiredTopic(policy.retry_topic, policy.subscription, policies)


def _dead_letter(request: Request) -> DesiredTopic | None:
    if not request.policy.dead_letters:
        return None
    policies = dead_letter_topic_policies(request.spec.dead_letter)
    policy = request.policy
    return DesiredTopic(policy.dead_letter_topic, policy.dead_letter_subscription, policies)


def _ledger(request: Request) -> DesiredTopic | None:
    if not request.policy.dead_letters or request.connection.replay is None:
        return None
    return _of_records(request.policy.ledger_topic)


def _sequences(policy: Policy) -> DesiredTopic | None:
    return _of_records(policy.sequences_topic) if policy.sequenced else None


def _of_records(name: TopicName) -> DesiredTopic:
    return DesiredTopic(name, naming.LEDGER_SUBSCRIPTION, record_topic_policies())


def config_map_of(policy: Body) -> Key:
    """Return the name of the ConfigMap of a RetryPolicy's consumers."""
    key = Key.of(policy)
    name = (policy["spec"].get("naming") or {}).get("configMap")
    return Key(key.namespace, name or f"{key.name}{CONFIG_MAP_SUFFIX}")


def _retry_grants(request: Request) -> Iterator[Grant]:
    topic, replay = request.policy.retry_topic, request.connection.replay
    for role in request.spec.consumer_roles:
        yield Grant(topic, role, _PRODUCE | _CONSUME)
    if request.policy.dead_letters and replay is not None:
        # A Replay searches this topic for messages that it moved earlier.
        yield Grant(topic, replay.role, _PRODUCE | _CONSUME)


def _dead_letter_grants(request: Request) -> Iterator[Grant]:
    """Yield the grants on the dead-letter topic: consumers write, readers and Replays read."""
    topic, replay = request.spec.dead_letter_topic, request.connection.replay
    for role in request.spec.consumer_roles:
        yield Grant(topic, role, _PRODUCE)
    for role in request.spec.dead_letter.reader_roles:
        yield Grant(topic, role, _CONSUME)
    if replay is not None:
        yield Grant(topic, replay.role, _CONSUME)


def _ledger_grants(request: Request) -> Iterator[Grant]:
    if request.policy.dead_letters and request.connection.replay is not None:
        topic, role = request.policy.ledger_topic, request.connection.replay.role
        yield Grant(topic, role, _PRODUCE | _CONSUME)


def _sequences_grants(request: Request) -> Iterator[Grant]:
    if request.policy.sequenced:
        for role in request.spec.consumer_roles:
            yield Grant(request.policy.sequences_topic, role, _PRODUCE | _CONSUME)


def _united(grants: Iterator[Grant]) -> tuple[Grant, ...]:
    """Merge the grants of each role and topic: a broker would keep only the last of two."""
    united: dict[tuple[TopicName, str], frozenset[str]] = {}
    for grant in grants:
        before = united.get((grant.topic, grant.role), frozenset())
        united[grant.topic, grant.role] = before | grant.actions
    return tuple(Grant(topic, role, actions) for (topic, role), actions in united.items())


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
    """Return the topic policies in force on a topic of *namespace*, whose *own* were read."""
    return {**own, KeepsBacklog.read: quotas_in_force(own[KeepsBacklog.read], namespace)}


def quotas_in_force(own: Quotas | None, namespace: NamespaceState) -> Quotas:
    """Return the backlog quotas in force on a topic with *own* quotas.

    A type without a quota of the topic has that of the namespace.
    """
    return {**namespace.backlog_quotas, **(own or {})}


def delay_limit(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the longest delay that the broker accepts, from a topic's *policies*; None: any."""
    limit = (policies.get(DELAYS.read) or {}).get("maxDeliveryDelayInMillis")
    if not isinstance(limit, int) or not 0 < limit < timedelta.max // _MILLISECOND:
        return None
    return timedelta(milliseconds=limit)


def earliness(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the time by which the broker may deliver early; None if it does not delay at all.

    Args:
        policies: topic policies in force.

    Raises:
        KeyError: *policies* lack the value of the broker.
    """
    delays = policies[DELAYS.read]
    return delays["tickTime"] * _MILLISECOND if delays["active"] else None


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
        enforces_schemas: see `NamespaceState`, likewise *subscription_types* and
            *requires_encryption*.
        dead_letter: also None if the policy discards.
        ledger: also None if the policy discards or no Replay can run.
        sequences: also None if sequences are not kept.
        permissions: topic → role → actions, for all topics of the Pulsar namespace.
        replicated_to: clusters that a new topic of the namespace is replicated to.
        inherited: topic policies that a new topic gets from the namespace, by their read name.
            Policies of the broker's configuration are missing.
        config_map: any ConfigMap with the name of the policy's.
        unused: earlier dead-letter topic of a policy that discards.
    """

    source_partitions: int = 0
    source_schema: Schema | None = None
    retry: TopicState | None = None
    dead_letter: TopicState | None = None
    permissions: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict)
    inherited: Mapping[str, Any] = field(default_factory=dict)
    config_map: Body | None = None
    replicated_to: frozenset[str] = frozenset()
    enforces_schemas: bool = False
    subscription_types: frozenset[str] = frozenset()
    requires_encryption: bool = False
    source_properties: Mapping[str, str] | None = None
    unused: TopicState | None = None
    ledger: TopicState | None = None
    sequences: TopicState | None = None
