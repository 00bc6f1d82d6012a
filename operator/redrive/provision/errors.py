"""Why a policy can't be provisioned as it stands, each with the reason that its conditions show.

Further reasons come from below: `InvalidSpec`; those of `redrive.kube.errors` (connection,
namespace, Secrets, the Kubernetes API) and of `redrive.admin.errors` (the broker).
"""

from __future__ import annotations

from typing import ClassVar

from redrive.errors import RedriveError, Requeue
from redrive.kube.resources import Key


class TopicNotAllowedError(RedriveError):
    """The connection is not for this topic, or not for one that is derived from it."""

    reason: ClassVar[str] = "TopicNotAllowed"
    stalls = True
    requeue = Requeue.ON_CHANGE


class RoleNotAllowedError(RedriveError):
    """The connection does not let policies grant rights to this role."""

    reason = "RoleNotAllowed"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ContestedError(RedriveError):
    """Another policy, whose claim comes first, has what this one needs.

    Attributes:
        rival: that policy.
    """

    stalls = True
    requeue = Requeue.ON_CHANGE

    def __init__(self, problem: str, *, rival: Key, remedy: str) -> None:
        super().__init__(problem, got=f"RetryPolicy {rival}", remedy=remedy)
        self.rival = rival


class ResourceConflictError(ContestedError):
    """Another policy is for the same topic and subscription of the same broker."""

    reason = "ResourceConflict"


class NameCollisionError(ContestedError):
    """Another policy, for another subscription, derives the name of the same topic."""

    reason = "NameCollision"


class OwnerConflictError(RedriveError):
    """A topic belongs to another policy, which may be gone."""

    reason = "OwnerConflict"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ChainedPolicyError(RedriveError):
    """The source topic is a retry or dead-letter topic of redrive."""

    reason = "ChainedPolicy"
    stalls = True
    requeue = Requeue.ON_CHANGE


class BrokerChangedError(RedriveError):
    """The policy's connection leads to another broker than the one that has its topics."""

    reason = "BrokerChanged"
    stalls = True
    requeue = Requeue.ON_CHANGE


class TopicExistsError(RedriveError):
    """A topic that others created has the name of one that the policy needs."""

    reason = "TopicExists"
    stalls = True
    requeue = Requeue.ON_CHANGE


class AdoptionNotAllowedError(RedriveError):
    """The connection does not let policies adopt this topic."""

    reason = "AdoptionNotAllowed"
    stalls = True
    requeue = Requeue.ON_CHANGE


class DeletionNotAllowedError(RedriveError):
    """The connection does not let policies have this topic deleted with them."""

    reason = "DeletionNotAllowed"
    stalls = True
    requeue = Requeue.ON_CHANGE


class LateWritesError(RedriveError):
    """A deleted policy was being provisioned: what was sent for it may not be done yet."""

    reason = "LateWrites"


class InUseError(RedriveError):
    """Clients are connected to what a deleted policy would delete."""

    reason = "InUse"


class AwaitedError(RedriveError):
    """It ends when the source topic is created; a thousand policies may wait for theirs."""


class TenantNotFoundError(AwaitedError):
    """A tenant, of the source topic or of a connection's topics, does not exist (yet)."""

    reason = "TenantNotFound"


class NamespaceNotFoundError(AwaitedError):
    """The source topic's Pulsar namespace does not exist (yet)."""

    reason = "NamespaceNotFound"


class TopicNotFoundError(AwaitedError):
    """The source topic does not exist (yet)."""

    reason = "TopicNotFound"


class PartitionsDifferError(RedriveError):
    """The retry topic has partitions where it should have none, or the other way round."""

    reason = "PartitionsDiffer"
    stalls = True
    requeue = Requeue.ON_CHANGE


class SubscriptionExpiryError(RedriveError):
    """The Pulsar namespace deletes idle subscriptions, and with them dead letters."""

    reason = "SubscriptionExpiry"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ConfigMapNotOursError(RedriveError):
    """A ConfigMap of the name that the policy's needs has another owner."""

    reason = "ConfigMapNotOurs"
    stalls = True
    requeue = Requeue.ON_CHANGE
