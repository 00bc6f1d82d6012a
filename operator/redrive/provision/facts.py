"""What a reconcile knows before it decides anything, as values: what is requested and observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from redrive.admin.model import Schema, TopicSubscriptions
from redrive.admin.paths import broker_at
from redrive.api.choices import DeletionPolicy
from redrive.api.connection import PulsarConnectionSpec
from redrive.api.permissions import Permissions
from redrive.api.retrypolicy import ManagementPolicy, RetryPolicySpec
from redrive.kube.resources import Body, Key
from redrive.policy.model import Policy
from redrive.provision.standing import Standing


@dataclass(frozen=True)
class Request:
    """What a RetryPolicy asks for, and of which connection.

    Attributes:
        age: sorts policies, the oldest first: when it was made, then its uid.
        permissions: what the connection permits to policies of this one's namespace.
        standing: how its claim on its names stands.
        is_proven: see `redrive.provision.standing.is_proven`.
        takes_over: names of policies of its namespace whose topics it may take over.
        names_no_scheme: whether it leaves the naming scheme to its connection.
    """

    key: Key
    age: tuple[str, str]
    spec: RetryPolicySpec
    policy: Policy
    connection: PulsarConnectionSpec
    permissions: Permissions
    standing: Standing = Standing.OPEN
    is_proven: bool = False
    takes_over: frozenset[str] = frozenset()
    names_no_scheme: bool = False

    @property
    def through(self) -> Key:
        """Return the PulsarConnection that leads to its broker."""
        ref = self.spec.connection_ref
        return Key(ref.namespace or self.key.namespace, ref.name)

    @property
    def only_observes(self) -> bool:
        """Whether nothing may be changed for it."""
        return self.spec.management_policy is ManagementPolicy.OBSERVE

    @property
    def deletion(self) -> DeletionPolicy:
        """Return what its deletion has to do at the broker."""
        if self.only_observes:
            return DeletionPolicy.RETAIN
        return self.spec.deletion_policy or DeletionPolicy.RETAIN

    @property
    def shortest_delay(self) -> timedelta:
        """Return the shortest delay that consumers ask for by the policy."""
        levels = () if self.spec.delay_levels is None else self.policy.levels.rungs
        return min((*self.policy.ladder.rungs, *levels))

    @property
    def broker(self) -> str:
        """Return the broker, as `broker_at` names it."""
        return broker_at(self.connection.admin_url)

    def subscribes_like(self, other: Request) -> bool:
        """Whether both are for one subscription of one topic."""
        own = (self.policy.topic, self.policy.subscription)
        return own == (other.policy.topic, other.policy.subscription)

    def yields_to(self, other: Request) -> bool:
        """Whether it has to wait for *other*, a rival at the same broker, to go.

        A policy whose source topic is a retry or dead-letter topic of an older one has not: whoever
        consumes dead letters may retry them, and nothing of the topic is changed for that. One that
        would turn the source topic of an older one into its own has to, however that one stands.
        A claim of another namespace counts once it is proven.
        """
        a_tenant = other.key.namespace != self.key.namespace
        if self.broker != other.broker or (a_tenant and not other.is_proven):
            return False
        is_older = other.age < self.age
        if other.policy.topic in self.spec.own_topics and is_older:
            return True
        same = self.subscribes_like(other)
        if not same and set(other.spec.own_topics).isdisjoint(self.spec.own_topics):
            return False
        mine, theirs = (r.standing.towards(a_tenant=same and a_tenant) for r in (self, other))
        if not same and mine is theirs is Standing.HELD:
            return False  # one of them owns the topic
        return theirs.precedes(mine, is_older=is_older)


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
        enforces_schemas: see `NamespaceState`.
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
    source_properties: Mapping[str, str] | None = None
    unused: TopicState | None = None
    ledger: TopicState | None = None
    sequences: TopicState | None = None
