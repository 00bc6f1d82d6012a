"""Request of a RetryPolicy, and its priority among policies that claim the same topic; pure.

Priority precedes age. An inactive claim does not block others, and a claim that becomes active
later does not take topics back.
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
from redrive.kube import resources
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.provision.ownership import internal, shown_policy
from redrive.reasons import Reason


class ContestedError(RedriveError):
    """Another policy with priority claims a resource that this policy needs.

    Args:
        namespace: namespace of the policy that shows this error.
        kind: of both policies.

    Attributes:
        rival: the other policy.
        shown_rival: its name, as the status of the policy may show it.
    """

    def __init__(  # noqa: PLR0913  parts of the message
        self,
        problem: str,
        *,
        rival: Key,
        namespace: str,
        remedy: str,
        reason: Reason,
        kind: str = resources.POLICIES.kind,
    ) -> None:
        got = shown_policy(rival, namespace, kind)
        super().__init__(problem, got=got, remedy=remedy, reason=reason)
        self.rival = rival
        self.shown_rival = str(rival) if rival.namespace == namespace else ANOTHER_NAMESPACE


ANOTHER_NAMESPACE = "another namespace"
"""Value of `status.blockedBy` for a policy of another namespace."""
WAITS = frozenset({Reason.RESOURCE_CONFLICT, Reason.NAME_COLLISION})
"""Reasons of a policy that a rival blocks."""
BROKER_DIGEST = "brokerDigest"
"""Field of `INTERNAL`: `digest_of` the broker at which the policy was last provisioned."""


def digest_of(broker: str) -> str:
    """Return a digest of a broker's address, which only the connection's namespace may see."""
    return hashlib.sha256(broker.encode()).hexdigest()[:32]


def proof_of(body: Body) -> tuple[Any, Any]:
    """Return the connection and the broker at which a RetryPolicy was provisioned last."""
    return (body.get("status") or {}).get("connection"), internal(body).get(BROKER_DIGEST)


def is_proven(body: Body, connection: Key, broker: str) -> bool:
    """Return True if a RetryPolicy was provisioned at *broker*, through its *connection*.

    That requires permissions in the Pulsar namespace of its topics, which never change. A claim
    without this proof is only asserted by its own namespace, like the address of the broker.
    """
    return proof_of(body) == (str(connection), digest_of(broker))


class Priority(enum.Enum):
    """Priority of a claim, from its policy's spec and status."""

    INACTIVE = enum.auto()
    """The policy observes, or was stalled from the start by another cause than a rival."""
    STALLED = enum.auto()
    """The policy was provisioned, and is now stalled by another cause than a rival."""
    OPEN = enum.auto()
    """The policy is new, or a rival blocks it."""
    HELD = enum.auto()
    """The policy was provisioned, and no rival has blocked it since."""

    @classmethod
    def of(cls, body: Body) -> Priority:
        """Return the priority of the claim of *body*, a RetryPolicy."""
        if body["spec"].get("managementPolicy") == ManagementPolicy.OBSERVE:
            return cls.INACTIVE
        written = body.get("status") or {}
        held = "retryTopic" in written and "blockedBy" not in written
        if "deletionTimestamp" not in body["metadata"]:  # a deleting policy may delete topics
            written_conditions = written.get("conditions") or ()
            if {c.get("reason") for c in written_conditions if c["type"] == STALLED} - WAITS:
                return cls.STALLED if held else cls.INACTIVE
        return cls.HELD if held else cls.OPEN

    def towards(self, *, a_tenant: bool) -> Priority:
        """Return the priority towards a rival of another namespace (*a_tenant*), or of its own.

        A temporary stall, such as an expired token, must not give the topics to another tenant.
        Within a namespace a stalled policy gives way.
        """
        if self is not Priority.STALLED:
            return self
        return Priority.HELD if a_tenant else Priority.INACTIVE

    def precedes(self, other: Priority, *, is_older: bool) -> bool:
        """Return True if a claim of this priority precedes a claim of priority *other*."""
        if self is Priority.INACTIVE:
            return False
        if self is other:
            return is_older
        return self is Priority.HELD


@dataclass(frozen=True)
class Request:
    """Resolved RetryPolicy and its connection.

    Attributes:
        age: sort key, oldest first: creation time, then uid.
        permissions: what the connection permits to the policy's namespace.
        priority: priority of its claims.
        is_proven: see `redrive.provision.request.is_proven`.
        takes_over: names of policies of its namespace whose topics it may take over.
    """

    key: Key
    age: tuple[str, str]
    spec: RetryPolicySpec
    policy: Policy
    connection: BrokerConnectionSpec
    permissions: Permissions
    priority: Priority = Priority.OPEN
    is_proven: bool = False
    takes_over: frozenset[str] = frozenset()

    @property
    def through(self) -> Key:
        """Return the name of its BrokerConnection."""
        ref = self.spec.connection_ref
        return Key(ref.namespace or self.key.namespace, ref.name)

    @property
    def only_observes(self) -> bool:
        """Return True if redrive may change nothing for the policy."""
        return self.spec.management_policy is ManagementPolicy.OBSERVE

    @property
    def deletion(self) -> DeletionPolicy:
        """Return the effective deletion policy."""
        if self.only_observes:
            return DeletionPolicy.RETAIN
        return self.spec.deletion_policy or DeletionPolicy.RETAIN

    @property
    def shortest_delay(self) -> timedelta:
        """Return the shortest delay of the policy."""
        levels = () if self.spec.delay_levels is None else self.policy.levels.rungs
        return min((*self.policy.ladder.rungs, *levels))

    @property
    def broker(self) -> str:
        """Return its broker, as `broker_at` names it."""
        return broker_at(self.connection.pulsar.admin_url)

    def subscribes_like(self, other: Request) -> bool:
        """Return True if both policies have the same topic and subscription."""
        own = (self.policy.topic, self.policy.subscription)
        return own == (other.policy.topic, other.policy.subscription)

    def yields_to(self, other: Request) -> bool:
        """Return True if *other*, a rival at the same broker, has priority.

        A policy does not yield if its source topic is a retry or dead-letter topic of an older one:
        consumers of dead letters may retry them, and the topic is not changed for that. A policy
        that would turn the source topic of an older one into its own always yields. A claim of
        another namespace counts once it is proven.
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
        mine, theirs = (r.priority.towards(a_tenant=same and a_tenant) for r in (self, other))
        if not same and mine is theirs is Priority.HELD:
            return False  # one of them owns the topic
        return theirs.precedes(mine, is_older=is_older)
