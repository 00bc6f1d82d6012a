"""RetryPolicy: how failed messages of one subscription are retried, and where they end."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema

from redrive.api.conditions import Conditions
from redrive.api.fields import MAX_LIST, ObjectName, Role, TopicField
from redrive.api.ladder import DelayLadder
from redrive.api.model import ApiModel, StatusModel
from redrive.api.rules import QUOTED, Rule, refusing
from redrive.policy import naming
from redrive.policy.ladder import DEFAULT_PRESET, Ladder
from redrive.policy.model import (
    DEFAULT_MAX_RETRIES,
    MAX_RETRIES_LIMIT,
    Policy,
    SubscriptionType,
    check_max_retries,
)

_CHANGE = '"\'" + self + "\' where it was \'" + oldSelf + "\'"'

Subscription = Annotated[
    str,
    Field(max_length=naming.MAX_NAME),
    Rule(
        r"self.matches('^[^/\\s\\p{Z}\\x00-\\x1f\\x7f\\x85]+$') && !(self in ['.', '..'])",
        f"a subscription is 1 to {naming.MAX_NAME} characters without slashes or white space, and "
        "not . or .., because topics and addresses are made of it",
        "use another subscription name",
        got=QUOTED,
    ),
    AfterValidator(refusing(naming.check_subscription)),
]


def _subscription_type(value: object) -> SubscriptionType:
    return SubscriptionType.parse(value if isinstance(value, str) else repr(value))


SharedType = Annotated[
    SubscriptionType,
    WithJsonSchema({"type": "string", "maxLength": 64}),
    Rule(
        "self in ['Shared', 'Key_Shared']",
        "retries with a delay need a Shared or Key_Shared subscription: "
        "on the others the broker delivers a delayed message at once",
        "use Shared, or Key_Shared to keep the order of first deliveries per key",
        got=QUOTED,
    ),
    BeforeValidator(refusing(_subscription_type)),
]

# Bounds rather than a rule: only so does the API server show the number it refuses.
MaxRetries = Annotated[
    int,
    Strict(),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_RETRIES_LIMIT}),
    AfterValidator(refusing(check_max_retries)),
]


class ConnectionRef(ApiModel):
    """Names a PulsarConnection."""

    name: ObjectName
    """Name of the PulsarConnection."""

    namespace: ObjectName | None = None
    """Its namespace; its `allowedNamespaces` must then name the policy's. Left out: the
    policy's."""


class RetryPolicySpec(ApiModel):
    """How failed messages of one subscription are retried, and where they end."""

    connection_ref: ConnectionRef
    """The PulsarConnection that leads to the broker."""

    topic: Annotated[
        TopicField,
        Rule(
            "self == oldSelf",
            "the topic of a policy can't change",
            "make another RetryPolicy for the other topic",
            got=_CHANGE,
        ),
    ]
    """The source topic, `persistent://tenant/namespace/name`, never one partition of it. It has to
    exist, and the connection has to allow it. Immutable."""

    subscription: Annotated[
        Subscription,
        Rule(
            "self == oldSelf",
            "the subscription of a policy can't change",
            "make another RetryPolicy for the other subscription",
            got=_CHANGE,
        ),
    ]
    """The subscription whose failed messages are retried, 1 to 255 characters without slashes or
    white space, and not `.` or `..`. Its retry topic is `<topic>-<subscription>-RETRY`, its
    dead-letter topic `<topic>-<subscription>-DLQ`. Immutable."""

    subscription_type: SharedType = SubscriptionType.SHARED
    """How consumers share the source topic: `Shared` or `Key_Shared`. Exclusive and Failover are
    refused: there the broker ignores delays."""

    max_retries: MaxRetries | None = None
    """How often a failed message is retried after its first delivery, 0 to 1000: with 3 a message
    is handled at most 4 times, then it is a dead letter. Left out: 16."""

    # No default in the schema: a default choice would stay beside the one a user makes later.
    delay_ladder: DelayLadder | None = None
    """The delay before each retry: exactly one of preset, delays and fixed. Left out: the preset
    `tdmq`."""

    consumer_roles: Annotated[tuple[Role, ...], Field(max_length=MAX_LIST)] = ()
    """The Pulsar roles that consume the subscription. Each is granted `produce` and `consume` on
    the retry topic and `produce` on the dead-letter topic; the connection has to allow it.
    Example: `[fulfilment]`."""

    def to_policy(self, name: str, generation: int) -> Policy:
        """Return what consumers and replays must know.

        Args:
            name: the RetryPolicy, as `namespace/name`.
            generation: its `metadata.generation`.

        Raises:
            InvalidSpecError: the values can't make a policy together.
        """
        ladder = self.delay_ladder
        return Policy(
            topic=self.topic,
            subscription=self.subscription,
            subscription_type=self.subscription_type,
            max_retries=DEFAULT_MAX_RETRIES if self.max_retries is None else self.max_retries,
            ladder=Ladder.from_preset(DEFAULT_PRESET) if ladder is None else ladder.to_ladder(),
            name=name,
            generation=generation,
        )


class RetryPolicyStatus(StatusModel):
    """What the operator made of the policy."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    conditions: Conditions = ()
    """Ready: topics, subscriptions, grants and the ConfigMap are as the policy asks. Reconciling
    and Stalled are there only while true."""

    retry_topic: str | None = None
    """Full name of the topic where messages wait for their next attempt."""

    dead_letter_topic: str | None = None
    """Full name of the topic where messages rest that have used up their attempts."""

    config_map: str | None = None
    """The ConfigMap, in the policy's namespace, that consumers mount; its key is `policy.json`."""
