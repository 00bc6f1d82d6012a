"""The kind Replay: its spec, its selection, and its status.

Replay: one run that moves dead letters back to be processed again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from redrive.api.conditions import Conditions, Timestamp, WarningTypes
from redrive.api.job import ReplayJobTemplate
from redrive.api.model import (
    MAX_TOPIC,
    QUOTED,
    SET,
    VALIDATIONS,
    ApiModel,
    Form,
    ObjectName,
    Rule,
    StatusModel,
    TopicField,
    TypedUnion,
    of_its_type,
    one_of,
    refusing,
)
from redrive.api.policy_defaults import IS_DURATION, SECONDS, WRITTEN, bounded_duration
from redrive.errors import InvalidSpecError
from redrive.policy.envelope import MAX_CAUSE
from redrive.policy.naming import TopicName
from redrive.policy.values import check_duration, parse_duration

# All of a selection is one argument of a process, which holds 128 KiB.
_MAX_IDS = 500
_MAX_KEYS = 64
_MAX_CAUSES = 32
_MAX_FINGERPRINTS = 64
_MAX_ENDS = 1024

_WINDOW = Rule(
    "!has(self.since) || !has(self.until) || self.since < self.until",
    "a selection begins before it ends",
    "have since lie before until",
)

LetterId = Annotated[
    str,
    Field(max_length=64),
    Form(
        r"\d{1,18}:\d{1,18}(:-?\d{1,9}){0,2}",
        "the id of a message is written ledger:entry, ledger:entry:partition or "
        "ledger:entry:partition:index",
        "write it as a plan shows it",
    ),
]


Fingerprint = Annotated[
    str,
    Field(max_length=16),
    Form(
        r"[0-9a-f]{16}",
        "a fingerprint must be 16 hexadecimal digits",
        "copy it from the property REDRIVE_CAUSE_FINGERPRINT of a dead letter",
    ),
]


def _moment(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise InvalidSpecError(
            "there is no such moment", got=text, remedy="write one like 2026-11-20T10:00:00Z"
        ) from None
    return text


Moment = Annotated[
    str,
    Field(max_length=32, json_schema_extra={"format": "date-time"}),
    Form(
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}([.]\d{1,3})?(Z|[+-]\d{2}:\d{2})",
        "a moment is written with its date, its time and its offset",
        "write one like 2026-11-20T10:00:00Z",
    ),
    AfterValidator(refusing(_moment)),
]


class Selection(ApiModel):
    """Selection of dead letters: all fields that are given must hold for a message."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_WINDOW.to_schema()]})

    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Condition in SQL over the columns of a dead letter, which must be true, 1 to 4096 characters.
    Defaults to none. Example: `cause_type = 'TimeoutError'`."""

    ids: (
        Annotated[
            tuple[LetterId, ...], Field(min_length=1, max_length=_MAX_IDS, json_schema_extra=SET)
        ]
        | None
    ) = None
    """Message ids, as `ledger:entry:partition:index`; without an index, or with -1, all messages of
    the entry. 1 to 500 ids. Defaults to any. Example: `4711:3:0:0`."""

    keys: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1, max_length=128)], ...],
            Field(min_length=1, max_length=_MAX_KEYS, json_schema_extra=SET),
        ]
        | None
    ) = None
    """Message keys, 1 to 64. Defaults to any. Example: `order-17`."""

    causes: (
        Annotated[
            tuple[Annotated[str, Field(max_length=MAX_CAUSE)], ...],
            Field(min_length=1, max_length=_MAX_CAUSES, json_schema_extra=SET),
        ]
        | None
    ) = None
    """Cause of a dead letter, as a plan shows it: class of the exception, of which the first 256
    characters count. An empty text selects dead letters without a cause, such as those of Java
    consumers. 1 to 32 causes. Defaults to any. Example: `WarehouseDown`."""

    fingerprints: (
        Annotated[
            tuple[Fingerprint, ...],
            Field(min_length=1, max_length=_MAX_FINGERPRINTS, json_schema_extra=SET),
        ]
        | None
    ) = None
    """Fingerprint of the cause of a dead letter, which is the same for failures of one kind: its
    property `REDRIVE_CAUSE_FINGERPRINT`. 1 to 64 fingerprints. Defaults to any. Example:
    `0f4a9c31d2be7755`."""

    since: Moment | None = None
    """First moment at which messages came to the dead-letter topic, by the clock of their producer.
    Defaults to any. Example: `2026-11-20T10:00:00Z`."""

    until: Moment | None = None
    """Moment before which messages came there. Defaults to any. Example: `2026-11-21T10:00:00Z`."""

    limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Number of messages, 1 to 1000000000: the first ones by partition and position. A batch that
    would exceed it ends the selection, except the first batch, which is selected as a whole.
    Defaults to all. Example: `10000`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(Selection._check_parts)(self)
        return self

    def _check_parts(self) -> None:
        since, until = milliseconds(self.since), milliseconds(self.until)
        if since is not None and until is not None and since >= until:
            raise InvalidSpecError(_WINDOW.problem, got=self.since, remedy=_WINDOW.remedy)


def milliseconds(moment: str | None) -> int | None:
    """Return a `Moment` in milliseconds since 1970."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1_000)


Duration = Annotated[
    str,
    Field(max_length=40),
    IS_DURATION,
    Rule(
        f"!({WRITTEN}) || {SECONDS} >= 1",
        "a duration must be at least 1s",
        "raise it, or leave it out",
        got=QUOTED,
    ),
    AfterValidator(refusing(check_duration)),
]

_FIXED = (
    "policyRef", "startBefore", "select", "maxReplays", "reason", "ticket", "confirmations",
    "jobTemplate", "target", "guarantee", "followFor", "sending", "engine",
)  # fmt: skip
_ONE_RUN = Rule(
    " && ".join(
        f"(present(self.{field}) ? present(oldSelf.{field}) && self.{field} == oldSelf.{field}"
        f" : !present(oldSelf.{field}))"
        for field in _FIXED
    ),
    "the spec of a Replay can't change, except suspend, cancel, rateLimit, deadline, "
    "ttlAfterFinished and mode Review: it is one run, like a Job",
    "make another Replay",
)


# Written out: a client that drops the field must confirm nothing.
_CONFIRMED = Rule(
    "(has(self.mode) ? has(oldSelf.mode) && self.mode == oldSelf.mode : !has(oldSelf.mode)) || "
    "(has(self.mode) && self.mode == 'Run' && has(oldSelf.mode) && oldSelf.mode == 'Review')",
    "`mode` can't change, except from Review to Run",
    "make another Replay",
)


_CANCELED = Rule(
    "!(has(oldSelf.cancel) && oldSelf.cancel) || (has(self.cancel) && self.cancel)",
    "`cancel` can't change back to false",
    "make another Replay",
)


_FOLLOWED = Rule(
    "!has(self.followFor) || !((has(self.mode) && self.mode == 'Plan') "
    "|| (present(self.target.type) && self.target.type == 'Topic'))",
    "followFor is for messages that come to the policy's own consumers: not for target Topic, "
    "and not for a plan",
    "leave followFor out",
)


class Target(enum.StrEnum):
    """Where dead letters are moved."""

    RETRY = "Retry"
    SOURCE = "Source"
    TOPIC = "Topic"


class Mode(enum.StrEnum):
    """Effect of a Replay: messages are moved, only counted, or counted first."""

    RUN = "Run"
    PLAN = "Plan"
    REVIEW = "Review"


class ReplayEngine(enum.StrEnum):
    """Kind of workload that runs a Replay."""

    AUTO = "Auto"
    JOB = "Job"
    SPARK = "Spark"


class Sending(enum.StrEnum):
    """Form in which messages are sent to the target."""

    INDIVIDUAL = "Individual"
    BATCHED = "Batched"


class Guarantee(enum.StrEnum):
    """How often a message that is moved may come to be in the target."""

    EXACTLY_ONCE = "ExactlyOnce"
    AT_LEAST_ONCE = "AtLeastOnce"


class Confirmation(enum.StrEnum):
    """What a Replay does only where its author says so."""

    RECONCILED = "Reconciled"
    DISCARD_UNREADABLE = "DiscardUnreadable"
    UNPROVEN_HANDLED = "UnprovenHandled"


class PolicyRef(ApiModel):
    """Names a RetryPolicy of the same namespace."""

    name: ObjectName
    """Name of the RetryPolicy."""


Period = Annotated[
    str,
    *bounded_duration(
        1,
        10,
        "`per` of a rate must be from 1s to 10s",
        "choose a duration within these bounds, and fewer messages",
    ),
]


class ReplayRate(ApiModel):
    """Limit of the messages that all tasks of a run send together."""

    messages: Annotated[int, Strict(), Field(ge=1, le=1_000_000)]
    """Number of messages in a period, 1 to 1000000. Example: `500`."""

    per: Period = "1s"
    """Length of the period, 1s to 10s. Defaults to 1s."""

    @property
    def per_second(self) -> float:
        """Return the number of messages in a second."""
        return self.messages / parse_duration(self.per).total_seconds()


class ReplayTarget(TypedUnion):
    """The topic that dead letters are moved to."""

    MEMBERS = {Target.TOPIC.value: "topic"}  # noqa: RUF012  never changed
    RULE = of_its_type("target", MEMBERS)
    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [RULE.to_schema()]})

    type: Annotated[
        Target,
        *one_of(
            Target,
            "`type` of `target` must be Retry, Source or Topic",
            "use one of Retry, Source, Topic",
        ),
    ]
    """`Retry`: the retry topic, for the subscription of the policy alone. `Source`: the source
    topic, for each of its subscriptions. `Topic`: the topic of the field `topic`."""

    topic: TopicField | None = None
    """Full name of the target, among the topics that the connection allows. It must exist, and must
    not be a retry, dead-letter or ledger topic of another policy."""


class ReplaySpec(ApiModel):
    """One run that moves dead letters.

    Immutable, except `suspend`, `cancel`, `rateLimit`, `deadline` and `ttlAfterFinished`, and
    `mode` from `Review` to `Run`.
    """

    model_config = ConfigDict(
        json_schema_extra={
            VALIDATIONS: [rule.to_schema() for rule in (_ONE_RUN, _CONFIRMED, _CANCELED, _FOLLOWED)]
        }
    )

    policy_ref: PolicyRef
    """The RetryPolicy, in the same namespace, whose dead letters are moved."""

    start_before: Moment | None = None
    """Time before which the run must be launched; a Replay that was not launched by then is Failed.
    So a copy of a Replay, from Git or a backup, moves nothing later. Defaults to no limit. Example:
    `2026-11-27T00:00:00Z`."""

    select: Selection | None = None
    """Dead letters to move. Defaults to all that are there when the run begins."""

    target: ReplayTarget = ReplayTarget(type=Target.RETRY)
    """The topic that dead letters are moved to. Defaults to the retry topic."""

    guarantee: Annotated[
        Guarantee,
        *one_of(
            Guarantee,
            "guarantee says how often a message may come to be in the target",
            "use one of ExactlyOnce, AtLeastOnce",
        ),
    ] = Guarantee.EXACTLY_ONCE
    """`ExactlyOnce` refuses a target that does not deduplicate, and messages of which it is not
    known whether they are stored. `AtLeastOnce` moves them. Defaults to ExactlyOnce."""

    max_replays: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] | None = None
    """Number of Replays that may move a message, this one included, 1 to 1000000. A message that
    was replayed as often is refused, and stays. Defaults to no limit. Example: `3`."""

    mode: Annotated[
        Mode,
        *one_of(Mode, "`mode` must be Run, Plan or Review", "use one of Run, Plan, Review"),
    ] = Mode.RUN
    """`Run`: messages are moved. `Plan`: they are counted, `status.run.preview` shows the result,
    and nothing is moved; other Replays of the policy run at the same time. `Review`: likewise, and
    then the run waits until `mode` is set to `Run`. Then it moves the messages that it has counted,
    and none that came later. It ends after 15 minutes without that. Defaults to Run."""

    suspend: Annotated[bool, Strict()] = False
    """`true` suspends the run: in-flight messages are settled, the account is written, and no more
    messages are sent until it is false. It can change at any time. Defaults to false."""

    rate_limit: ReplayRate | None = None
    """Limit of the messages that the run sends. It can change at any time; a run applies it within
    seconds. Defaults to no limit."""

    cancel: Annotated[bool, Strict()] = False
    """`true` ends the run: in-flight messages are settled, and the Replay is Failed with reason
    `Canceled`. Messages that were moved stay moved. Can't be taken back. Defaults to false."""

    sending: Annotated[
        Sending,
        *one_of(
            Sending,
            "`sending` must be Individual or Batched",
            "use one of Individual, Batched",
        ),
    ] = Sending.INDIVIDUAL
    """`Batched`: messages are sent in batches, which is faster and costs the broker less. A
    consumer receives a batch as a whole, and again as a whole if it ends, or returns one message,
    before all are acknowledged. Refused for a source topic that is read by key. Defaults to
    Individual."""

    deadline: Duration | None = None
    """Time limit of the run from its launch, including the time in which it is suspended. After it
    the run drains and is Failed. At least 1s. Defaults to no limit. Example: `2h`."""

    ttl_after_finished: Duration | None = None
    """Time after its end when the Replay is deleted, with its job and pods. At least 1s. It can
    change at any time. Defaults to no deletion. Example: `7d`."""

    follow_for: Duration | None = None
    """Time after the last move for which the run reads the outcome of the messages
    (`status.run.outcome`). It ends earlier once all of them are settled; its driver runs until
    then. At least 1s. Defaults to none: the run ends when all is moved. Example: `15m`."""

    reason: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Reason of the Replay for later readers, 1 to 1024 characters. It is in Events and in the
    ledger, too. Defaults to none. Example: `the warehouse is up again`."""

    ticket: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Ticket of the decision, 1 to 256 characters. Defaults to none. Example: `OPS-1432`."""

    confirmations: (
        Annotated[
            tuple[
                Annotated[
                    Confirmation,
                    *one_of(
                        Confirmation,
                        "`confirmations` must be a list of Reconciled, DiscardUnreadable and "
                        "UnprovenHandled",
                        "use one of Reconciled, DiscardUnreadable, UnprovenHandled",
                    ),
                ],
                ...,
            ],
            Field(min_length=1, max_length=len(Confirmation), json_schema_extra=SET),
        ]
        | None
    ) = None
    """Actions and facts that the author confirms. `Reconciled`: the effects of the first handling
    of these messages were reconciled, which policies with `replay.safety: ReconcileFirst` require.
    `DiscardUnreadable`: selected entries that no client can show, such as chunks of a message whose
    producer was killed, are acknowledged and lost; without it they are refused as `NotDelivered`,
    and stay. `UnprovenHandled`: selected messages that an earlier run may have moved were handled;
    they are acknowledged, not sent, and count as skipped. Without it they are refused as
    `Unproven`, and stay. Defaults to none."""

    engine: Annotated[
        ReplayEngine,
        *one_of(ReplayEngine, "`engine` must be Auto, Job or Spark", "use one of Auto, Job, Spark"),
    ] = ReplayEngine.AUTO
    """`Job`: a Kubernetes Job of one pod, which needs no Spark operator and starts within seconds.
    `Spark`: a SparkApplication with executors. `Auto`: `Job` up to 10000 dead letters, counted by
    `select.ids`, `select.limit` or the last statistics of the policy, and where no Spark operator
    is installed; else `Spark`. The result is the same. Defaults to Auto."""

    job_template: ReplayJobTemplate | None = None
    """Job template of its pods, and number of executors. Defaults to the template and the number of
    the BrokerConnection."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(ReplaySpec._check_followed)(self)
        return self

    def _check_followed(self) -> None:
        if self.follow_for is not None and (self.is_plan or self.target.type is Target.TOPIC):
            raise InvalidSpecError(_FOLLOWED.problem, remedy=_FOLLOWED.remedy)

    @property
    def is_plan(self) -> bool:
        """Return True if nothing is moved."""
        return self.mode is Mode.PLAN

    def confirms(self, confirmation: Confirmation) -> bool:
        """Return True if the author confirms it."""
        return confirmation in (self.confirmations or ())

    def target_topic(self, source: TopicName) -> TopicName | None:
        """Return the target by its name; None for the retry topic.

        Args:
            source: the source topic of the policy.
        """
        return source if self.target.type is Target.SOURCE else self.target.topic


class ReplayRef(ApiModel):
    """Names one Replay of the same namespace."""

    name: ObjectName
    """Name of the Replay, and of the ReplayApproval."""

    uid: Annotated[
        str,
        Field(max_length=64),
        Form(
            r"[-0-9a-zA-Z]+",
            "the uid of a Replay must be letters, digits and '-'",
            "take it from `metadata.uid` of the Replay",
        ),
    ]
    """`metadata.uid` of the Replay: another Replay of this name needs another approval."""


_SAME_APPROVAL = Rule(
    "self == oldSelf",
    "the spec of a ReplayApproval can't change",
    "delete it, and create another one",
)


class ReplayApprovalSpec(ApiModel):
    """Approval of one Replay, up to a number of messages. Immutable."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_SAME_APPROVAL.to_schema()]})

    replay_ref: ReplayRef
    """The Replay that is approved."""

    messages: Annotated[int, Strict(), Field(ge=1, le=1_000_000_000)]
    """Number of messages that the Replay may move, 1 to 1000000000. A plan of more messages needs
    another approval. Example: `1200`."""


class Phase(enum.StrEnum):
    """The phase of a replay; Completed and Failed are final."""

    PENDING = "Pending"
    SUBMITTED = "Submitted"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"
    FAILED = "Failed"


FINAL = frozenset({Phase.COMPLETED, Phase.FAILED})


class Refusal(StatusModel):
    """An entry of the dead-letter topic that was selected and can't be moved."""

    entry: Annotated[str, Field(max_length=64)]
    """Id of the entry, as `ledger:entry`."""

    messages: int
    """Number of selected messages in it."""

    cause: Annotated[str, Field(max_length=64)]
    """Cause of the refusal: Encrypted, UnreadableProperties, PartOfBatch, BatchTooLarge,
    SchemaNotFound, SchemaUnsupported, SchemaRefused, ReplayedTooOften, ContentTooLarge, TooBig,
    NotAccepted, NotDelivered or Unproven."""


class Count(StatusModel):
    """Number of messages with one cause."""

    cause: Annotated[str, Field(max_length=MAX_CAUSE)]
    """Class of the exception for which a message was dead-lettered, empty without one; or reason
    for which it can't be moved."""

    messages: int
    """Number of messages."""


class Preview(StatusModel):
    """Result of a plan."""

    causes: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """The 20 most frequent causes of the messages that would be moved."""

    refused: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """Reasons for which others can't be moved; `refusals` lists these messages."""

    samples: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=10)] = ()
    """Ids of some messages that would be moved, as `ledger:entry:partition:index`; partition -1
    stands for none."""

    estimated_seconds: int | None = None
    """Estimated seconds of the run, without the start of Spark. Known once all is scanned."""


class RunOutcome(StatusModel):
    """Outcome of the messages that were moved: `moved` = handled + waiting + deadAgain.

    Consumers that were killed may have left copies, which count as well.
    """

    observed_time: Timestamp
    """Time at which the topics were read."""

    handled: int
    """Number of messages that were handled or expired: they neither wait nor are dead again."""

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
    """Approval that a run requires, because it moves more messages than it may without one."""

    messages: int
    """Number of messages that the run moves in all. A ReplayApproval must have at least as many."""

    approved_time: Timestamp | None = None
    """Time at which its ReplayApproval was created. Absent while the run waits for one."""


class PartitionEnd(StatusModel):
    """Last entry of one partition that a plan has read."""

    partition: int
    """Index of the partition of the dead-letter topic, -1 for a topic without partitions."""

    entry: Annotated[str, Field(max_length=64, pattern=r"^\d{1,19}:\d{1,19}$")]
    """Id of the entry, as `ledger:entry`."""


class RunReview(StatusModel):
    """Review of a run that has moved nothing yet."""

    expiry_time: Timestamp
    """Time at which the Replay ends unless `spec.mode` is `Run` by then."""

    ends: Annotated[tuple[PartitionEnd, ...], Field(max_length=_MAX_ENDS)] = ()
    """Last entries of the plan. Messages behind them, and in other partitions, came later and are
    not moved."""


class JobFailure(StatusModel):
    """Error of a job that ended before its run."""

    reason: Annotated[str, Field(max_length=128)]
    """Reason, in one word."""

    message: Annotated[str, Field(max_length=1024)]
    """The error of the job."""


class LenientStatus(StatusModel):
    """A status that others may write too: a field that can't be read counts as absent.

    The API server lets more pass than can be read, such as times in the year 0.
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
    """Dead letters in the topic when the run was planned: of those that `select.ids` names, and up
    to the last one that `select.limit` admits. During the plan: those that were read so far."""

    matched: int | None = None
    """Selected dead letters. Where all are selected, an entry of the topic that was not read yet
    counts as one message, whatever it holds."""

    unevaluated: int | None = None
    """Scanned messages that were not selected because `select.where` can't be computed for them,
    such as where it compares a text that is no number with a number. They stay where they are."""

    moved: int | None = None
    """Selected messages that were stored in the target and acknowledged."""

    skipped: int | None = None
    """Selected messages that needed no move: another Replay moved them, or other clients
    acknowledged them after the run was planned."""

    refused: int | None = None
    """Selected messages that can't be moved. They stay where they are."""

    discarded: int | None = None
    """Selected messages that were acknowledged without being moved, because no client can show them
    and `confirmations` has `DiscardUnreadable`."""

    left: int | None = None
    """Selected messages that are not settled yet. Of a plan: messages that would be moved."""

    batched: int | None = None
    """Messages in moved and left that producers stored in batches. A consumer of the dead-letter
    topic may have acknowledged some of them one by one. The broker shows acknowledgements of whole
    batches only, so these messages are moved and handled again. 0 means that there are none."""


WHILE_RUNNING = frozenset(
    {
        "ratePerMinute",
        "remaining",
        "suspended",
        "fullTopic",
        "unsubscribedTopic",
    }
)
"""Fields of `status.run` that are absent once the run has ended."""


class ReplayRun(LenientStatus):
    """Progress of the run. The job writes it, by server-side apply."""

    counts: RunCounts = RunCounts()
    """Numbers of messages."""

    progress: Annotated[str, Field(max_length=64)] | None = None
    """Settled and selected messages. Example: `112/120`."""

    rate_per_minute: int | None = None
    """Messages moved in a minute, measured over the last half minute. Absent while it is not known,
    and at the end."""

    remaining: Annotated[str, Field(max_length=32)] | None = None
    """Estimated time to the end at that rate. Example: `1h30m`."""

    refusals: Annotated[tuple[Refusal, ...] | None, Field(max_length=100)] = None
    """The first 100 refused entries; `python -m redrive.replay.refused` lists all."""

    preview: Preview | None = None
    """Result of a plan or a review, and of its scan so far while it runs."""

    review: RunReview | None = None
    """Review of the plan in `preview`, with `spec.mode: Review`. Absent once the run has begun to
    move messages."""

    outcome: RunOutcome | None = None
    """Outcome of the messages that were moved, with `spec.followFor`."""

    suspended: bool | None = None
    """True while the run sends nothing, because of `spec.suspend` or a missing approval."""

    skipped_records: int | None = None
    """Number of messages in the ledger topic that the job skipped when it began, because they are
    no valid records: someone else wrote there. Absent without any."""

    approval: RunApproval | None = None
    """Approval of the run. Absent while none is required."""

    full_topic: Annotated[str, Field(max_length=MAX_TOPIC)] | None = None
    """Topic that is over its backlog quota; the run waits for its consumers."""

    unsubscribed_topic: Annotated[str, Field(max_length=MAX_TOPIC)] | None = None
    """Target that keeps no message, because it, or one of its partitions, has no durable
    subscription; the run waits for one."""

    finished: bool | None = None
    """True once no selected message is left. The job may still read the outcome of the messages
    that it moved."""

    failure: JobFailure | None = None
    """Error of the last job that ended before its run."""

    fencing_token: (
        Annotated[str, Field(max_length=64, pattern=r"^-?\d{1,19}:-?\d{1,19}$")] | None
    ) = None
    """Position of the last run in the ledger, as `ledger:entry`. A run with a lower position does
    not write the status any more."""

    @property
    def awaits_approval(self) -> bool:
        """Return True while the run waits for a ReplayApproval."""
        approval = self.approval
        return bool(self.suspended and approval and approval.approved_time is None)


class ReplayStatus(LenientStatus):
    """State of the Replay. The operator writes all of it except `run`, which the job writes."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    warnings: WarningTypes | None = None
    """Types of the conditions that need attention. Absent without any."""

    phase: Phase | None = None
    """Summary for people, while programs read `conditions`: Pending, Submitted, Running, Suspended,
    Completed or Failed; the last two are final."""

    run: ReplayRun = ReplayRun()
    """Progress of the run, written by its job."""

    engine: ReplayEngine | None = None
    """Engine of the run, Job or Spark. Chosen at the launch, and never changed."""

    spark_application: str | None = None
    """The SparkApplication, in the same namespace, that does the work."""

    job: str | None = None
    """The Kubernetes Job, in the same namespace, that does the work."""

    start_time: Timestamp | None = None
    """Time at which the job was launched."""

    completion_time: Timestamp | None = None
    """Time at which the run reached its final phase."""

    conditions: Conditions = ()
    """`Ready`: the run is complete. An ended Replay has exactly one of `Complete` and `Failed`. All
    others are there only while true: `Reconciling`, `Stalled`, `Suspended`, `InReview`,
    `ApprovalRequired` and `MessagesRefused`."""

    @classmethod
    def of(cls, replay: Mapping[str, Any]) -> Self:
        """Read the status of *replay*."""
        return cls.model_validate(replay.get("status") or {})

    def is_past(self, deadline: str | None, now: datetime) -> bool:
        """Return True if the job was launched at least *deadline* before *now*."""
        if deadline is None or self.start_time is None:  # the operator is about to write it
            return False
        return now - self.start_time >= parse_duration(deadline)


ADMITTED = "redrive.io/admitted"
"""Annotation of a Replay that may move messages: its uid, so that a copy of the Replay has to be
admitted again."""


def is_admitted(replay: Mapping[str, Any]) -> bool:
    """Return True if it is the turn of *replay* to move messages; a Replay in review has none."""
    metadata = replay["metadata"]
    admitted = (metadata.get("annotations") or {}).get(ADMITTED)
    return bool(admitted == metadata["uid"] and replay["spec"].get("mode") != Mode.REVIEW)
