"""The request of a RetryPolicy, and its priority among rivals.

How the claim of one policy stands against those of others, as its spec and status show; pure.

Two policies that need the same are ordered by this before their age, so that a claim of which
nothing comes keeps none from working, and one that is fixed later takes nothing back by itself.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.conditions import STALLED
from redrive.api.connection import BrokerConnectionSpec
from redrive.api.permissions import Permissions
from redrive.api.policy_defaults import DeletionPolicy
from redrive.api.retrypolicy import ManagementPolicy, RetryPolicySpec
from redrive.errors import RedriveError
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.provision.ownership import internal, shown_policy
from redrive.reasons import Reason


class ContestedError(RedriveError):
    """Another policy, whose claim comes first, has what this one needs.

    Args:
        namespace: that of the policy which shows this error.

    Attributes:
        rival: the other policy.
        shown_rival: its name, as the status of the policy may show it.
    """

    def __init__(self, problem: str, *, rival: Key, namespace: str, remedy: str) -> None:
        super().__init__(problem, got=shown_policy(rival, namespace), remedy=remedy)
        self.rival = rival
        self.shown_rival = str(rival) if rival.namespace == namespace else ANOTHER_NAMESPACE


class ResourceConflictError(ContestedError):
    """Another policy is for the same topic and subscription of the same broker."""

    reason = Reason.RESOURCE_CONFLICT


class NameCollisionError(ContestedError):
    """Another policy, for another subscription, derives the name of the same topic."""

    reason = Reason.NAME_COLLISION


ANOTHER_NAMESPACE = "another namespace"
"""The value of `status.blockedBy` for a policy of another namespace."""
WAITS = frozenset({ResourceConflictError.reason, NameCollisionError.reason})
"""Reasons of a policy that waits for a rival to go."""
BROKER_DIGEST = "brokerDigest"
"""Field of `INTERNAL` of a policy's status: broker at which it was provisioned last, a `digest_of`.
"""


def digest_of(broker: str) -> str:
    """Write a broker's address, which is for the connection's namespace alone, for all to see."""
    return hashlib.sha256(broker.encode()).hexdigest()[:32]


def proof_of(body: Body) -> tuple[Any, Any]:
    """Return through which connection, and at which broker, a RetryPolicy was provisioned last."""
    return (body.get("status") or {}).get("connection"), internal(body).get(BROKER_DIGEST)


def is_proven(body: Body, connection: Key, broker: str) -> bool:
    """Whether a RetryPolicy was provisioned at *broker*, through *connection*, which it names.

    That takes rights in the Pulsar namespace of its topics, which never change. Until then its
    claim is a word of its own namespace, and so is the address of the broker.
    """
    return proof_of(body) == (str(connection), digest_of(broker))


class Standing(enum.Enum):
    """How a claim stands."""

    DEAD = enum.auto()
    """The policy only observes, or was stalled by something else than a rival from the start."""
    FAULTY = enum.auto()
    """The policy was provisioned, and is stalled by something else than a rival now."""
    OPEN = enum.auto()
    """The policy is new, or waits for a rival to go."""
    HELD = enum.auto()
    """The policy was provisioned, and waits for no rival since."""

    @classmethod
    def of(cls, body: Body) -> Standing:
        """Return how the claim of *body*, a RetryPolicy, stands."""
        if body["spec"].get("managementPolicy") == ManagementPolicy.OBSERVE:
            return cls.DEAD
        written = body.get("status") or {}
        held = "retryTopic" in written and "blockedBy" not in written
        if "deletionTimestamp" not in body["metadata"]:  # until it is gone, it may delete topics
            stalled = {c["reason"] for c in written.get("conditions") or () if c["type"] == STALLED}
            if stalled - WAITS:
                return cls.FAULTY if held else cls.DEAD
        return cls.HELD if held else cls.OPEN

    def towards(self, *, a_tenant: bool) -> Standing:
        """Return how the claim stands towards one of *a_tenant* of another namespace, or not.

        What stalls a policy for a moment, such as a token that has expired, must not be what others
        wait for. Within a namespace it gives way.
        """
        if self is not Standing.FAULTY:
            return self
        return Standing.HELD if a_tenant else Standing.DEAD

    def precedes(self, other: Standing, *, is_older: bool) -> bool:
        """Whether a claim that stands so comes before one that stands like *other*."""
        if self is Standing.DEAD:
            return False
        if self is other:
            return is_older
        return self is Standing.HELD


@dataclass(frozen=True)
class Request:
    """What a RetryPolicy asks for, and of which connection.

    Attributes:
        age: sorts policies, the oldest first: when it was made, then its uid.
        permissions: what the connection permits to policies of this one's namespace.
        standing: how its claim on its names stands.
        is_proven: see `redrive.provision.request.is_proven`.
        takes_over: names of policies of its namespace whose topics it may take over.
    """

    key: Key
    age: tuple[str, str]
    spec: RetryPolicySpec
    policy: Policy
    connection: BrokerConnectionSpec
    permissions: Permissions
    standing: Standing = Standing.OPEN
    is_proven: bool = False
    takes_over: frozenset[str] = frozenset()

    @property
    def through(self) -> Key:
        """Return the BrokerConnection that leads to its broker."""
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
        return broker_at(self.connection.pulsar.admin_url)

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
