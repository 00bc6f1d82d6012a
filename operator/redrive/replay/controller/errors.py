"""Why a Replay does not run, each with the reason that its conditions show.

Further reasons come from below: `InvalidSpec`; those of `redrive.kube.errors` for the
connection and the Kubernetes API. Those of the job itself stand where they are raised; they reach
the Replay as the message of `ReplayFailed`.
"""

from __future__ import annotations

from typing import ClassVar

from redrive.errors import InvalidSpecError, RedriveError, Requeue


class PolicyNotFoundError(RedriveError):
    """There is no RetryPolicy of the name in policyRef, or it is being deleted."""

    reason: ClassVar[str] = "PolicyNotFound"
    requeue = Requeue.ON_CHANGE


class PolicyNotReadyError(RedriveError):
    """The RetryPolicy is not Ready: its topics or grants may be missing."""

    reason = "PolicyNotReady"
    requeue = Requeue.ON_CHANGE


class DeadLettersDiscardedError(RedriveError):
    """The RetryPolicy has dead-lettering switched off: there is nothing to replay."""

    reason = "DeadLettersDiscarded"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ReplayIdentityMissingError(RedriveError):
    """The PulsarConnection does not say with which role replays run."""

    reason = "ReplayIdentityMissing"
    stalls = True
    requeue = Requeue.ON_CHANGE


class TrustNotSupportedError(RedriveError):
    """The connection has certificate authorities of its own, and names none for replay jobs."""

    reason = "TrustNotSupported"
    stalls = True
    requeue = Requeue.ON_CHANGE


class JobNotPermittedError(RedriveError):
    """A Replay or its connection asks for pods that are not permitted to it."""

    reason = "JobNotPermitted"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ServiceAccountNotFoundError(RedriveError):
    """The Replay's namespace lacks the ServiceAccount that replay jobs run as."""

    reason = "ServiceAccountNotFound"


class JobSecretNotFoundError(RedriveError):
    """The Replay's namespace lacks a Secret, or a ConfigMap, that the pods of its job need."""

    reason = "JobSecretNotFound"


class ReplaysDisabledError(RedriveError):
    """The operator was started without an image for replay jobs."""

    reason = "ReplaysDisabled"
    stalls = True
    requeue = Requeue.ON_CHANGE


class LauncherDisabledError(RedriveError):
    """The operator was not started for the Spark operator that a connection names."""

    reason = "LauncherDisabled"
    stalls = True
    requeue = Requeue.ON_CHANGE


class SparkOperatorNotFoundError(RedriveError):
    """The cluster knows no SparkApplication."""

    reason = "SparkOperatorNotFound"


class ApplicationNotStartedError(RedriveError):
    """The Spark operator has not begun to run the SparkApplication of a Replay."""

    reason = "ApplicationNotStarted"


class DriverNotStartedError(RedriveError):
    """The driver of a submitted SparkApplication does not run: its pod lacks something."""

    reason = "DriverNotStarted"
    requeue = Requeue.SLOW_BACKOFF  # each look may find other words, which are an Event


class ExecutorsNotStartedError(RedriveError):
    """No executor of a SparkApplication runs, whose driver does: their pods lack something."""

    reason = "ExecutorsNotStarted"
    requeue = Requeue.SLOW_BACKOFF


class ReplayInProgressError(RedriveError):
    """Another Replay of the same policy comes first."""

    reason = "ReplayInProgress"
    requeue = Requeue.ON_CHANGE


class SuspendedError(RedriveError):
    """The Replay is suspended and was not launched yet."""

    reason = "Suspended"
    requeue = Requeue.ON_CHANGE


class BatchMixesKeysError(RedriveError):
    """A Replay asks for batches where messages are delivered by their keys."""

    reason = "BatchMixesKeys"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ReplayNotSafeError(RedriveError):
    """The RetryPolicy does not let its messages be handled again, or not yet."""

    reason = "ReplayNotSafe"
    stalls = True
    requeue = Requeue.ON_CHANGE


class TargetNotAllowedError(RedriveError):
    """A Replay is to move messages to a topic that is not for that."""

    reason: ClassVar[str] = "TargetNotAllowed"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class TargetNotFoundError(RedriveError):
    """A Replay is to move messages to a topic that does not exist."""

    reason: ClassVar[str] = "TargetNotFound"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class TargetNotSubscribedError(RedriveError):
    """A Replay is to move messages to a topic that keeps none, as it has no subscription."""

    reason: ClassVar[str] = "TargetNotSubscribed"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class TargetDeduplicationError(RedriveError):
    """A Replay is to move messages exactly once, to a topic that does not deduplicate."""

    reason: ClassVar[str] = "TargetDoesNotDeduplicate"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class TargetEvictsError(RedriveError):
    """A Replay is to move messages to a topic whose backlog quota drops them unread."""

    reason: ClassVar[str] = "TargetEvicts"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class TargetExpiresError(RedriveError):
    """A Replay is to move messages to a topic in which they expire before consumers get them."""

    reason: ClassVar[str] = "TargetExpires"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class SubscriptionAwaitedError(RedriveError):
    """A run waits until each partition of its target has a durable subscription again."""

    reason: ClassVar[str] = "SubscriptionAwaited"
    requeue = Requeue.ON_CHANGE


class TargetFullError(RedriveError):
    """The target of a Replay is over its backlog quota."""

    reason: ClassVar[str] = "TargetFull"
    requeue = Requeue.ON_CHANGE


class ApprovalRequiredError(RedriveError):
    """A Replay would move more messages than it may without approval."""

    reason: ClassVar[str] = "ApprovalRequired"
    requeue = Requeue.ON_CHANGE


class ApplicationNotOursError(RedriveError):
    """A SparkApplication with another owner has the name that this Replay needs."""

    reason = "ApplicationNotOurs"
    stalls = True
    requeue = Requeue.ON_CHANGE


class DeadlineExceededError(RedriveError):
    """The run has taken longer than it may, and its job does not end it."""

    reason: ClassVar[str] = "DeadlineExceeded"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ReplayFailedError(RedriveError):
    """The SparkApplication has failed for good."""

    reason = "ReplayFailed"
    stalls = True
    requeue = Requeue.ON_CHANGE


FINAL = (InvalidSpecError, ReplayFailedError, DeadlineExceededError)
"""What ends a Replay: its spec can't change, and a run is not begun a second time."""
