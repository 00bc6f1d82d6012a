"""The kind Replay: its spec, its selection, and its status.

Which dead letters a Replay is about.

Replay: one run that moves dead letters back to be processed again.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, Strict, ValidationError, model_validator

from redrive.api.conditions import Conditions, Timestamp, WarningTypes
from redrive.api.job import JobRequest
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
from redrive.policy.naming import TopicName
from redrive.policy.values import check_duration, parse_duration

# All of a selection is one argument of a process, which holds 128 KiB.
_MAX_IDS = 500
_MAX_KEYS = 64

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
    """Which dead letters a replay moves: those for which all holds that is given."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_WINDOW.to_schema()]})

    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A condition in SQL over the columns of a dead letter, which is true for it.
    Example: `cause_type = 'TimeoutError'`."""

    ids: (
        Annotated[
            tuple[LetterId, ...], Field(min_length=1, max_length=_MAX_IDS, json_schema_extra=SET)
        ]
        | None
    ) = None
    """Its id is one of these, as `ledger:entry:partition:index`; without an index, or with -1, all
    messages of the entry. Example: `4711:3:0:0`."""

    keys: (
        Annotated[
            tuple[Annotated[str, Field(min_length=1, max_length=128)], ...],
            Field(min_length=1, max_length=_MAX_KEYS, json_schema_extra=SET),
        ]
        | None
    ) = None
    """Its key is one of these."""

    since: Moment | None = None
    """It came to the dead-letter topic at this moment or later, by the clock of its producer.
    Example: `2026-11-20T10:00:00Z`."""

    until: Moment | None = None
    """It came there before this moment."""

    limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """At most so many, the first ones by partition and position. A batch that has no room among
    them ends the selection."""

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
    "policyRef", "startBefore", "select", "maxReplays", "mode", "rateLimit", "reason", "ticket",
    "confirmations", "job", "target", "guarantee", "followFor", "sending",
)  # fmt: skip
_ONE_RUN = Rule(
    " && ".join(
        f"(present(self.{field}) ? present(oldSelf.{field}) && self.{field} == oldSelf.{field}"
        f" : !present(oldSelf.{field}))"
        for field in _FIXED
    ),
    "the spec of a Replay can't change, except suspend, cancel, deadline and ttlAfterFinished: "
    "it is one run, like a Job",
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
    """Effect of a Replay: messages are moved, or only counted."""

    RUN = "Run"
    PLAN = "Plan"


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

    Immutable, except `suspend`, `cancel`, `deadline` and `ttlAfterFinished`.
    """

    model_config = ConfigDict(
        json_schema_extra={
            VALIDATIONS: [rule.to_schema() for rule in (_ONE_RUN, _CANCELED, _FOLLOWED)]
        }
    )

    policy_ref: PolicyRef
    """The RetryPolicy, in the same namespace, whose dead letters are moved."""

    start_before: Moment | None = None
    """Time before which the run must be launched; a Replay that was not launched by then is Failed.
    So a copy of a Replay, from Git or a backup, moves nothing later. Defaults to no limit. Example:
    `2026-11-27T00:00:00Z`."""

    select: Selection | None = None
    """Which dead letters to move. Left out: all that are there when the run begins."""

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
    """How often a message may be replayed, this time included; one that was replayed so often
    before is refused, and stays. Left out: without end. Example: `3`."""

    mode: Annotated[Mode, *one_of(Mode, "`mode` must be Run or Plan", "use one of Run, Plan")] = (
        Mode.RUN
    )
    """`Run`: messages are moved. `Plan`: they are counted, `status.preview` shows the result, and
    nothing is moved; other Replays of the policy run at the same time. Defaults to Run."""

    suspend: Annotated[bool, Strict()] = False
    """`true` suspends the run: in-flight messages are settled, the account is written, and no more
    messages are sent until it is false. It can change at any time. Defaults to false."""

    rate_limit: ReplayRate | None = None
    """How fast to move messages. Left out: as fast as the broker takes them."""

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
    """How long to look, once all is moved, at what becomes of it: see `status.aftermath`. The run
    has its end when all is settled, or this time is over; its driver stays until then. Left out: it
    ends when all is moved. Example: `15m`."""

    reason: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Why these messages are replayed, for whoever asks later; in Events and in the ledger too.
    Example: `the warehouse is up again`."""

    ticket: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Where that was decided. Example: `OPS-1432`."""

    confirmations: (
        Annotated[
            tuple[
                Annotated[
                    Confirmation,
                    *one_of(
                        Confirmation,
                        "`confirmations` must be a list of Reconciled and DiscardUnreadable",
                        "use one of Reconciled, DiscardUnreadable",
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
    `DiscardUnreadable` acknowledges the entries
    that it selects and no client can show, such as chunks of a message whose producer was killed;
    they are lost then. Left out: they are refused as `NotDelivered`, and stay."""

    job: JobRequest | None = None
    """Its pods, as far as `job.overrides` of the connection permits. Left out: as the connection
    has them."""

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
    """Its id, as `ledger:entry`."""

    messages: int
    """How many selected messages it holds."""

    cause: Annotated[str, Field(max_length=64)]
    """Why: Encrypted, UnreadableProperties, PartOfBatch, BatchTooLarge, SchemaNotFound,
    SchemaUnsupported, SchemaRefused, ReplayedTooOften, TooBig, NotAccepted, NotDelivered or
    Unproven."""


class Count(StatusModel):
    """How many messages have one cause."""

    cause: Annotated[str, Field(max_length=256)]
    """The class of the exception that a message died of, empty where it has none; or why it can't
    be moved."""

    messages: int
    """How many."""


class Preview(StatusModel):
    """Result of a plan."""

    causes: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """What the messages died of that would be moved; the 20 most frequent causes."""

    refused: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """Why others can't be moved; which these are is in `refusals`."""

    samples: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=10)] = ()
    """Some that would be moved, as `ledger:entry:partition:index`; partition -1 where there is
    none."""

    estimated_seconds: int | None = None
    """How long that would take, roughly, without Spark's start; known once all is scanned."""


class ReplayAftermath(StatusModel):
    """What became of the messages that were moved: `moved` = handled + waiting + diedAgain.

    Consumers that were killed may have left copies, which count as well.
    """

    observed_time: Timestamp
    """When that was looked at."""

    handled: int
    """How many were handled, or expired: they neither wait nor have died."""

    waiting: int
    """How many the consumers have not acknowledged yet: to be delivered, delayed, or in hand."""

    died_again: int
    """How many were dead-lettered again."""

    causes: Annotated[tuple[Count, ...], Field(max_length=20)] = ()
    """What these died of; the 20 most frequent causes."""

    settled: bool
    """Whether nothing waits any more."""


class TargetRights(StatusModel):
    """Rights that the operator granted to the replay role at a target."""

    connection: Annotated[str, Field(max_length=507, pattern="^[^/]+/[^/]+$")]
    """The BrokerConnection that leads to the broker, as `namespace/name`."""

    topic: Annotated[str, Field(max_length=MAX_TOPIC, pattern="^persistent://[^/]+/[^/]+/[^/]+$")]
    """The full name of the topic."""

    role: Annotated[str, Field(max_length=255)]
    """The role."""

    actions: Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(max_length=2)]
    """Those of `produce` and `consume` that are taken back at the end of the Replay."""


class JobFailure(StatusModel):
    """Why the job ended before its run did."""

    reason: Annotated[str, Field(max_length=128)]
    """One word."""

    message: Annotated[str, Field(max_length=1024)]
    """The error of the job."""


class ReplayStatus(StatusModel):
    """The progress of the run. Numbers are of messages."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    warnings: WarningTypes | None = None
    """Types of the conditions that need attention although the object is ready. Absent without
    any."""

    phase: Phase | None = None
    """Pending, Submitted, Running, Suspended, Completed or Failed; the last two are final."""

    scanned: int | None = None
    """How many dead letters rested when the run was planned: of those that `select.ids` names, and
    up to the last one that `select.limit` lets pass. While it is planned, how many were looked at
    by now."""

    matched: int | None = None
    """How many of them were selected: moved + skipped + refused + discarded + left. Where all are,
    an entry of the topic that was not read yet counts as one, whatever it holds."""

    unevaluated: int | None = None
    """How many of the scanned ones were not selected because `select.where` can't be computed for
    them, as where it compares a text that is no number with a number. They stay where they are."""

    moved: int | None = None
    """How many of the selected ones were stored in the target and acknowledged."""

    skipped: int | None = None
    """How many of the selected ones needed no move: another Replay had moved them, or others
    acknowledged them after the run was planned."""

    refused: int | None = None
    """How many of the selected ones can't be moved; they stay where they are."""

    discarded: int | None = None
    """How many of the selected ones were acknowledged without being moved, as no client can show
    them and `confirmations` has `DiscardUnreadable`."""

    left: int | None = None
    """How many of the selected ones are yet to be moved."""

    rate: float | None = None
    """How many messages a second were moved in the last half minute; not there while that is not
    known, and at the end."""

    remaining: Annotated[str, Field(max_length=32)] | None = None
    """How long the run still takes at that rate, as `1h30m`."""

    refusals: Annotated[tuple[Refusal, ...] | None, Field(max_length=100)] = None
    """The first 100 of what was refused; `python -m redrive.replay.refused` lists all."""

    preview: Preview | None = None
    """Result of a plan, and of its scan so far while it runs."""

    aftermath: ReplayAftermath | None = None
    """What became of the messages that were moved, where `spec.followFor` asks for it."""

    suspended: bool | None = None
    """Whether the run is at rest, as `spec.suspend` asks; written by the job."""

    awaits_approval: bool | None = None
    """True while the run waits for a ReplayApproval. Written by the job."""

    full_topic: str | None = None
    """The topic for whose consumers the run waits, because it is over its backlog quota; written by
    the job."""

    unsubscribed_topic: str | None = None
    """The target for whose durable subscription the run waits, because it, or one of its
    partitions, has none and would keep no message; written by the job."""

    target_rights: Annotated[tuple[TargetRights, ...] | None, Field(max_length=16)] = None
    """The rights that were granted for this Replay, and that end with it."""

    finished: bool | None = None
    """Whether the run has come to its end, with nothing left, and at most follows what was moved;
    written by the job."""

    failure: JobFailure | None = None
    """Why the last job failed, as it wrote itself."""

    fencing_token: (
        Annotated[str, Field(max_length=64, pattern=r"^-?\d{1,19}:-?\d{1,19}$")] | None
    ) = None
    """Position of the last run in the ledger, as `ledger:entry`. A run with a lower position does
    not write the status any more; written by the job."""

    spark_application: str | None = None
    """The SparkApplication, in the same namespace, that does the work."""

    start_time: Timestamp | None = None
    """When the job was launched."""

    completion_time: Timestamp | None = None
    """When the run reached its final phase."""

    conditions: Conditions = ()
    """Ready: the run has completed. Reconciling and Stalled are there only while true."""

    @classmethod
    def of(cls, replay: Mapping[str, Any]) -> Self:
        """Read the status of *replay*; a field that can't be read is as one that is not there.

        The API server lets more pass than can be read, and a job's ServiceAccount may write it.
        """
        found = replay.get("status") or {}
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            spoilt = {details["loc"][0] for details in error.errors()}
            return cls.model_validate({k: v for k, v in found.items() if k not in spoilt})

    def is_past(self, deadline: str | None, now: datetime) -> bool:
        """Whether the job was launched as long ago as *deadline* says; not without one."""
        if deadline is None or self.start_time is None:  # the operator is about to write it
            return False
        return now - self.start_time >= parse_duration(deadline)
