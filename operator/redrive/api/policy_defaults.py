"""Fields that a RetryPolicy shares with the defaults of its connection, and the naming of topics.

A field that a policy leaves out comes from `policyDefaults` of its connection, else from the
defaults here. Naming is not among these fields: the name of a topic with waiting messages must not
depend on another object, nor on a status that can be lost.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Annotated, Self

from pydantic import AfterValidator, Field, Strict, WithJsonSchema

from redrive.api import model
from redrive.errors import InvalidSpecError
from redrive.policy.ladder import DEFAULT_PRESET, MAX_DELAY, MAX_LEVELS, MAX_RUNGS, PRESETS, Ladder
from redrive.policy.model import (
    MAX_INTERVAL,
    MAX_PAUSE,
    MAX_RETRIES_LIMIT,
    MAX_WINDOW,
    OutageLimits,
    check_max_retries,
)
from redrive.policy.naming import Scheme
from redrive.policy.values import DURATION_PATTERN, parse_duration

WRITTEN = f"self != '' && self.matches('{DURATION_PATTERN}')"
# CEL's own duration() does not support days.
SECONDS = (
    "self.findAll('[0-9]+[dhms]').map(part, int(part.substring(0, part.size() - 1)) * "
    "(part.endsWith('d') ? 86400 : part.endsWith('h') ? 3600 : part.endsWith('m') ? 60 : 1)).sum()"
)


def within(least: int, most: int) -> str:
    """Return the CEL expression that a duration has from *least* to *most* seconds.

    It is true for an invalid duration, which another rule refuses.
    """
    return f"!({WRITTEN}) || [{SECONDS}].all(s, {least} <= s && s <= {most})"


def bounded_duration(
    least: int, most: int, problem: str, remedy: str, *, word: str | None = None
) -> tuple[object, ...]:
    """Return the annotations of a duration within bounds.

    Args:
        least: minimum in seconds.
        most: maximum in seconds.
        problem: problem of a duration out of these bounds.
        remedy: its remedy.
        word: a value that is not a duration; None for none.
    """

    def check(text: str) -> str:
        if text != word and not least <= parse_duration(text).total_seconds() <= most:
            raise InvalidSpecError(problem, got=text, remedy=remedy)
        return text

    pattern = f"^{word}$|{DURATION_PATTERN}" if word else DURATION_PATTERN
    return (
        Field(max_length=40),
        WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 40, "pattern": pattern}),
        model.Rule(within(least, most), problem, remedy, got=model.QUOTED),
        AfterValidator(model.refusing(check)),
    )


def _check_preset(name: str) -> str:
    Ladder.from_preset(name)
    return name


IS_DURATION = WithJsonSchema(
    {"type": "string", "minLength": 1, "maxLength": 40, "pattern": DURATION_PATTERN}
)

Delay = Annotated[
    str,
    *bounded_duration(
        1,
        int(MAX_DELAY.total_seconds()),
        "a delay must be from 1 s to 864000 s (10 days)",
        "choose a delay within these bounds",
    ),
]

Preset = Annotated[
    str,
    WithJsonSchema({"type": "string", "enum": list(PRESETS)}),
    AfterValidator(model.refusing(_check_preset)),
]

Rungs = Annotated[
    tuple[Delay, ...],
    Field(max_length=MAX_RUNGS, json_schema_extra={"minItems": 1}),
]


def _check_levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    if not levels:
        raise InvalidSpecError(
            f"`delayLevels` must have from 1 to {MAX_LEVELS} delays",
            got=0,
            remedy="list at least one delay, or leave it out for the default",
        )
    return levels


Levels = Annotated[
    tuple[Delay, ...],
    Field(max_length=MAX_LEVELS, json_schema_extra={"minItems": 1}),
    AfterValidator(model.refusing(_check_levels)),
]

FactorPercent = Annotated[int, Strict(), Field(ge=110, le=10_000)]
JitterPercent = Annotated[int, Strict(), Field(ge=0, le=100)]

_INITIAL, _MAX = (SECONDS.replace("self", f"self.{field}") for field in ("initial", "max"))
_RISES = model.Rule(
    f"!present(self.initial) || !present(self.max) || {_INITIAL} <= {_MAX}",
    "the longest delay of an exponential ladder must not be shorter than its first",
    "increase max, or reduce initial",
    got="'initial ' + self.initial + ', max ' + self.max",
)


class Exponential(model.CheckedModel):
    """Delays that grow by a factor from retry to retry."""

    RULES = (_RISES,)

    initial: Delay
    """The delay before the first retry, from 1s to 10d. Example: `1s`."""

    factor_percent: FactorPercent = 200
    """Length of each delay in percent of the one before, 110 to 10000. Defaults to 200: each delay
    is twice as long."""

    max: Delay
    """The longest delay, from 1s to 10d, which then repeats. Example: `10m`."""

    jitter_percent: JitterPercent = 0
    """Maximum percentage of each delay, 0 to 100, by which it is shortened at random, so that
    messages that failed together do not return together. Defaults to 0."""

    def _check(self) -> None:
        self.to_ladder()

    def to_ladder(self) -> Ladder:
        """Return the ladder.

        Raises:
            InvalidSpecError: a value is out of bounds, or max is shorter than initial.
        """
        return Ladder.from_exponential(
            self.initial, self.factor_percent / 100, self.max, self.jitter_percent / 100
        )


class DelayLadder(model.OneOf):
    """Delays before retry 1, 2, 3 …; the last delay repeats."""

    RULES = (model.at_most_one("delayLadder", "preset", "delays", "fixed", "exponential"),)

    preset: Preset | None = None
    """A ladder by name. `TDMQ`: 1s 5s 10s 30s, 1m to 10m by the minute, 20m 30m 1h 2h (18 rungs).
    `RocketMQ` and `ApsaraMQ`: the same from 10s on (16 rungs)."""

    delays: Rungs | None = None
    """One delay for each retry, 1 to 1000 of them, each from 1s to 10d (864000 s), written like
    `90s`, `1m30s`, `2h` or `10d`. Example: `[10s, 1m, 30m]`."""

    fixed: Delay | None = None
    """The same delay before every retry, from 1s to 10d (864000 s). Example: `30s`."""

    exponential: Exponential | None = None
    """Delays that grow by a factor from retry to retry, optionally with jitter."""

    def _check(self) -> None:
        super()._check()
        self.to_ladder()

    def to_ladder(self) -> Ladder:
        """Return the ladder; the default if it is empty.

        Raises:
            InvalidSpecError: it is out of bounds.
        """
        if self.delays is not None:
            return Ladder.from_delays(self.delays)
        if self.fixed is not None:
            return Ladder.from_fixed(self.fixed)
        if self.exponential is not None:
            return self.exponential.to_ladder()
        return Ladder.from_preset(self.preset or DEFAULT_PRESET)


class Naming(model.ApiModel):
    """Names of retry topic, dead-letter topic and ConfigMap: derived, or set one by one."""

    scheme: Annotated[Scheme, *model.one_of(Scheme, "`scheme`")] = Scheme.PULSAR
    """Scheme of names that are not set. `Pulsar`: `<topic>-<subscription>-RETRY` and `…-DLQ`.
    `SubscriptionUpper` (TDMQ 2.7.2): `<subscription>-RETRY` and `…-DLQ`. `SubscriptionLower` (TDMQ
    2.6.1): `<subscription>-retry` and `…-dlq`. `RocketMQ`: `%RETRY%<subscription>` and
    `%DLQ%<subscription>`. With all but the first, a subscription name can be used for one topic of
    a Pulsar namespace only. Defaults to Pulsar."""

    retry_topic: model.TopicField | None = None
    """Full name of the retry topic, in the tenant and namespace of the source topic; the connection
    must allow it. No `deletionPolicy` deletes a topic whose name is not that of the scheme.
    Defaults to the name of the scheme."""

    dead_letter_topic: model.TopicField | None = None
    """Full name of the dead-letter topic, in the tenant and namespace of the source topic; the
    connection must allow it. No `deletionPolicy` deletes a topic whose name is not that of the
    scheme. Defaults to the name of the scheme."""

    config_map: model.ObjectName | None = None
    """Name of the ConfigMap for consumers, in the namespace of the policy. Set it if tools such as
    kustomize change the names of objects, because they cannot change a derived name. Defaults to
    the name of the policy and `-redrive`."""


def _name(field: str, root: str, default: str = "") -> str:
    """Return the CEL expression of a field of `naming`; *default* if it is not set."""
    return f"(present({root}.naming.{field}) ? {root}.naming.{field} : '{default}')"


_FIELDS = ("retryTopic", "deadLetterTopic")


def _beside(field: str) -> model.Rule:
    name = _name(field, "self")
    namespace = "self.topic.substring(0, self.topic.lastIndexOf('/') + 1)"
    return model.Rule(
        f"{name} == '' || {name}.startsWith({namespace})",
        "retry and dead-letter topic must be in the tenant and namespace of their source topic",
        "use a topic of that namespace, or leave the name to the scheme",
        got=f'"\'" + {name} + "\'"',
    )


NAMING_RULES = (
    *map(_beside, _FIELDS),
    model.Rule(
        " && ".join(
            f"{_name(field, 'self', default)} == {_name(field, 'oldSelf', default)}"
            for field, default in (
                ("scheme", Scheme.PULSAR),
                *((name, "") for name in (*_FIELDS, "configMap")),
            )
        ),
        "`naming` of a policy is immutable: messages wait under the old names",
        "create another RetryPolicy with the other names once the topics of this one are drained",
    ),
)
"""Rules on the spec of a policy."""


def _within(name: str, most: timedelta, words: str) -> tuple[object, ...]:
    return bounded_duration(
        1,
        int(most.total_seconds()),
        f"{name} of an outage breaker must be from 1s to {words}",
        "choose a value within these bounds, or leave it out",
    )


ProbeInterval = Annotated[str, *_within("maxProbeInterval", MAX_INTERVAL, "1h")]
Pause = Annotated[str, *_within("maxPause", MAX_PAUSE, "7d")]

_FITS = model.Rule(
    "(has(self.minMessages) ? self.minMessages : 10) <= (has(self.window) ? self.window : 100)",
    "`minMessages` of an outage breaker must be at most its `window`",
    "reduce it, or increase the window",
)


class OutageMode(enum.StrEnum):
    """Reaction of consumers to an outage."""

    PAUSE = "Pause"
    NEVER = "Never"


class NotRetryable(enum.StrEnum):
    """Effect on the outage breaker of failures that a consumer dead-letters at once."""

    COUNT = "Count"
    IGNORE = "Ignore"


class OutageBreakerSpec(model.CheckedModel):
    """Pause of consumers in an outage of a service that they depend on."""

    RULES = (_FITS,)

    mode: Annotated[OutageMode, *model.one_of(OutageMode, "`mode` of an outage breaker")]
    """`Pause`: consumers pause in an outage. `Never`: they do not, even if `policyDefaults` of the
    connection enable it. Required beside the other fields."""

    min_messages: Annotated[int, Strict(), Field(ge=1, le=MAX_WINDOW)] = 10
    """Minimum number of different messages that failed for one cause before a consumer pauses.
    Their share of its latest outcomes must also reach `failurePercent`. 1 to 10000. Defaults to
    10."""

    failure_percent: Annotated[int, Strict(), Field(ge=1, le=100)] = 50
    """Percentage of failures for one cause among the latest outcomes from which a consumer pauses,
    1 to 100. Defaults to 50."""

    window: Annotated[int, Strict(), Field(ge=1, le=MAX_WINDOW)] = 100
    """Number of the latest outcomes that a consumer counts, 1 to 10000. Defaults to 100."""

    max_probe_interval: ProbeInterval = "30s"
    """Maximum interval between two messages that a paused consumer handles as probes, 1s to 1h. The
    first probe follows after 1s, later ones with back-off; the first success ends the outage.
    Defaults to 30s."""

    max_pause: Pause = "6h"
    """Time after which a consumer resumes even if the outage continues, 1s to 7d. Failures then use
    up retries, until a message succeeds. Defaults to 6h."""

    not_retryable: Annotated[
        NotRetryable, *model.one_of(NotRetryable, "`notRetryable` of an outage breaker")
    ] = NotRetryable.COUNT
    """`Count`: failures that the rules of a consumer dead-letter at once (`dead_letter_on`) count,
    too, so that a faulty release pauses instead of dead-lettering a whole backlog. `Ignore`: they
    are always dead-lettered. Defaults to `Count`."""

    def _check(self) -> None:
        self.to_limits()

    def to_limits(self) -> OutageLimits | None:
        """Return the limits for consumers; None if they never pause.

        Raises:
            InvalidSpecError: the values contradict each other.
        """
        limits = OutageLimits(
            min_messages=self.min_messages,
            failure_percent=self.failure_percent,
            window=self.window,
            max_probe_interval=parse_duration(self.max_probe_interval),
            max_pause=parse_duration(self.max_pause),
            count_not_retryable=self.not_retryable is NotRetryable.COUNT,
        )
        return limits if self.mode is OutageMode.PAUSE else None


# Bounds rather than a rule: only then the API server shows the refused number.
MaxRetries = Annotated[
    int,
    Strict(),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_RETRIES_LIMIT}),
    AfterValidator(model.refusing(check_max_retries)),
]


class DeletionPolicy(enum.StrEnum):
    """Effect of a deletion of the policy on its topics."""

    RETAIN = "Retain"
    REVOKE_GRANTS = "RevokeGrants"
    DELETE_IF_EMPTY = "DeleteIfEmpty"
    DELETE = "Delete"


class Choices(model.ApiModel):
    """Treatment of failed messages; a policy may leave these fields to its connection."""

    max_retries: MaxRetries | None = None
    """Number of retries of a failed message after its first delivery, 0 to 1000. With 3, a message
    is handled at most 4 times, and then dead-lettered. Defaults to the connection's
    `policyDefaults`, else 16."""

    # No default in the schema: a default member would remain beside the one that a user sets later.
    delay_ladder: DelayLadder | None = None
    """The delay before each retry: at most one of `preset`, `delays`, `fixed` and `exponential`.
    Defaults to the connection's `policyDefaults`, else the preset `TDMQ`."""

    delay_levels: Levels | None = None
    """Delays that consumers request by `level=k`, the k-th of them from 1; a higher level means the
    last. 1 to 100 delays, each from 1s to 10d. Defaults to the connection's `policyDefaults`, else
    to the 18 levels `1s 5s 10s 30s`, 1m to 10m by the minute, `20m 30m 1h 2h`. Example:
    `[1s, 5s, 10s]`."""

    deletion_policy: (
        Annotated[DeletionPolicy, *model.one_of(DeletionPolicy, "`deletionPolicy`")] | None
    ) = None
    """Effect of a deletion of the policy at the broker. `Retain`: none. `RevokeGrants`: it revokes
    the grants of redrive, and changes nothing else. `Delete`: it deletes the topics that redrive
    created with all their messages, and restores adopted ones. It retains topics whose name differs
    from the naming scheme, and topics with other durable subscriptions.
    `DeleteIfEmpty`: the same, but topics with messages are unchanged. The last two wait while
    clients are connected, at most 10 minutes. Defaults to the connection's `policyDefaults`, else
    Retain."""

    outage_breaker: OutageBreakerSpec | None = None
    """Pause of Python consumers while one of their dependencies is down, so that an outage uses up
    no retries. The annotation `redrive.io/ignore-outages-until` resumes them until a time. Defaults
    to the connection's `policyDefaults`, else consumers do not pause. Example: `{mode: Pause}`."""

    def completed(self, defaults: Choices | None) -> Self:
        """Return this with missing fields from *defaults*."""
        if defaults is None:
            return self
        missing = (name for name in Choices.model_fields if getattr(self, name) is None)
        return self.model_copy(update={name: getattr(defaults, name) for name in missing})


class PolicyDefaults(Choices):
    """Values for fields that policies of a connection leave out."""
