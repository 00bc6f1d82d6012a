"""Errors of redrive and the reasons that conditions show for them.

What redrive refuses, or fails at: one shallow family, and what a reconcile does about each.

An error has the *reason* that a Kubernetes condition shows for it, and a message in three parts:
what is wrong, what was found, what to do. All layers raise these; `provision` and `replay` turn
them into conditions, the command line into one line on standard error.

Why a policy can't be provisioned as it stands, each with the reason that its conditions show.

Further reasons come from below: `InvalidSpec`; those of `redrive.kube.client` (connection,
namespace, Secrets, the Kubernetes API) and of `redrive.admin.errors` (the broker).

Why a Replay does not run, each with the reason that its conditions show.

Further reasons come from below: `InvalidSpec`; those of `redrive.kube.client` for the
connection and the Kubernetes API. Those of the job itself stand where they are raised; they reach
the Replay as the message of `ReplayFailed`.
"""

from __future__ import annotations

import enum
from typing import ClassVar

_NOTHING = object()

PROCESS_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that concern the process, or the generator that runs, and never a single message."""


class Requeue(enum.Enum):
    """When an object is reconciled again."""

    ON_CHANGE = enum.auto()
    """When a watch, a resync or another object has a reason for it."""
    BACKOFF = enum.auto()
    """After a back-off of 1 s that doubles up to 15 s, each shortened at random by up to half."""
    SLOW_BACKOFF = enum.auto()
    """The same, but up to 5 minutes: what keeps the object from being ready stays for now."""

    @property
    def result(self) -> str:
        """Return what metrics count it as."""
        return "success" if self is Requeue.ON_CHANGE else "requeue"


class RedriveError(Exception):
    """Something is wrong that a user or an administrator can fix.

    Args:
        problem: what is wrong, as a clause that names the field or thing concerned.
        got: what was found instead; left out where there is nothing to show. Never a secret.
        remedy: what to do about it.

    Attributes:
        reason: of the conditions that show it.
        stalls: whether an object stays like that until its spec, or its surroundings, are changed.
        requeue: when an object that it keeps from being ready is reconciled again.
        private: whether the message names Secrets, keys or invalid values of a connection, which
            only objects of the connection's own namespace show.
    """

    reason: ClassVar[str] = "InternalError"
    stalls: ClassVar[bool] = False
    requeue: ClassVar[Requeue] = Requeue.BACKOFF
    private: bool = False

    def __init__(self, problem: str, *, got: object = _NOTHING, remedy: str) -> None:
        found = "" if got is _NOTHING else f"; got {got!r}"
        super().__init__(f"{problem}{found}; {remedy}")


class InvalidSpecError(RedriveError):
    """A value that no broker state can make right: the manifest or the call has to change."""

    reason = "InvalidSpec"
    stalls = True
    requeue = Requeue.ON_CHANGE


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


class LimitExceededError(RedriveError):
    """The policy is beyond a limit of its connection, or of the record of a Pulsar namespace."""

    reason: ClassVar[str] = "LimitExceeded"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF  # no watch shows that another policy has gone


class OwnerConflictError(RedriveError):
    """A topic belongs to another policy, which may be gone.

    Attributes:
        owner: that policy, for the operator's log; an object of another namespace does not show it.
    """

    owner: str = ""
    reason = "OwnerConflict"
    stalls = True
    requeue = Requeue.ON_CHANGE


class ChainedPolicyError(OwnerConflictError):
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


class StrayPartitionError(RedriveError):
    """A topic of its own has the name of a partition that the policy needs.

    Brokers create such topics for clients that name a partition, and create no partitions beside
    one.
    """

    reason = "StrayPartition"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


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
    """The BrokerConnection does not say with which role replays run."""

    reason = "ReplayIdentityMissing"
    stalls = True
    requeue = Requeue.ON_CHANGE


class TrustNotSupportedError(RedriveError):
    """The connection has certificate authorities of its own, and names none for replay jobs."""

    reason = "TrustNotSupported"
    stalls = True
    requeue = Requeue.ON_CHANGE


class JobNotPermittedError(RedriveError):
    """A Replay asks for a job template, or a number of executors, that is not permitted to it."""

    reason = "JobNotPermitted"
    stalls = True
    requeue = Requeue.ON_CHANGE


class JobTemplateNotFoundError(RedriveError):
    """The operator has no job template of this name, or has not read it yet."""

    reason = "JobTemplateNotFound"
    requeue = Requeue.ON_CHANGE


class JobTemplateInvalidError(RedriveError):
    """A job template is invalid, or the Spark operator does not know one of its fields."""

    reason: ClassVar[str] = "JobTemplateInvalid"
    stalls = True
    requeue = Requeue.SLOW_BACKOFF


class ServiceAccountNotFoundError(RedriveError):
    """The Replay's namespace lacks the ServiceAccount that replay jobs run as."""

    reason = "ServiceAccountNotFound"


class JobRightsMissingError(RedriveError):
    """The ServiceAccount of replay jobs lacks a right in its namespace."""

    reason = "JobRightsMissing"


class JobSecretNotFoundError(RedriveError):
    """The Replay's namespace lacks a Secret, ConfigMap or claim that the pods of its job need."""

    reason = "JobSecretNotFound"


class ConsentMissingError(RedriveError):
    """An object that a connection names for replay jobs lacks the consent of its owner."""

    reason = "ConsentMissing"


class LedgerKeyLostError(RedriveError):
    """The operator lacks the key with which the ledger of the Replay's policy was written."""

    reason = "LedgerKeyLost"


class JobImageNotFoundError(RedriveError):
    """The operator's PodTemplate, which has the image of replay jobs, does not exist."""

    reason = "JobImageNotFound"


class ReplaysDisabledError(RedriveError):
    """The operator was started without an image for replay jobs."""

    reason = "ReplaysDisabled"
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


class TooManyRunsError(RedriveError):
    """As many Replays of the namespace run as its connection permits."""

    reason: ClassVar[str] = "TooManyRuns"
    requeue = Requeue.ON_CHANGE


class SuspendedError(RedriveError):
    """The Replay is suspended and was not launched yet."""

    reason = "Suspended"
    requeue = Requeue.ON_CHANGE


class InReviewError(RedriveError):
    """The Replay has shown its plan, and waits for a confirmation."""

    reason = "InReview"
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


class AlreadyEndedError(RedriveError):
    """The Replay was created with the annotation of an end, such as a copy of an ended one."""

    reason = "AlreadyEnded"
    stalls = True
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


class AllRefusedError(RedriveError):
    """The run refused every message that it selected, and moved none."""

    reason = "AllRefused"
    stalls = True
    requeue = Requeue.ON_CHANGE


class CanceledError(RedriveError):
    """The author of the Replay canceled it."""

    reason = "Canceled"
    stalls = True
    requeue = Requeue.ON_CHANGE


class StartedTooLateError(RedriveError):
    """The Replay was not launched before its `startBefore`."""

    reason = "StartedTooLate"
    stalls = True
    requeue = Requeue.ON_CHANGE


FINAL = (
    InvalidSpecError, ReplayFailedError, DeadlineExceededError, CanceledError, StartedTooLateError
)  # fmt: skip
"""What ends a Replay: its spec can't change, and a run is not begun a second time."""
