"""What stands in the way on the side of Kubernetes, each with the reason that conditions show."""

from __future__ import annotations

import json
from typing import ClassVar

from redrive.errors import RedriveError, Requeue


class KubernetesError(RedriveError):
    """The Kubernetes API refused a call, or failed at it."""

    reason: ClassVar[str] = "KubernetesRefused"


class NotFoundError(KubernetesError):
    """The object is not there (404)."""

    reason = "KubernetesNotFound"


class ConflictError(KubernetesError):
    """The object exists already, or has changed since it was read (409)."""

    reason = "KubernetesConflict"


class ForbiddenError(KubernetesError):
    """The ServiceAccount lacks a right (403)."""

    reason = "KubernetesForbidden"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class NoClusterError(KubernetesError):
    """There is no configuration that says which cluster to talk to, with which credentials."""

    reason = "NoCluster"


class ClusterUnknownError(KubernetesError):
    """Nothing tells this cluster from others that may use the same brokers."""

    reason = "ClusterUnknown"


class UnavailableError(KubernetesError):
    """The Kubernetes API does not answer, or limits the rate of calls (429, 5xx)."""

    reason = "KubernetesUnavailable"


class LeaseLostError(RedriveError):
    """Another operator has taken over."""

    reason = "LeaseLost"


class SecretNotFoundError(RedriveError):
    """A Secret that a spec refers to is not there."""

    reason = "SecretNotFound"
    private = True


class SecretKeyNotFoundError(RedriveError):
    """A Secret lacks the key that a spec refers to, or holds nothing usable there."""

    reason = "SecretKeyNotFound"
    private = True


class TokenFileError(RedriveError):
    """The file that a spec names holds no token, or can't be read."""

    reason = "TokenFileInvalid"
    private = True
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class CertificateInvalidError(RedriveError):
    """A Secret holds no client certificate with its key."""

    reason = "CertificateInvalid"
    private = True
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class CaInvalidError(RedriveError):
    """There are no certificate authorities where a spec says."""

    reason = "CaInvalid"
    private = True
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class ConnectionNotFoundError(RedriveError):
    """No PulsarConnection has the name that a spec refers to."""

    reason = "ConnectionNotFound"
    requeue = Requeue.ON_CHANGE


class ConnectionInvalidError(RedriveError):
    """The PulsarConnection has a spec that cannot be read."""

    reason = "ConnectionInvalid"
    private = True
    stalls = True
    requeue = Requeue.ON_CHANGE


class NamespaceUnreadError(RedriveError):
    """A selector of the PulsarConnection is about the labels of a namespace not yet read."""

    reason = "NamespaceUnread"


class NamespaceNotAllowedError(RedriveError):
    """The PulsarConnection is not for objects of that Kubernetes namespace."""

    reason = "NamespaceNotAllowed"
    stalls = True
    requeue = Requeue.ON_CHANGE


_KINDS: dict[int, type[KubernetesError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: UnavailableError,
}
_REMEDIES = {
    403: "grant it to the ServiceAccount, as the Helm chart does",
    404: "create it, or install its CustomResourceDefinition",
    409: "it is tried again with what is there now",
}


def error_for(call: str, status: int, answer: str) -> KubernetesError:
    """Name the failure of *call* by the HTTP *status* and what the API server says about it."""
    try:
        said = json.loads(answer)["message"]
    except (ValueError, KeyError, TypeError):
        said = answer[:200]
    kind = UnavailableError if status >= 500 else KubernetesError  # noqa: PLR2004
    return _KINDS.get(status, kind)(
        f"the Kubernetes API refused to {call}",
        got=f"{status} {said}",
        remedy=_REMEDIES.get(status, "it is tried again; see the message for what to fix"),
    )
