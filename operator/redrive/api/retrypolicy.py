"""The kind RetryPolicy: retries of failed messages of one subscription, and their dead letters."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from redrive.api import model
from redrive.api.conditions import Conditions, Timestamp, WarningTypes
from redrive.api.policy_defaults import NAMING_RULES, Choices, DeletionPolicy, Naming
from redrive.api.topology import DeadLetterTopic, RetryTopic
from redrive.errors import InvalidSpecError
from redrive.policy import naming as names
from redrive.policy.ladder import DEFAULT_LEVELS, DEFAULT_PRESET, Ladder
from redrive.policy.model import (
    DEFAULT_MAX_RETRIES,
    MAX_BLOCKED_KEYS,
    Policy,
    SubscriptionType,
    check_order,
    check_sequenced,
)


class ManagementPolicy(enum.StrEnum):
    """Permission of redrive to change the broker for a policy."""

    MANAGE = "Manage"
    OBSERVE = "Observe"


class Ordering(enum.StrEnum):
    """Order that retries keep."""

    NONE = "None"
    PER_KEY = "PerKey"


class ReplaySafety(enum.StrEnum):
    """Effect of handling a message again."""

    IDEMPOTENT = "Idempotent"
    RECONCILE_FIRST = "ReconcileFirst"
    NEVER = "Never"


def fixed(field: str, other: str) -> model.Rule:
    """Return the rule that a field keeps its value; another one needs the *other* policy."""
    return model.Rule(
        "self == oldSelf",
        f"`{field}` of a policy is immutable",
        f"create another {other}",
        got='"\'" + self + "\' where it was \'" + oldSelf + "\'"',
    )


_DELAYED = [kind.value for kind in SubscriptionType if kind.honours_delays]
_NOT_DELAYED = (
    "`subscriptionType` must be Shared or KeyShared: with other types the broker delivers a "
    "delayed message at once"
)
_DELAYED_REMEDY = "use Shared, or KeyShared to keep the order of first deliveries per key"


def _subscription_type(value: object) -> SubscriptionType:
    if value not in _DELAYED:
        got = value if isinstance(value, str) else repr(value)
        raise InvalidSpecError(_NOT_DELAYED, got=got[:64], remedy=_DELAYED_REMEDY)
    return SubscriptionType(value)


SharedType = Annotated[
    SubscriptionType,
    WithJsonSchema({"type": "string", "enum": _DELAYED}),
    BeforeValidator(model.refusing(_subscription_type)),
]


_SUBSCRIPTION_TYPE = "(has(self.subscriptionType) ? self.subscriptionType : 'Shared')"
_NOT_ORDERED = "(!has(self.ordering) || self.ordering == 'None')"
_KEPT_TOGETHER = model.Rule(
    f"{_NOT_ORDERED} || {_SUBSCRIPTION_TYPE} == 'KeyShared'",
    "an ordered policy needs a subscription that keeps the messages of a key together",
    "use KeyShared, or ordering None",
    got=f'"\'" + {_SUBSCRIPTION_TYPE} + "\'"',
)


_IN_SEQUENCE = model.Rule(
    "!present(self.deadLetter.sequenced) || !self.deadLetter.sequenced || "
    f"!{_NOT_ORDERED} && (!present(self.deadLetter.mode) || self.deadLetter.mode != 'Discard')",
    "`deadLetter.sequenced` requires an ordered policy that keeps dead letters",
    "set ordering to PerKey and deadLetter.mode to Keep, or leave deadLetter.sequenced out",
)


class Adoption(enum.StrEnum):
    """Treatment of a topic that exists and that redrive did not create."""

    NEVER = "Never"
    IF_PRESENT = "IfPresent"


class Chaining(enum.StrEnum):
    """Treatment of a source topic that is a retry or dead-letter topic of redrive."""

    FORBIDDEN = "Forbidden"
    ALLOWED = "Allowed"


class ReplayRules(model.ApiModel):
    """Rules for Replays of a policy."""

    safety: Annotated[ReplaySafety, *model.one_of(ReplaySafety, "`replay.safety`")] = (
        ReplaySafety.IDEMPOTENT
    )
    """Permission to handle dead letters again. `Idempotent`: always. `ReconcileFirst`: after the
    effects of their first handling were reconciled, which a Replay confirms by `confirmations:
    [Reconciled]`. `Never`: each Replay of this policy is refused, except plans. Defaults to
    Idempotent."""

    approval_above: model.ApprovalAbove | None = None
    """Number of messages that a Replay may move without approval. A Replay of more messages plans,
    and then waits for approval; the connection may set a lower number. Defaults to any number.
    Example: `1000`."""


class ConnectionRef(model.ApiModel):
    """Reference to a BrokerConnection."""

    name: model.ObjectName
    """Name of the BrokerConnection."""

    namespace: model.ObjectName | None = None
    """Namespace of the BrokerConnection. A rule of its `allow` must apply to the namespace of the
    policy. Defaults to that namespace."""


class RetryPolicySpec(Choices, model.CheckedModel):
    """Retries of failed messages of one subscription, and their dead letters."""

    RULES = (*NAMING_RULES, _KEPT_TOGETHER, _IN_SEQUENCE)

    connection_ref: ConnectionRef
    """The BrokerConnection of the broker."""

    topic: Annotated[model.TopicField, fixed("topic", "RetryPolicy for the other topic")]
    """The source topic, `persistent://tenant/namespace/name`, never one partition of it. It must
    exist, and the connection must allow it. Immutable."""

    subscription: Annotated[
        model.Subscription,
        fixed("subscription", "RetryPolicy for the other subscription"),
    ]
    """Subscription whose failed messages are retried, 1 to 255 characters without slashes or white
    space, and not `.` or `..`. Topic names are derived from it. Immutable."""

    subscription_type: SharedType = SubscriptionType.SHARED
    """Type of the subscription on the source topic: `Shared` or `KeyShared`. Exclusive and Failover
    are refused, because the broker ignores delays there. Defaults to Shared."""

    ordering: Ordering = Ordering.NONE
    """`None`: a failed message waits in the retry topic, and later ones overtake it. `PerKey`: it
    waits in its consumer, and so do later messages of its key; other keys are not delayed. PerKey
    requires `KeyShared`. The ladder applies to both. Defaults to None."""

    naming: Naming = Naming()
    """Names of retry topic, dead-letter topic and ConfigMap. Defaults to derived names.
    Immutable."""

    adoption: Annotated[Adoption, *model.one_of(Adoption, "`adoption`")] = Adoption.NEVER
    """`IfPresent`: the retry and the dead-letter topic may be existing topics that redrive did not
    create. They get the grants, topic policies and subscriptions that the policy needs. With
    `deletionPolicy: Delete` their original settings are restored, and they are never deleted. The
    connection must allow it. `Never`: a policy that needs such a topic is refused. Defaults to
    Never."""

    chaining: Annotated[Chaining, *model.one_of(Chaining, "`chaining`")] = Chaining.FORBIDDEN
    """`Allowed`: the source topic may be a retry or dead-letter topic of redrive, for example of a
    service that consumes dead letters. `Forbidden`: such a policy is refused, because mostly it
    would retry the same messages twice. Defaults to Forbidden."""

    retry: RetryTopic = RetryTopic()
    """The retry topic. Defaults to as many partitions as the source topic has, and no TTL."""

    dead_letter: DeadLetterTopic = DeadLetterTopic()
    """Treatment of messages that have used up their retries. Defaults to `mode: Keep`."""

    consumer_roles: model.ConsumerRoles = ()
    """Pulsar roles that consume the subscription. Each gets `produce` and `consume` on the retry
    topic and `produce` on the dead-letter topic; the connection must allow it. At most 32 roles,
    with 2048 characters in total. Defaults to none. Example: `[fulfilment]`."""

    replay: ReplayRules = ReplayRules()
    """Rules for Replays of this policy. Defaults to none: any Replay may run."""

    management_policy: Annotated[
        ManagementPolicy, *model.one_of(ManagementPolicy, "`managementPolicy`")
    ] = ManagementPolicy.MANAGE
    """`Manage`: redrive creates and repairs everything that the policy needs. `Observe`: it changes
    nothing, at the broker or in Kubernetes; the condition `DriftDetected` and
    `status.plannedChanges` show the changes that it would make. Defaults to Manage."""

    def _check(self) -> None:
        for topic in (self.naming.retry_topic, self.naming.dead_letter_topic):
            if topic is not None:
                names.check_sibling(topic, self.topic)
        check_order(self.subscription_type, ordered=self.is_ordered)
        check_sequenced(
            self.dead_letter.sequenced,
            ordered=self.is_ordered,
            dead_letters=self.dead_letter.keeps,
        )

    @property
    def is_ordered(self) -> bool:
        """Return True if failed messages are retried before later ones of their key."""
        return self.ordering is Ordering.PER_KEY

    @property
    def scheme_topics(self) -> tuple[names.TopicName, names.TopicName]:
        """Return retry and dead-letter topic by the scheme, without names that are set."""
        origin = (self.topic, self.subscription, self.naming.scheme)
        return names.retry_topic(*origin), names.dead_letter_topic(*origin)

    @property
    def retry_topic(self) -> names.TopicName:
        """Return the topic where messages wait for their next attempt."""
        return self.naming.retry_topic or self.scheme_topics[0]

    @property
    def dead_letter_topic(self) -> names.TopicName:
        """Return the topic of dead letters, even if the policy keeps none."""
        return self.naming.dead_letter_topic or self.scheme_topics[1]

    @property
    def all_topics(self) -> tuple[names.TopicName, ...]:
        """Return the topics that may be this policy's, including those of an earlier spec."""
        dead = self.dead_letter_topic
        return (self.retry_topic, dead, names.ledger_topic(dead), names.sequences_topic(dead))

    @property
    def own_topics(self) -> tuple[names.TopicName, ...]:
        """Return the topics that belong to this policy only; the first is its retry topic.

        The ledger is included with the dead-letter topic, because Replays may be enabled later.
        """
        if not self.dead_letter.keeps:
            return (self.retry_topic,)
        return self.all_topics if self.dead_letter.sequenced else self.all_topics[:3]

    @property
    def permitted_topics(self) -> tuple[names.TopicName, ...]:
        """Return the topics among them that a connection must permit, without the ledger."""
        return self.own_topics[:2]

    def to_policy(self, name: str, generation: int) -> Policy:
        """Return the policy for consumers and Replays.

        Args:
            name: the RetryPolicy, as `namespace/name`.
            generation: its `metadata.generation`.

        Raises:
            InvalidSpecError: the values contradict each other.
        """
        ladder, levels, breaker = self.delay_ladder, self.delay_levels, self.outage_breaker
        return Policy(
            topic=self.topic,
            subscription=self.subscription,
            subscription_type=self.subscription_type,
            max_retries=DEFAULT_MAX_RETRIES if self.max_retries is None else self.max_retries,
            ladder=Ladder.from_preset(DEFAULT_PRESET) if ladder is None else ladder.to_ladder(),
            levels=DEFAULT_LEVELS if levels is None else Ladder.from_delays(levels),
            ordered=self.is_ordered,
            dead_letters=self.dead_letter.keeps,
            sequenced=self.dead_letter.sequenced,
            dead_letter_subscription=(
                self.dead_letter.subscription or names.DEAD_LETTER_SUBSCRIPTION
            ),
            retry_topic=self.retry_topic,
            dead_letter_topic=self.dead_letter_topic,
            name=name,
            generation=generation,
            outage_breaker=None if breaker is None else breaker.to_limits(),
        )


class Backlog(model.StatusModel):
    """Backlog of the policy's own subscriptions, and their consumers."""

    source: Annotated[int, Field(ge=0)] | None = None
    """Number of messages of the source topic that the subscription has not processed yet."""

    source_consumers: Annotated[int, Field(ge=0)] | None = None
    """Highest number of connected consumers of the source topic in any partition."""

    retry_consumers: Annotated[int, Field(ge=0)] | None = None
    """Highest number of connected consumers of the retry topic in any partition."""

    retry: Annotated[int, Field(ge=0)]
    """Number of messages that wait in the retry topic for their next attempt, due or not."""

    retry_due: Annotated[int, Field(ge=0)] | None = None
    """Number of these that consumers can process now, or have in-flight. Brokers count a message as
    delayed only after they have read it for a consumer."""

    dead_letter: Annotated[int, Field(ge=0)] | None = None
    """Number of messages in the dead-letter topic. Absent if they are discarded."""

    dead_letters_last_hour: Annotated[int, Field(ge=0)] | None = None
    """Number of messages that were stored in the dead-letter topic in the last hour, as far as a
    running operator has seen them. In the first hour of an operator it is an estimate. Absent if
    they are discarded."""

    oldest_dead_letter_time: Timestamp | None = None
    """Time at which the oldest dead letter was stored. Absent without dead letters."""

    dead_letter_bytes: Annotated[int, Field(ge=0)] | None = None
    """Highest approximate size of the dead letters in any partition, in bytes. Absent if they are
    discarded."""

    dead_letter_quota_bytes: Annotated[int, Field(ge=0)] | None = None
    """Backlog quota of a partition of the dead-letter topic, in bytes. Absent if it is unlimited,
    and without dead letters if the policy does not set it."""

    observed_time: Timestamp | None = None
    """Time at which these figures were read from the broker."""


class BlockedKey(model.StatusModel):
    """A key whose messages wait for the retry of one, with `ordering: PerKey`."""

    key_hash: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    """Hash of the key, with a random key of the consumer's process."""

    since_time: Timestamp
    """Time of the first failure in this consumer."""

    message_id: Annotated[str, Field(alias="messageID", pattern="^[0-9A-Za-z:,()._-]{1,128}$")]
    """Origin of the failing message. Example: `4711:3:0`."""

    cause: Annotated[str, Field(max_length=64)]
    """Class of the exception of its last failure."""

    failures: Annotated[int, Field(ge=0, le=2**31 - 1)]
    """Number of its failed attempts."""

    behind: Annotated[int, Field(ge=0, le=2**31 - 1)]
    """Number of later messages of the key that the consumer has. More may wait at the broker."""


class EffectiveFields(model.StatusModel):
    """Effective values of fields that the policy may take from its connection."""

    max_retries: int | None = None
    """Retries of a failed message."""

    deletion_policy: DeletionPolicy | None = None
    """Effect of a deletion at the broker."""


MAX_RESULTS = 10
MAX_SHOWN = 256
"""Maximum characters of the name of a user, or of a reason, in a status."""


class ReplayResult(model.StatusModel):
    """Result of an ended Replay of the policy, except plans. It outlives the Replay."""

    name: Annotated[str, Field(max_length=63)]
    """Name of the Replay."""

    uid: Annotated[str, Field(max_length=64)]
    """`metadata.uid` of the Replay."""

    author: Annotated[str, Field(max_length=MAX_SHOWN)] | None = None
    """First 256 characters of the annotation `redrive.io/requested-by` of the Replay: the user who
    created it with the command line. The admission policy of the chart verifies it."""

    approved_by: Annotated[str, Field(max_length=MAX_SHOWN)] | None = None
    """`run.approval.approvedBy` of the Replay: the user who approved it with the command line."""

    reason: Annotated[str, Field(max_length=MAX_SHOWN)] | None = None
    """First 256 characters of `spec.reason` of the Replay."""

    ticket: Annotated[str, Field(max_length=256)] | None = None
    """`spec.ticket` of the Replay."""

    phase: Annotated[str, Field(max_length=16)]
    """`Completed` or `Failed`."""

    result: Annotated[str, Field(max_length=128)]
    """Reason of its condition Ready. Example: `CompletedWithRefusals`."""

    moved: int | None = None
    """Number of messages that it moved, as its job reported."""

    refused: int | None = None
    """Number of messages that it refused, as its job reported."""

    doubled: int | None = None
    """Number of moved messages that the target may contain twice, as its job reported. Absent for a
    RetryPolicy."""

    dead_again: int | None = None
    """Number of moved messages that were dead-lettered again before its end. Absent without
    `followFor`."""

    completion_time: Timestamp
    """Time of its end."""


Internal = Annotated[
    Mapping[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""Fields for the operator only, including those of newer operators."""


class UnloadResult(model.StatusModel):
    """Result of the last unload of the retry topic that an annotation requested."""

    request_time: Timestamp
    """Value of the annotation `redrive.io/unload-requested-at`."""

    error: Annotated[str, Field(max_length=1024)] | None = None
    """Refusal of the broker. Absent where the topic was unloaded."""


class SharedPolicyStatus(model.StatusModel):
    """State of a policy for any broker. The operator writes it."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status describes."""

    conditions: Conditions = ()
    """Ready: topics, rights, groups and the ConfigMap are as specified. Reconciling and Stalled are
    present only while true."""

    warnings: WarningTypes | None = None
    """Types of the conditions that warn although the object is ready. Absent without any."""

    blocked_by: str | None = None
    """Policy of the same kind, as `namespace/name`, that has priority on a topic or group that this
    one needs; `another namespace` for a policy of another namespace. Absent without one."""

    connection: str | None = None
    """BrokerConnection, as `namespace/name`, through which the policy was last provisioned."""

    planned_changes: (
        Annotated[tuple[Annotated[str, Field(max_length=512)], ...], Field(max_length=32)] | None
    ) = None
    """Changes that redrive would make, with `managementPolicy: Observe`. At most 32 lines. If there
    are more changes, line 32 counts the rest."""

    replays: Annotated[tuple[ReplayResult, ...], Field(max_length=MAX_RESULTS)] | None = None
    """Results of the last ten Replays of the policy, latest first. Absent without any."""

    internal: Internal | None = None
    """Internal data of the operator, not a part of the API: other programs must not read it. Its
    loss costs the operator work; the deletion of a RocketMQRetryPolicy then retains group and
    topics. Absent before the first reconcile."""


class RetryPolicyStatus(SharedPolicyStatus):
    """State of the policy. The operator writes it."""

    topic: str | None = None
    """Local name of the source topic. Example: `orders`."""

    retry_topic: str | None = None
    """Full name of the topic where messages wait for their next attempt."""

    dead_letter_topic: str | None = None
    """Full name of the topic of messages that used up their attempts. Absent if they are
    discarded."""

    ledger_topic: str | None = None
    """Full name of the topic that records which dead letters Replays moved. Absent if no Replay can
    run."""

    sequences_topic: str | None = None
    """Full name of the topic that records which keys have dead letters. Absent if sequences are not
    kept."""

    config_map: str | None = None
    """ConfigMap for consumers, in the policy's namespace; its key is `policy.json`."""

    effective: EffectiveFields | None = None
    """Effective values of fields that the policy, or `policyDefaults` of its connection, may
    set."""

    backlog: Backlog | None = None
    """Messages in the topics of the policy; `observedTime` is the time of the figures. They are
    read about once a minute, and at once when a Replay of the policy ends, the policy becomes Ready
    or a reconcile is requested. Small changes are written every ten minutes, unchanged figures
    every hour."""

    blocked_keys: Annotated[tuple[BlockedKey, ...], Field(max_length=MAX_BLOCKED_KEYS)] | None = (
        None
    )
    """Keys whose messages wait for the retry of one, if its next retry is ten seconds or more after
    its first failure. Consumers in Python publish them. The longest blocked first, at most 20.
    Absent without any."""

    unload: UnloadResult | None = None
    """Result of the last requested unload of the retry topic. Absent without any."""
