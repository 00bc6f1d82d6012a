"""Spec of the kind Replay, which moves dead letters back to be processed again."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    PlainSerializer,
    Strict,
    WithJsonSchema,
)

from redrive.api import model
from redrive.api.job import ReplayJobTemplate
from redrive.api.policy_defaults import IS_DURATION, SECONDS, WRITTEN, bounded_duration
from redrive.api.rocketmq import APPLICATION_TOPIC, MAX_NAME, queue_topic
from redrive.errors import InvalidSpecError
from redrive.policy.envelope import MAX_CAUSE
from redrive.policy.naming import TopicName
from redrive.policy.values import check_duration, parse_duration

_WINDOW = model.Rule(
    "!has(self.since) || !has(self.until) || self.since < self.until",
    "`since` must be before `until`",
    "choose an earlier since, or a later until",
)

MAX_ID = 128
_PULSAR_ID = r"\d{1,18}:\d{1,18}(:-?\d{1,9}){0,2}"
_ROCKETMQ_ID = r"[-_.%|a-zA-Z0-9]{1,100}:\d{1,4}:\d{1,18}"
DeadLetterId = Annotated[
    str,
    Field(max_length=MAX_ID),
    model.Form(
        f"{_PULSAR_ID}|{_ROCKETMQ_ID}",
        "the id of a message must be ledger:entry, ledger:entry:partition or "
        "ledger:entry:partition:index, and for RocketMQ master:queue:offset",
        "copy it from a plan, or from peek",
    ),
]


Fingerprint = Annotated[
    str,
    Field(max_length=16),
    model.Form(
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
            "a time must exist", got=text, remedy="write one like 2026-11-20T10:00:00Z"
        ) from None
    return text


Moment = Annotated[
    str,
    Field(max_length=32, json_schema_extra={"format": "date-time"}),
    model.Form(
        r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}([.]\d{1,3})?(Z|[+-]\d{2}:\d{2})",
        "a time must have a date, a time of day and an offset",
        "write one like 2026-11-20T10:00:00Z",
    ),
    AfterValidator(model.refusing(_moment)),
]


_Key = Annotated[str, Field(min_length=1, max_length=128)]
_CauseText = Annotated[str, Field(max_length=MAX_CAUSE)]


class MessageSelection(model.CheckedModel):
    """Selection of messages. A message has to match all fields that are set."""

    RULES = (_WINDOW,)

    # The whole selection is one argument of a process, which may have 128 KiB.

    ids: Annotated[tuple[DeadLetterId, ...], model.items(500, model.SET, least=1)] | None = None
    """Message ids, as `ledger:entry:partition:index`; without an index, or with -1, all messages of
    the entry. For a RocketMQRetryPolicy `master:queue:offset`, such as `broker-a:0:17`. 1 to 500
    ids. Defaults to any. Example: `4711:3:0:0`."""

    keys: Annotated[tuple[_Key, ...], model.items(64, model.SET, least=1)] | None = None
    """Ordering keys or keys of messages, 1 to 64. Defaults to any. Example: `order-17`."""

    causes: Annotated[tuple[_CauseText, ...], model.items(32, model.SET, least=1)] | None = None
    """Causes of dead letters, as a plan shows them: class of the exception, of which the first 256
    characters are compared. An empty text selects dead letters without a cause, such as those of
    Java consumers. 1 to 32 causes. Defaults to any. Example: `WarehouseDown`."""

    fingerprints: Annotated[tuple[Fingerprint, ...], model.items(64, model.SET, least=1)] | None = (
        None
    )
    """Fingerprints of the causes of dead letters, which are equal for failures of one kind: the
    property `REDRIVE_CAUSE_FINGERPRINT`. 1 to 64 fingerprints. Defaults to any. Example:
    `0f4a9c31d2be7755`."""

    since: Moment | None = None
    """Earliest publish time in the dead-letter topic, by the clock of the producer. Defaults to
    any. Example: `2026-11-20T10:00:00Z`."""

    until: Moment | None = None
    """Publish time before which messages are selected. Defaults to any. Example:
    `2026-11-21T10:00:00Z`."""

    def _check(self) -> None:
        since, until = milliseconds(self.since), milliseconds(self.until)
        if since is not None and until is not None and since >= until:
            raise _WINDOW.error(self.since)


class Selection(MessageSelection):
    """Selection of dead letters. A message has to match all fields that are set."""

    where: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """SQL condition over the columns of a dead letter, which must be true. 1 to 4096 characters.
    Defaults to none. Example: `cause_type = 'TimeoutError'`."""

    limit: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Maximum number of messages, 1 to 1000000000: the first ones by partition and position. A
    batch that would exceed it ends the selection, except the first batch, which is selected as a
    whole. Defaults to all. Example: `10000`."""


def milliseconds(moment: str | None) -> int | None:
    """Return a `Moment` in milliseconds since 1970."""
    return None if moment is None else round(datetime.fromisoformat(moment).timestamp() * 1_000)


Duration = Annotated[
    str,
    Field(max_length=40),
    IS_DURATION,
    model.Rule(
        f"!({WRITTEN}) || {SECONDS} >= 1",
        "a duration must be at least 1s",
        "increase it, or leave it out",
        got=model.QUOTED,
    ),
    AfterValidator(model.refusing(check_duration)),
]

ReasonText = Annotated[str, Field(min_length=1, max_length=1024)]
TicketText = Annotated[str, Field(min_length=1, max_length=256)]

_FIXED = (
    "policyRef", "startBefore", "select", "maxReplays", "reason", "ticket", "confirmations",
    "jobTemplate", "target", "guarantee", "followFor", "sending", "engine",
)  # fmt: skip


def immutable(fields: Iterable[str], problem: str, remedy: str) -> model.Rule:
    """Return the rule that *fields* of a spec keep their values."""
    kept = (
        f"(present(self.{field}) ? present(oldSelf.{field}) && self.{field} == oldSelf.{field}"
        f" : !present(oldSelf.{field}))"
        for field in fields
    )
    return model.Rule(" && ".join(kept), problem, remedy)


_ONE_RUN = immutable(
    _FIXED,
    "the spec of a Replay is immutable, except suspend, cancel, rateLimit, deadline, "
    "ttlAfterFinished and mode Review: it is one run, like a Job",
    "create another Replay",
)


# With `has`: a client that drops the field must not confirm.
_CONFIRMED = model.Rule(
    "(has(self.mode) ? has(oldSelf.mode) && self.mode == oldSelf.mode : !has(oldSelf.mode)) || "
    "(has(self.mode) && self.mode == 'Run' && has(oldSelf.mode) && oldSelf.mode == 'Review')",
    "`mode` is immutable, except from Review to Run",
    "create another Replay",
)


_CANCELED = model.Rule(
    "!(has(oldSelf.cancel) && oldSelf.cancel) || (has(self.cancel) && self.cancel)",
    "`cancel` is immutable once it is true",
    "create another Replay",
)


_FOLLOWED = model.Rule(
    "!has(self.followFor) || !((has(self.mode) && self.mode in ['Plan', 'Audit']) "
    "|| (present(self.target.type) && self.target.type == 'Topic'))",
    "`followFor` requires a run that moves messages to the policy's own consumers: target Retry or "
    "Source, and mode Run or Review",
    "leave it out",
)


class Target(enum.StrEnum):
    """Target of dead letters."""

    RETRY = "Retry"
    SOURCE = "Source"
    TOPIC = "Topic"


class Mode(enum.StrEnum):
    """Effect of a Replay: messages are moved, only counted, counted first, or compared."""

    RUN = "Run"
    PLAN = "Plan"
    REVIEW = "Review"
    AUDIT = "Audit"


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
    """Number of times that a moved message may be stored in the target."""

    EXACTLY_ONCE = "ExactlyOnce"
    AT_LEAST_ONCE = "AtLeastOnce"


class Confirmation(enum.StrEnum):
    """Action or fact that the author of a Replay has to confirm."""

    RECONCILED = "Reconciled"
    DISCARD_UNREADABLE = "DiscardUnreadable"
    UNPROVEN_HANDLED = "UnprovenHandled"


class PolicyKind(enum.StrEnum):
    """Kind of a policy, one for each kind of broker."""

    RETRY_POLICY = "RetryPolicy"
    ROCKETMQ = "RocketMQRetryPolicy"


class PolicyRef(model.ApiModel):
    """Reference to a policy of the same namespace."""

    kind: Annotated[PolicyKind, *model.one_of(PolicyKind, "`kind` of `policyRef`")] = (
        PolicyKind.RETRY_POLICY
    )
    """Kind of the policy: `RetryPolicy` for Pulsar, or `RocketMQRetryPolicy`. Defaults to
    RetryPolicy."""

    name: model.ObjectName
    """Name of the policy."""


Period = Annotated[
    str,
    *bounded_duration(
        1,
        10,
        "`per` of a rate must be from 1s to 10s",
        "choose a duration within these bounds, and fewer messages",
    ),
]


class ReplayRate(model.ApiModel):
    """Rate limit of all tasks of a run together."""

    messages: Annotated[int, Strict(), Field(ge=1, le=1_000_000)]
    """Number of messages in a period, 1 to 1000000. Example: `500`."""

    per: Period = "1s"
    """Length of the period, 1s to 10s. Defaults to 1s."""

    @property
    def per_second(self) -> float:
        """Return the number of messages per second."""
        return self.messages / parse_duration(self.per).total_seconds()


def _target_topic(value: object) -> TopicName | str:
    is_of_rocketmq = isinstance(value, str) and re.fullmatch(_QUEUE_TOPIC, value)
    return queue_topic(str(value)) if is_of_rocketmq else model.parse_topic(value)


_PULSAR, _QUEUE_TOPIC = "persistent://", f"[-_a-zA-Z0-9]{{1,{MAX_NAME}}}"
_TargetTopic = Annotated[
    InstanceOf[TopicName] | str,
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": model.MAX_TOPIC,
            "pattern": f"^({model.PULSAR_TOPIC}|{_QUEUE_TOPIC})$",
        }
    ),
    *(
        replace(rule, holds=f"!self.startsWith('{_PULSAR}') || ({rule.holds})")
        for rule in model.PULSAR_TOPIC_RULES
    ),
    APPLICATION_TOPIC[0],
    BeforeValidator(model.refusing(_target_topic)),
    PlainSerializer(str),
]


class ReplayTarget(model.TypedUnion):
    """The topic that dead letters are moved to."""

    MEMBERS = {Target.TOPIC.value: "topic"}  # noqa: RUF012  never changed
    RULES = (model.of_its_type("target", MEMBERS),)

    type: Annotated[Target, *model.one_of(Target, "`type` of `target`")]
    """`Retry`: the retry topic, for the subscription of the policy only. `Source`: the source
    topic, for all of its subscriptions. `Topic`: the topic of the field `topic`."""

    topic: _TargetTopic | None = None
    """Full name of the target, which the connection must allow. It must exist, and must not be a
    retry, dead-letter or ledger topic of another policy. For a RocketMQRetryPolicy the name of a
    topic of RocketMQ, which a rule must allow together with the group of the policy. Examples:
    `persistent://shop/prod/orders-repair`; `orders-repair`."""


_IS_ROCKETMQ = f"(present(self.policyRef.kind) && self.policyRef.kind == '{PolicyKind.ROCKETMQ}')"
IDS_OF_BROKER = model.Rule(
    f"!present(self.select.ids) || ({_IS_ROCKETMQ}"
    f" ? self.select.ids.all(id, id.matches(r'^{_ROCKETMQ_ID}$'))"
    f" : self.select.ids.all(id, id.matches(r'^{_PULSAR_ID}$')))",
    "`select.ids` must be ids of the kind of broker of the policy",
    "copy them from a plan, or from peek",
)
_TARGET_OF_BROKER = model.Rule(
    f"!present(self.target.topic) || self.target.topic.startsWith('{_PULSAR}') != {_IS_ROCKETMQ}",
    "`target.topic` must be a topic of the kind of broker of the policy",
    "write persistent://tenant/namespace/name for a RetryPolicy, and a name such as orders-repair "
    "for a RocketMQRetryPolicy",
)


_AUDITED = model.Rule(
    f"!(has(self.mode) && self.mode == 'Audit') || !(present(self.select) || {_IS_ROCKETMQ}"
    " || (has(self.engine) && self.engine == 'Spark'))",
    "mode Audit compares all messages of a RetryPolicy, with engine Job",
    "leave `select` and `engine` out; for a RocketMQRetryPolicy make a plan",
)


def check_ids(select: MessageSelection | None, kind: PolicyKind) -> None:
    """Check that the ids of *select* are those of the broker of a kind of policies.

    Raises:
        InvalidSpecError: one is not.
    """
    form = _ROCKETMQ_ID if kind is PolicyKind.ROCKETMQ else _PULSAR_ID
    for written in (select and select.ids) or ():
        if not re.fullmatch(form, written, re.ASCII):
            raise IDS_OF_BROKER.error(written)


_Confirmation = Annotated[
    Confirmation,
    *model.one_of(
        Confirmation,
        "`confirmations`",
        "a list of Reconciled, DiscardUnreadable and UnprovenHandled",
    ),
]


class ReplaySpec(model.CheckedModel):
    """One run that moves dead letters.

    Immutable, except `suspend`, `cancel`, `rateLimit`, `deadline` and `ttlAfterFinished`, and
    `mode` from `Review` to `Run`.
    """

    RULES = (
        _ONE_RUN,
        _CONFIRMED,
        _CANCELED,
        _FOLLOWED,
        _TARGET_OF_BROKER,
        IDS_OF_BROKER,
        _AUDITED,
    )

    policy_ref: PolicyRef
    """Policy of the dead letters, in the same namespace."""

    start_before: Moment | None = None
    """Time before which the run must be launched; otherwise the Replay is Failed. So a later copy
    of a Replay, from Git or a backup, moves nothing. Defaults to no limit. Example:
    `2026-11-27T00:00:00Z`."""

    select: Selection | None = None
    """Dead letters to move. Defaults to all that exist when the run begins."""

    target: ReplayTarget = ReplayTarget(type=Target.RETRY)
    """The topic that dead letters are moved to. Defaults to the retry topic."""

    guarantee: Annotated[Guarantee, *model.one_of(Guarantee, "`guarantee`")] | None = None
    """`ExactlyOnce`: a target that does not deduplicate is refused, and so are messages that may be
    stored there already. `AtLeastOnce`: both are accepted, so a message may be stored twice.
    Defaults to ExactlyOnce, and for a RocketMQRetryPolicy to AtLeastOnce, the only one there."""

    max_replays: Annotated[int, Strict(), Field(ge=1, le=1_000_000)] | None = None
    """Maximum number of Replays of a message, including this one, 1 to 1000000. A message
    that was already replayed this many times is refused, and stays. Defaults to no limit. Example:
    `3`."""

    mode: Annotated[Mode, *model.one_of(Mode, "`mode`")] = Mode.RUN
    """`Run`: messages are moved. `Plan`: they are only counted, and `status.run.preview` shows the
    result; other Replays of the policy may run at the same time. `Review`: the run plans, and then
    waits until `mode` is set to `Run`. It then moves the counted messages, and none that came
    later. It ends after 15 minutes without that. `Audit`: dead-letter topic, ledger and targets are
    compared, message by message, and `status.run.audit` has the differences; nothing is moved, and
    other Replays may run at the same time. It has no selection, and engine Job. Defaults to Run."""

    suspend: Annotated[bool, Strict()] = False
    """`true` suspends the run: in-flight messages are settled, progress is recorded, and no
    messages are sent until it is false. It can change at any time. Defaults to false."""

    rate_limit: ReplayRate | None = None
    """Rate limit of the run. It can change at any time; a run applies it within seconds. Defaults
    to no limit."""

    cancel: Annotated[bool, Strict()] = False
    """`true` ends the run: in-flight messages are settled, and the Replay is Failed with reason
    `Canceled`. Messages that were moved remain moved. It cannot change back. Defaults to false."""

    sending: Annotated[Sending, *model.one_of(Sending, "`sending`")] = Sending.INDIVIDUAL
    """`Individual`: each message is an entry of its own. `Batched`: messages are sent in batches,
    which is faster and costs the broker less. A consumer receives a batch as a whole. It receives
    the whole batch again if it exits, or returns one message, before all are acknowledged. Refused
    for a source topic that is read by key. Defaults to Individual."""

    deadline: Duration | None = None
    """Time limit of the run from its launch, including suspended time. After it the run settles
    in-flight messages and is Failed. At least 1s. Defaults to no limit. Example: `2h`."""

    ttl_after_finished: Duration | None = None
    """Time after its end when the Replay is deleted, with its job and pods. At least 1s. It can
    change at any time. Defaults to no deletion. Example: `7d`."""

    follow_for: Duration | None = None
    """Time after the last move during which the run reads the outcome of the messages
    (`status.run.outcome`). It ends earlier once all of them are settled; its driver runs until
    then. At least 1s. Defaults to none: the run ends after the last move. Example: `15m`."""

    reason: ReasonText | None = None
    """Reason of the Replay for later readers, 1 to 1024 characters. It is in Events and in the
    ledger, too. Defaults to none. Example: `the warehouse is up again`."""

    ticket: TicketText | None = None
    """Ticket of the decision, 1 to 256 characters. Defaults to none. Example: `OPS-1432`."""

    confirmations: (
        Annotated[tuple[_Confirmation, ...], model.items(3, model.SET, least=1)] | None
    ) = None
    """Actions and facts that the author confirms. `Reconciled`: the effects of the first handling
    of these messages were reconciled, which policies with `replay.safety: ReconcileFirst` require.
    `DiscardUnreadable`: selected entries that no client can read, such as chunks of a message whose
    producer was killed, are acknowledged and lost; without it they are refused as `NotDelivered`,
    and remain. `UnprovenHandled`: selected messages that earlier Replays may have moved were
    handled; they are acknowledged, not sent, and count as skipped, with any `guarantee`. Those that
    this Replay may have moved are refused as `Unproven`, and remain. Without the confirmation
    `ExactlyOnce` refuses both. A Replay of a RocketMQRetryPolicy
    with any confirmation is Stalled. Defaults to none."""

    engine: Annotated[ReplayEngine, *model.one_of(ReplayEngine, "`engine`")] = ReplayEngine.AUTO
    """`Job`: a Kubernetes Job of one pod, which needs no Spark operator and starts within seconds.
    `Spark`: a SparkApplication with executors. `Auto`: `Job` up to 10000 dead letters, counted by
    `select.ids`, `select.limit` or the last statistics of the policy, and without a Spark operator;
    else `Spark`. The result is the same. With a RocketMQRetryPolicy `Auto` means `Job`, and `Spark`
    reads and selects with executors, before one process sends. Defaults to Auto."""

    job_template: ReplayJobTemplate | None = None
    """Job template of its pods, and number of executors. Defaults to the template and the number of
    the BrokerConnection."""

    def _check(self) -> None:
        if self.follow_for is not None and (self.is_plan or self.target.type is Target.TOPIC):
            raise _FOLLOWED.error()
        topic = self.target.topic
        is_of_rocketmq = self.policy_ref.kind is PolicyKind.ROCKETMQ
        is_spark = self.engine is ReplayEngine.SPARK
        if self.mode is Mode.AUDIT and (self.select is not None or is_of_rocketmq or is_spark):
            raise _AUDITED.error()
        if topic is not None and isinstance(topic, TopicName) is is_of_rocketmq:
            raise _TARGET_OF_BROKER.error(topic)
        check_ids(self.select, self.policy_ref.kind)

    @property
    def is_plan(self) -> bool:
        """Return True if nothing is moved."""
        return self.mode in {Mode.PLAN, Mode.AUDIT}

    def confirms(self, confirmation: Confirmation) -> bool:
        """Return True if the author confirms *confirmation*."""
        return confirmation in (self.confirmations or ())

    def target_topic(self, source: TopicName) -> TopicName | None:
        """Return the target topic of Pulsar; None for the retry topic.

        Args:
            source: source topic of the policy.
        """
        topic = self.target.topic
        if self.target.type is Target.SOURCE:
            return source
        return topic if isinstance(topic, TopicName) else None


class ReplayRef(model.ApiModel):
    """Reference to one Replay of the same namespace."""

    name: model.ObjectName
    """Name of the Replay, and of the ReplayApproval."""

    uid: Annotated[
        str,
        Field(max_length=64),
        model.Form(
            r"[-0-9a-zA-Z]+",
            "the uid of a Replay must be letters, digits and '-'",
            "use `metadata.uid` of the Replay",
        ),
    ]
    """`metadata.uid` of the Replay. Another Replay of this name needs another approval."""


_SAME_APPROVAL = model.Rule(
    "self == oldSelf",
    "the spec of a ReplayApproval is immutable",
    "delete it, and create another one",
)


class ReplayApprovalSpec(model.ApiModel):
    """Approval of one Replay, up to a number of messages. Immutable."""

    RULES = (_SAME_APPROVAL,)

    replay_ref: ReplayRef
    """The approved Replay."""

    messages: Annotated[int, Strict(), Field(ge=1, le=1_000_000_000)]
    """Number of messages that the Replay may move, 1 to 1000000000. A plan of more messages needs
    another approval. Example: `1200`."""
