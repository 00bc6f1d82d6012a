"""Desired and observed state of a policy's topics.

A policy → all that has to exist for it, at the broker and beside it; pure.

What a policy asks of its topics beyond their being there; pure.

Called by `desired`. `docs/reference/topic-policies.md` says the same as a table.

What a reconcile knows before it decides anything, as values: what is requested and observed.
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
    """A topic that has to exist.

    Attributes:
        subscription: which must be on it before the first message: a topic without one keeps
            nothing.
        policies: the topic policies it must have.
    """

    name: TopicName
    subscription: str
    policies: tuple[TopicPolicy, ...]


@dataclass(frozen=True)
class Desired:
    """All that a policy needs.

    Attributes:
        owner: who its topics have to be marked as kept by.
        retry_partitions: of the retry topic; None means as many as the source topic has.
        dead_letter: None where the policy discards.
        ledger: what replays have moved of it; None where no replay can run.
        dead_letter_partitions: of the dead-letter topic; 0 for one without partitions.
        grants: the rights that these roles need; others that they or others have are kept.
        unused: the dead-letter topic of a policy that discards, which may be there from before.
        tolerated: the rights on it that stay, if they are there.
        config_map: the ConfigMap for consumers.
        creating: topics that were about to be created before, and may be there without a mark.
        had_ledger: whether the ledger was found to be the policy's own before.
        sequences: which keys have dead letters; None where their sequence is not kept.
        had_sequences: whether that was found to be the policy's own before.
        schema_topics: the topics that may have the schema of the source topic.
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
        """Whether the retry topic gets a tick of its own."""
        return any(isinstance(policy, DelaysWithin) for policy in self.retry.policies)

    @property
    def records(self) -> tuple[DesiredTopic, ...]:
        """Return the topics whose messages are records of redrive's own."""
        return tuple(filter(None, (self.ledger, self.sequences)))

    def pairs(self, have: Observed) -> Iterator[tuple[DesiredTopic, TopicState | None]]:
        """Yield each topic of the policy's own, as it should be and as it is."""
        yield self.retry, have.retry
        if self.dead_letter is not None:
            yield self.dead_letter, have.dead_letter
        if self.ledger is not None:
            yield self.ledger, have.ledger
        if self.sequences is not None:
            yield self.sequences, have.sequences


def partitions_of_retry(wanted: Desired, source: int) -> int:
    """Return how many partitions the retry topic should have beside a source topic with *source*.

    0 means that a topic is not partitioned.
    """
    return source if wanted.retry_partitions is None else wanted.retry_partitions


def desired(request: Request, body: Body, cluster: str, release: tuple[int, ...] = ()) -> Desired:
    """Return what has to exist for what *body*, a RetryPolicy, asks for.

    Args:
        request: what it asks for.
        body: the owner of its ConfigMap.
        cluster: the id of the Kubernetes cluster it is in.
        release: of the broker; empty where that is not known.
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
    """Return as what the topics of a policy are marked.

    Args:
        request: what the policy asks for.
        cluster: the id of the Kubernetes cluster it is in.
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
    """Return the ConfigMap for the consumers of a RetryPolicy."""
    key = Key.of(policy)
    name = (policy["spec"].get("naming") or {}).get("configMap")
    return Key(key.namespace, name or f"{key.name}{CONFIG_MAP_SUFFIX}")


def _retry_grants(request: Request) -> Iterator[Grant]:
    topic, replay = request.policy.retry_topic, request.connection.replay
    for role in request.spec.consumer_roles:
        yield Grant(topic, role, _PRODUCE | _CONSUME)
    if request.policy.dead_letters and replay is not None:
        # What a replay has moved it looks for here, whatever became of it itself.
        yield Grant(topic, replay.role, _PRODUCE | _CONSUME)


def _dead_letter_grants(request: Request) -> Iterator[Grant]:
    """Yield what each role needs: consumers only write dead letters, readers and replays read."""
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
    """Unite the grants of one role on one topic: of two, a broker would keep the later alone."""
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


# A topic that is deleted for being idle would come back without its subscription, or not at all.
_STAYS = Holds("inactiveTopicPolicies", (("deleteWhileInactive", False),))
_RETENTION = "retention"
POLICIES_OF_FIELDS = frozenset({_RETENTION, LimitsBacklog.name, DelaysWithin.name})
"""The names of policies that a spec asks for by a field, or of a release of the broker: without it
they are taken back."""
_RECORD_BYTES = 10 * 2**20
_MILLISECOND = timedelta(milliseconds=1)
COARSEST_TICK = timedelta(seconds=1)
"""The coarsest tick that a topic gets; brokers have it by default."""
TICKS_PER_RUNG = 20
"""How often the tick goes into the shortest rung, which is 1 s at least: a retry may come early by
a tick. With 100 000 messages waiting, ticks of 1 s and of 20 ms cost a broker the same."""
BUCKETS_SINCE = (4, 1)
"""The release since when a broker keeps delays in buckets of half its own tick.

With a finer tick of a topic, messages that are due may wait until another one comes (seen with
4.2.4): topics keep the broker's there.
"""
DELAYS = Holds(DELAYED_DELIVERY, (("active", True),))
"""Messages are delayed, as exactly and for as long as the namespace and the broker have it."""


def inherited_policies(namespace: NamespaceState) -> dict[str, Any]:
    """Return the topic policies that *namespace* sets for a new topic, by how each is read.

    A policy that is missing here is the broker's: it is known once the topic exists.
    """
    policies: dict[str, Any] = {KeepsBacklog.read: namespace.backlog_quotas}
    if namespace.delayed_delivery is not None:
        policies[DELAYS.read] = namespace.delayed_delivery
    return policies


def policies_in_force(found: Mapping[str, Any], namespace: NamespaceState) -> dict[str, Any]:
    """Return what a topic of *namespace* has, where *found* was read of it."""
    return {**found, KeepsBacklog.read: quotas_in_force(found[KeepsBacklog.read], namespace)}


def quotas_in_force(own: Quotas | None, namespace: NamespaceState) -> Quotas:
    """Return the backlog quotas of a topic, whose *own* are read of it alone.

    A type it has none of is the namespace's.
    """
    return {**namespace.backlog_quotas, **(own or {})}


def delay_limit(policies: Mapping[str, Any]) -> timedelta | None:
    """Return the longest delay that the broker makes, by a topic's *policies*; None is any."""
    limit = (policies.get(DELAYS.read) or {}).get("maxDeliveryDelayInMillis")
    if not isinstance(limit, int) or not 0 < limit < timedelta.max // _MILLISECOND:
        return None
    return timedelta(milliseconds=limit)


def earliness(policies: Mapping[str, Any]) -> timedelta | None:
    """Return by how much the broker may be early, by a topic's *policies*; None: it delays none.

    Raises:
        KeyError: *policies* hold no value of the broker.
    """
    delays = policies[DELAYS.read]
    return delays["tickTime"] * _MILLISECOND if delays["active"] else None


def delay_policy(shortest: timedelta, release: tuple[int, ...]) -> TopicPolicy:
    """Return how a topic delays messages.

    Args:
        shortest: the shortest delay that consumers ask for by the policy.
        release: of the broker; empty where that is not known.
    """
    if not release or release >= BUCKETS_SINCE:
        return DELAYS
    return DelaysWithin(min(COARSEST_TICK, shortest / TICKS_PER_RUNG) // _MILLISECOND)


def retry_topic_policies(spec: RetryTopic, delays: TopicPolicy) -> tuple[TopicPolicy, ...]:
    """Return the policies of a retry topic: what waits there is delivered late, once, and kept."""
    return (
        # From the topic's first day: what the broker does not remember it cannot recognise.
        Deduplicates(),
        Ttl(spec.ttl_seconds),
        delays,
        KeepsBacklog(),
        _STAYS,
    )


def record_topic_policies() -> tuple[TopicPolicy, ...]:
    """Return the policies of a topic of records: the last record of each key is kept."""
    return (Ttl(0), KeepsBacklog(), CompactsAbove(_RECORD_BYTES), _STAYS)


def dead_letter_topic_policies(spec: DeadLetterTopic) -> tuple[TopicPolicy, ...]:
    """Return the policies of a dead-letter topic: what rests there is stored once, and kept."""
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
    """A topic as it is; 0 partitions means that it is not partitioned, None what was not read.

    Attributes:
        policies: what the broker has of each topic policy, by how it is read.
        originals: what is set on the topic itself of those policies that are to be changed, by
            `TopicPolicy.name`, unless it is on record. Of a topic that redrive created only what a
            field of a spec asks for counts.
        properties: see `ownership`.
        replicated_to: the clusters that it is replicated to, its own among them.
    """

    partitions: int
    subscriptions: TopicSubscriptions | None = None
    policies: Mapping[str, Any] | None = None
    properties: Mapping[str, str] | None = None
    replicated_to: frozenset[str] = frozenset()
    originals: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """What is there of what a policy needs; None stands for what is not.

    Attributes:
        source_properties: None where they were not read.
        source_schema: None where messages are plain bytes.
        enforces_schemas: see `NamespaceState`, likewise *subscription_types* and
            *requires_encryption*.
        dead_letter: None too where the policy discards.
        ledger: likewise, and where no replay can run.
        sequences: likewise, and where the sequence of dead letters is not kept.
        permissions: topic → role → actions, for all topics of the Pulsar namespace.
        replicated_to: the clusters that a topic is replicated to that is made now.
        inherited: the topic policies that a topic which is made now gets from the namespace, by
            how each is read; those that it gets from the broker's configuration are missing.
        config_map: whatever has the name of the policy's ConfigMap.
        unused: the dead-letter topic from before of a policy that discards.
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
