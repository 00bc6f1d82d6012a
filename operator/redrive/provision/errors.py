"""Why a policy can't be provisioned as it stands, each with the reason that its conditions show.

Further reasons come from below: `InvalidSpec`; those of `redrive.kube.errors` (connection,
namespace, Secrets, the Kubernetes API) and of `redrive.admin.errors` (the broker).
"""

from __future__ import annotations

from typing import ClassVar

from redrive.admin import errors as admin_errors
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import errors as cluster_errors


class TopicNotAllowedError(RedriveError):
    """The connection is not for this topic, or not for one that is derived from it."""

    reason: ClassVar[str] = "TopicNotAllowed"


class RoleNotAllowedError(RedriveError):
    """The connection does not let policies grant rights to this role."""

    reason = "RoleNotAllowed"


class ResourceConflictError(RedriveError):
    """An older policy is for the same topic and subscription of the same broker."""

    reason = "ResourceConflict"


class NameCollisionError(RedriveError):
    """An older policy, for another subscription, derives the name of the same topic."""

    reason = "NameCollision"


class OwnerConflictError(RedriveError):
    """A topic is marked as kept by another policy, which this operator may not know."""

    reason = "OwnerConflict"


class InUseError(RedriveError):
    """Clients are connected to what a deleted policy would delete."""

    reason = "InUse"


class TenantNotFoundError(RedriveError):
    """A tenant, of the source topic or of a connection's topics, does not exist (yet)."""

    reason = "TenantNotFound"


class NamespaceNotFoundError(RedriveError):
    """The source topic's Pulsar namespace does not exist (yet)."""

    reason = "NamespaceNotFound"


class TopicNotFoundError(RedriveError):
    """The source topic does not exist (yet)."""

    reason = "TopicNotFound"


class PartitionsDifferError(RedriveError):
    """The retry topic has partitions where it should have none, or the other way round."""

    reason = "PartitionsDiffer"


class SubscriptionExpiryError(RedriveError):
    """The Pulsar namespace deletes idle subscriptions, and with them dead letters."""

    reason = "SubscriptionExpiry"


class ConfigMapNotOursError(RedriveError):
    """A ConfigMap of the name that the policy's needs belongs to somebody else."""

    reason = "ConfigMapNotOurs"


_REFUSED = (
    InvalidSpecError,
    cluster_errors.ConnectionInvalidError,
    cluster_errors.NamespaceNotAllowedError,
    TopicNotAllowedError,
    RoleNotAllowedError,
    ResourceConflictError,
    NameCollisionError,
)

WATCHED = (*_REFUSED, cluster_errors.ConnectionNotFoundError)
"""What ends with a change that a watch tells of."""

STANDING = (
    OwnerConflictError,
    SubscriptionExpiryError,
    PartitionsDifferError,
    ConfigMapNotOursError,
)
"""What `standing` finds the end of: a whole Pulsar namespace, or cluster, may stand so at once."""

AWAITED = (TenantNotFoundError, NamespaceNotFoundError, TopicNotFoundError)
"""What ends when somebody makes the source topic; a thousand policies may wait for theirs."""

TOLD = (*WATCHED, *STANDING, admin_errors.BrokerDownError)
"""What a policy is woken after; a broker that is down answers the looks at its connection again.

All else has to be looked at again.
"""

STALLS = (
    *_REFUSED,
    *STANDING,
    admin_errors.AdminUrlInvalidError,
    admin_errors.AuthenticationFailedError,
    admin_errors.CertificateRefusedError,
    admin_errors.ForbiddenError,
    cluster_errors.CaInvalidError,
    cluster_errors.CertificateInvalidError,
    cluster_errors.ForbiddenError,
    cluster_errors.TokenFileError,
)
"""What somebody has to decide about; all else is waited for."""
