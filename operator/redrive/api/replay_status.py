"""Status of the kind Replay."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from redrive.api.conditions import Conditions, Timestamp, WarningTypes, written
from redrive.api.model import MAX_TOPIC, StatusModel
from redrive.api.replay import MAX_ID, Mode, ReplayEngine
from redrive.api.retrypolicy import MAX_SHOWN
from redrive.policy.envelope import MAX_CAUSE
from redrive.policy.values import parse_duration

_MAX_ENDS = 1024


class Phase(enum.StrEnum):
    """Phase of a Replay; Completed and Failed are final."""

    PENDING = "Pending"
    SUBMITTED = "Submitted"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"
    FAILED = "Failed"


FINAL = frozenset({Phase.COMPLETED, Phase.FAILED})


class Refusal(StatusModel):
    """A selected entry of the dead-letter topic that cannot be moved."""

    entry: Annotated[str, Field(max_length=MAX_ID)]
    """Id of the entry, as `ledger:entry`; of RocketMQ as `master:queue:offset`."""

    messages: int
    """Number of selected messages in it."""

    cause: Annotated[str, Field(max_length=64)]
    """Cause of the refusal: Encrypted, UnreadableProperties, PartOfBatch, BatchTooLarge,
    SchemaNotFound, SchemaUnsupported, SchemaRefused, ReplayedTooOften, ContentTooLarge, TooBig,
    NotAccepted, NotDelivered or Unproven."""


class Count(StatusModel):
    """Number of messages with one cause."""

    cause: Annotated[str, Field(max_length=MAX_CAUSE)]
    """Class of the exception of dead letters, empty without one; or reason of messages that cannot
    be moved."""

    messages: int
    """Number of messages."""


class PlannedCauseCount(Count):
    """Dead letters with one cause."""

    fingerprint: Annotated[str, Field(max_length=16)] | None = None
    """Fingerprint, which is equal for failures of one kind, such as `0f4a9c31d2be7755`. Absent if
    the consumer recorded none. `select.fingerprints` selects by it."""

    replayed: int | None = None
    """Number of these messages that were replayed before, and died again."""

    first_time: Timestamp | None = None
    """First publish time in the dead-letter topic, by the clock of the producer. Absent if
    unknown."""

    last_time: Timestamp | None = None
    """Last publish time in the dead-letter topic, by the clock of the producer. Absent if
    unknown."""


class Preview(StatusModel):
    """Result of a plan."""

    causes: Annotated[tuple[PlannedCauseCount, ...], Field(max_length=20)] = ()
    """The 20 most frequent causes of the messages that would be moved. Those that follow a dead
    letter of their key count with its cause."""

    following: int | None = None
    """Number of messages that are not selected, and follow a dead letter of their key. Known after
    the scan."""

    refused: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """Reasons of messages that cannot be moved; `refusals` lists these messages."""

    samples: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_ID)], ...], Field(max_length=10)
    ] = ()
    """Ids of some messages that would be moved, as `ledger:entry:partition:index`; partition -1
    means that the topic is not partitioned. Of RocketMQ as `master:queue:offset`."""

    estimated_seconds: int | None = None
    """Estimated duration of the run in seconds, without the start of Spark. Known after the
    scan."""


MAX_AUDITED = 65
"""Maximum number of targets that an audit names; it reads all."""
_Examples = Annotated[tuple[Annotated[str, Field(max_length=MAX_ID)], ...], Field(max_length=5)]


class AuditResult(StatusModel):
    """Differences between dead-letter topic, ledger and targets, with `spec.mode: Audit`.

    Only `topics` and `messages` are set while the job reads the targets.
    """

    topics: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_TOPIC)], ...], Field(max_length=MAX_AUDITED)
    ]
    """The first 65 targets: the retry topic, `spec.target`, and those of other Replays of the
    policy that a rule of the connection allows. All are read."""

    messages: int
    """Messages of the targets that were read."""

    doubled: int | None = None
    """Dead letters that the targets have more than once."""

    doubled_examples: _Examples = ()
    """Ids of up to five, as `ledger:entry:partition:index`; partition -1 means that the topic is
    not partitioned."""

    unrecorded: int | None = None
    """Unacknowledged entries that a target contains, that are not recorded as moved, and for which
    the next Replay does not search the target. It would send them again."""

    unrecorded_examples: _Examples = ()
    """Ids of up to five, as `ledger:entry:partition`."""

    missing: int | None = None
    """Entries that are recorded as moved, and that no target contains. Usually they were consumed,
    and the broker has deleted them."""

    returned: int | None = None
    """Entries that are recorded as moved, and are not acknowledged: the broker lost the
    acknowledgement, for example when it was killed. The next Replay acknowledges them."""

    open: int | None = None
    """Ranges of entries that a running Replay moves, or an interrupted Replay left unfinished. The
    next Replay searches the target for their messages."""


class RunOutcome(StatusModel):
    """Outcome of moved messages: `moved` = handled + waiting + deadAgain.

    Copies that killed consumers left are included.
    """

    observed_time: Timestamp
    """Time at which the topics were read."""

    handled: int
    """Number of messages that were handled or expired: neither waiting nor dead again."""

    waiting: int
    """Number of messages that the consumers have not acknowledged: undelivered, delayed or
    in-flight."""

    dead_again: int
    """Number of messages that were dead-lettered again."""

    causes: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """The 20 most frequent causes of the messages that are dead again."""

    settled: bool
    """True if no message waits."""


class RunApproval(StatusModel):
    """Approval that a run requires, because it moves more messages than allowed without one."""

    messages: int
    """Number of messages that the run moves in total. A ReplayApproval must have at least as
    many."""

    approved_time: Timestamp | None = None
    """Time at which its ReplayApproval was created. Absent while the run waits for one."""

    approved_by: Annotated[str, Field(max_length=MAX_SHOWN)] | None = None
    """Its annotation `redrive.io/requested-by`, which the command line writes. The admission policy
    of the chart refuses other names than the caller's."""


class PartitionEnd(StatusModel):
    """Last entry of a partition that a plan has read."""

    partition: int
    """Index of the partition of the dead-letter topic, -1 for a topic without partitions."""

    entry: Annotated[str, Field(max_length=64, pattern=r"^\d{1,19}:\d{1,19}$")]
    """Id of the entry, as `ledger:entry`."""


class RunReview(StatusModel):
    """Review of a plan; the run has moved nothing yet."""

    expiry_time: Timestamp
    """Time at which the Replay ends unless `spec.mode` is `Run` by then."""

    ends: Annotated[tuple[PartitionEnd, ...], Field(max_length=_MAX_ENDS)] = ()
    """Last entries of the plan. Later messages, and those in other partitions, are not moved. Empty
    for a RocketMQRetryPolicy, whose ledger has the plan."""


_MAX_REASON, _MAX_ERROR = 128, 1_024


class JobFailure(StatusModel):
    """Error of a job that ended before its run."""

    reason: Annotated[str, Field(max_length=_MAX_REASON)]
    """Reason, as one word."""

    message: Annotated[str, Field(max_length=_MAX_ERROR)]
    """The error of the job."""

    @classmethod
    def of(cls, reason: str, message: str) -> Self:
        """Return the failure, with texts that are cut to the length of the fields."""
        return cls(reason=reason[:_MAX_REASON], message=message[:_MAX_ERROR])


class LenientStatus(StatusModel):
    """Status that others may write, too: an invalid field counts as absent.

    The API server accepts values that cannot be parsed, such as times in the year 0.
    """

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(
        cls, value: object, read: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        try:
            return read(value)
        except ValidationError:
            return cls.model_fields[str(info.field_name)].get_default(call_default_factory=True)


class RunCounts(LenientStatus):
    """Numbers of messages: `matched` = moved + skipped + refused + discarded + left."""

    scanned: int | None = None
    """Dead letters in the topic when the run was planned, limited by `select.ids` and
    `select.limit`. During the plan: dead letters read so far."""

    matched: int | None = None
    """Selected dead letters. If all are selected, an entry of the topic that was not read yet
    counts as one message."""

    unevaluated: int | None = None
    """Scanned messages that were not selected because `select.where` cannot be computed for them,
    for example if it compares text with a number. They remain in the dead-letter topic."""

    moved: int | None = None
    """Selected messages that were stored in the target and acknowledged."""

    skipped: int | None = None
    """Selected messages that needed no move: another Replay moved them, or other clients
    acknowledged them after the run was planned."""

    refused: int | None = None
    """Selected messages that cannot be moved. They remain in the dead-letter topic."""

    discarded: int | None = None
    """Selected messages that were acknowledged without being moved, because no client can read them
    and `confirmations` has `DiscardUnreadable`."""

    left: int | None = None
    """Selected messages that are not settled yet. Of a plan: messages that would be moved."""

    doubled: int | None = None
    """Messages in moved that the target may contain twice: a run found two copies of them, or moved
    them although the target no longer contained all messages since the plan of an interrupted run.
    0 means none. Absent for a RetryPolicy."""

    batched: int | None = None
    """Messages in moved and left that producers stored in batches. A consumer of the dead-letter
    topic may have acknowledged some of them individually. The broker reports acknowledgements of
    whole batches only, so these messages are moved and handled again. 0 means none."""


WHILE_RUNNING = frozenset(
    {
        "ratePerMinute",
        "remaining",
        "suspended",
        "suspendedTime",
        "fullTopic",
        "unsubscribedTopic",
    }
)
"""Fields of `status.run` that are absent after the run."""


class ReplayRun(LenientStatus):
    """Progress of the run. The job writes it, by server-side apply."""

    counts: RunCounts = RunCounts()
    """Numbers of messages."""

    progress: Annotated[str, Field(max_length=64)] | None = None
    """Settled and selected messages. Example: `112/120`."""

    rate_per_minute: int | None = None
    """Messages moved per minute, measured over the last half minute. Absent while it is unknown,
    and at the end."""

    remaining: Annotated[str, Field(max_length=32)] | None = None
    """Estimated time to the end at that rate. Example: `1h30m`."""

    refusals: Annotated[tuple[Refusal, ...] | None, Field(max_length=100)] = None
    """The first 100 refused entries. The ledger contains all of them, see docs/howto/audit.md."""

    preview: Preview | None = None
    """Result of a plan or a review, and of its scan so far while it runs."""

    review: RunReview | None = None
    """Review of the plan in `preview`, with `spec.mode: Review`. Absent once the run moves
    messages."""

    outcome: RunOutcome | None = None
    """Outcome of the moved messages, with `spec.followFor`."""

    audit: AuditResult | None = None
    """Result of an audit."""

    suspended: bool | None = None
    """True while the run sends nothing, because of `spec.suspend` or a missing approval."""

    suspended_time: Timestamp | None = None
    """Time since which the run is suspended. Before it sends to another topic than the retry topic
    again, the operator checks that topic."""

    skipped_records: int | None = None
    """Number of invalid records in the ledger topic that the job skipped: another client wrote
    there. Absent without any."""

    approval: RunApproval | None = None
    """Approval of the run. Absent if none is required."""

    full_topic: Annotated[str, Field(max_length=MAX_TOPIC)] | None = None
    """Topic that exceeds its backlog quota; the run waits for its consumers."""

    unsubscribed_topic: Annotated[str, Field(max_length=MAX_TOPIC)] | None = None
    """Target that lacks the subscription that has to keep messages, itself or in one of its
    partitions; the run waits for it."""

    finished: bool | None = None
    """True once no selected message is left. The job may still read the outcome of the moved
    messages."""

    failure: JobFailure | None = None
    """Error of the last job that ended before its run."""

    fencing_token: (
        Annotated[str, Field(max_length=64, pattern=r"^-?\d{1,19}:-?\d{1,19}$")] | None
    ) = None
    """Position of the last run in the ledger, as `ledger:entry`. A run with a lower position no
    longer writes the status."""

    @property
    def awaits_approval(self) -> bool:
        """Return True while the run waits for a ReplayApproval."""
        approval = self.approval
        return bool(self.suspended and approval and approval.approved_time is None)


class ReplayStatus(LenientStatus):
    """State of the Replay. The operator writes all of it except `run`, which the job writes."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status describes."""

    warnings: WarningTypes | None = None
    """Types of the conditions that warn. Absent without any."""

    phase: Phase | None = None
    """Summary for people; programs should read `conditions`. Pending, Submitted, Running,
    Suspended, Completed or Failed; the last two are final."""

    run: ReplayRun = ReplayRun()
    """Progress of the run, written by its job."""

    engine: ReplayEngine | None = None
    """Engine of the run, Job or Spark. Chosen at the launch, and immutable then."""

    spark_application: str | None = None
    """SparkApplication of the run, in the same namespace."""

    job: str | None = None
    """Kubernetes Job of the run, in the same namespace."""

    start_time: Timestamp | None = None
    """Time at which the job was launched."""

    completion_time: Timestamp | None = None
    """Time at which the run reached its final phase."""

    conditions: Conditions = ()
    """`Ready`: the run is complete. An ended Replay has exactly one of `Complete` and `Failed`.
    Others are present only while true: `Reconciling`, `Stalled`, `Suspended`, `InReview`,
    `ApprovalRequired` and `MessagesRefused`."""

    @classmethod
    def of(cls, replay: Mapping[str, Any]) -> Self:
        """Parse the status of *replay*."""
        return cls.model_validate(replay.get("status") or {})

    def is_past(self, deadline: str | None, now: datetime) -> bool:
        """Return True if the job was launched at least *deadline* before *now*."""
        if deadline is None or self.start_time is None:  # not written by the operator yet
            return False
        return now - self.start_time >= parse_duration(deadline)


ADMITTED = "redrive.io/admitted"
"""Annotation of a Replay that may move messages: its uid, so that a copy of the Replay has to be
admitted again."""


CHECKED = "redrive.io/target-checked"
"""Annotation of a Replay whose target was checked after a suspension: the `suspendedTime` of that
suspension."""


def is_checked(replay: Mapping[str, Any], suspended_time: datetime) -> bool:
    """Return True if the target was checked after the suspension that began at that time."""
    annotations = replay["metadata"].get("annotations") or {}
    return bool(annotations.get(CHECKED) == written(suspended_time))


def is_admitted(replay: Mapping[str, Any]) -> bool:
    """Return True if *replay* may move messages. A Replay in review may not."""
    metadata = replay["metadata"]
    admitted = (metadata.get("annotations") or {}).get(ADMITTED)
    return bool(admitted == metadata["uid"] and replay["spec"].get("mode") != Mode.REVIEW)
