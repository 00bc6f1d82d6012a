"""Why a Replay does not run, each with the reason that its conditions show.

Further reasons come from below: `InvalidSpec`; those of `redrive.kube.errors` for the
connection and the Kubernetes API. Those of the job itself stand where they are raised; they reach
the Replay as the message of `ReplayFailed`.
"""

from __future__ import annotations

from typing import ClassVar

from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import errors as cluster_errors


class PolicyNotFoundError(RedriveError):
    """There is no RetryPolicy of the name in policyRef, or it is being deleted."""

    reason: ClassVar[str] = "PolicyNotFound"


class PolicyNotReadyError(RedriveError):
    """The RetryPolicy is not Ready: its topics or grants may be missing."""

    reason = "PolicyNotReady"


class DeadLettersDiscardedError(RedriveError):
    """The RetryPolicy has dead-lettering switched off: there is nothing to replay."""

    reason = "DeadLettersDiscarded"


class ReplayIdentityMissingError(RedriveError):
    """The PulsarConnection does not say as whom replays are to run."""

    reason = "ReplayIdentityMissing"


class TrustNotSupportedError(RedriveError):
    """The connection has certificate authorities of its own, which replay jobs don't know."""

    reason = "TrustNotSupported"


class ServiceAccountNotFoundError(RedriveError):
    """The Replay's namespace lacks the ServiceAccount that replay jobs run as."""

    reason = "ServiceAccountNotFound"


class ReplayInProgressError(RedriveError):
    """Another Replay of the same policy comes first."""

    reason = "ReplayInProgress"


class ApplicationNotOursError(RedriveError):
    """Somebody else's SparkApplication has the name that this Replay needs."""

    reason = "ApplicationNotOurs"


class ReplayFailedError(RedriveError):
    """The SparkApplication has failed for good."""

    reason = "ReplayFailed"


FINAL = (InvalidSpecError, ReplayFailedError)
"""What ends a Replay: its spec can't change, and a run is not begun a second time."""

_WAITS_FOR_A_CHANGE = (
    PolicyNotFoundError,
    PolicyNotReadyError,
    ReplayInProgressError,
    cluster_errors.ConnectionNotFoundError,
)

STALLS = (
    *FINAL,
    DeadLettersDiscardedError,
    ReplayIdentityMissingError,
    TrustNotSupportedError,
    ApplicationNotOursError,
    cluster_errors.ConnectionInvalidError,
    cluster_errors.NamespaceNotAllowedError,
    cluster_errors.ForbiddenError,
)
"""What somebody has to decide about; all else is waited for."""

WATCHED = (
    *FINAL,
    *_WAITS_FOR_A_CHANGE,
    DeadLettersDiscardedError,
    ReplayIdentityMissingError,
    TrustNotSupportedError,
    ApplicationNotOursError,
    cluster_errors.ConnectionInvalidError,
    cluster_errors.NamespaceNotAllowedError,
)
"""What ends with a change that a watch tells of; all else has to be looked at again."""
