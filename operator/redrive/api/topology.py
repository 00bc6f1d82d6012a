"""Which topics a policy has beside its source, and what they keep."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    WithJsonSchema,
    model_validator,
)

from redrive.api.model import QUOTED, VALIDATIONS, ApiModel, Roles, Rule, Subscription, refusing
from redrive.api.policy_defaults import IS_DURATION, SECONDS, WRITTEN
from redrive.errors import InvalidSpecError
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.values import SIZE_PATTERN, parse_duration, parse_size

MAX_PARTITIONS = 1_000
MAX_TTL = timedelta(days=3_650)
MAX_MEGABYTES = 2**30
MIB = 2**20


def _check_partitions(count: int) -> int:
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidSpecError(
            f"a retry topic has from 1 to {MAX_PARTITIONS} partitions",
            got=count,
            remedy="choose a number within these bounds, or leave retry.partitions out to follow "
            "the source topic",
        )
    return count


Partitions = Annotated[
    int,
    Strict(),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_PARTITIONS}),
    AfterValidator(refusing(_check_partitions)),
]


def _check_ttl(text: str) -> str:
    if parse_duration(text) > MAX_TTL:
        raise InvalidSpecError(_NOT_TOO_LONG.problem, got=text[:64], remedy=_NOT_TOO_LONG.remedy)
    return text


def _check_retry_ttl(text: str) -> str:
    if timedelta(0) < parse_duration(text) <= MAX_DELAY:
        raise InvalidSpecError(_OUTLIVES.problem, got=text[:64], remedy=_OUTLIVES.remedy)
    return text


_NOT_TOO_LONG = Rule(
    f"!({WRITTEN}) || {SECONDS} <= {int(MAX_TTL.total_seconds())}",
    "a time to live or of retention is at most 3650d",
    "shorten it, or use 0s for ever",
    got=QUOTED,
)
_OUTLIVES = Rule(
    f"!({WRITTEN}) || [{SECONDS}].all(s, s == 0 || s > {int(MAX_DELAY.total_seconds())})",
    "a time to live of the retry topic of up to 10d drops retries that wait as long as allowed",
    "use 0s for ever, or more than 10d",
    got=QUOTED,
)
Ttl = Annotated[
    str, Field(max_length=40), IS_DURATION, _NOT_TOO_LONG, AfterValidator(refusing(_check_ttl))
]
RetryTtl = Annotated[Ttl, _OUTLIVES, AfterValidator(refusing(_check_retry_ttl))]


Megabytes = Annotated[int, Strict(), Field(ge=1, le=MAX_MEGABYTES)]
"""The old way to write a size."""


def _check_size(text: str) -> str:
    if not MIB <= parse_size(text) <= MAX_MEGABYTES * MIB:
        raise InvalidSpecError(_IN_BOUNDS.problem, got=text, remedy=_IN_BOUNDS.remedy)
    return text


_BYTES = "quantity(self)"
_IN_BOUNDS = Rule(
    f"!isQuantity(self) || ({_BYTES}.compareTo(quantity('1Mi')) >= 0"
    f" && {_BYTES}.compareTo(quantity('1024Ti')) <= 0)",
    "a size is from 1Mi to 1024Ti",
    "choose one within these bounds",
    got=QUOTED,
)
Size = Annotated[
    str,
    WithJsonSchema({"type": "string", "maxLength": 17, "pattern": SIZE_PATTERN}),
    _IN_BOUNDS,
    AfterValidator(refusing(_check_size)),
]


class RetryTopic(ApiModel):
    """The retry topic."""

    partitions: Partitions | None = None
    """How many partitions it has, 1 to 1000. Left out: as many as the source topic, also when that
    grows later. Partitions are only ever added."""

    message_ttl: Annotated[RetryTtl, Field(alias="messageTTL")] = "0s"
    """How long a message may wait before the broker drops it, counted from its publication: `0s`
    for ever, else more than 10d, the longest delay of a retry. Left out: 0s."""

    @property
    def ttl_seconds(self) -> int:
        """Return `message_ttl` in seconds."""
        return int(parse_duration(self.message_ttl).total_seconds())


def _check_retention_time(text: str) -> str:
    if parse_duration(text) < timedelta(minutes=1):
        raise InvalidSpecError(_A_MINUTE.problem, got=text[:64], remedy=_A_MINUTE.remedy)
    return text


_A_MINUTE = Rule(
    f"!({WRITTEN}) || {SECONDS} >= 60",
    "a time of retention is at least 1m, because brokers count it in minutes",
    "use 1m or more, or leave it out for no limit of time",
    got=QUOTED,
)
RetentionTime = Annotated[Ttl, _A_MINUTE, AfterValidator(refusing(_check_retention_time))]


class Retention(ApiModel):
    """What is kept of messages that are acknowledged, until the first of the limits is reached."""

    time: RetentionTime | None = None
    """For how long after their acknowledgement, 1m to 3650d; brokers round it up to minutes. Left
    out: without limit of time."""

    size: Size | None = None
    """How much at most, `1Mi` to `1024Ti`; brokers round it up to MiB. Left out: without limit of
    size. Example: `10Gi`."""

    megabytes: Megabytes | None = None
    """Deprecated: `size`."""

    @property
    def bytes(self) -> int | None:
        """Return the limit of size; None for none."""
        return _bytes(self.size, self.megabytes)

    def to_broker(self) -> dict[str, int]:
        """Write it as the broker does, in minutes and MB; -1 is no limit."""
        seconds = None if self.time is None else parse_duration(self.time).total_seconds()
        return {
            "retentionTimeInMinutes": -1 if seconds is None else math.ceil(seconds / 60),
            "retentionSizeInMB": -1 if self.bytes is None else math.ceil(self.bytes / MIB),
        }


def _bytes(size: str | None, megabytes: int | None) -> int | None:
    if size is not None:
        return parse_size(size)
    return None if megabytes is None else megabytes * MIB


_SOME_SIZE = Rule(
    "has(self.size) || has(self.megabytes)",
    "a backlog quota has a size",
    "give it one, like 10Gi",
)


class BacklogQuota(ApiModel):
    """How much the topic holds. Once it is full, it refuses messages and drops none."""

    model_config = ConfigDict(
        json_schema_extra={VALIDATIONS: [_SOME_SIZE.to_schema()], "minProperties": 1}
    )

    size: Size | None = None
    """How much, `1Mi` to `1024Ti`; it has to be given. A message that can't be dead-lettered
    because of it is handled again by its consumer, until there is room. Example: `10Gi`."""

    megabytes: Megabytes | None = None
    """Deprecated: `size`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(BacklogQuota._check_size)(self)
        return self

    def _check_size(self) -> None:
        if self.size is None and self.megabytes is None:
            raise InvalidSpecError(_SOME_SIZE.problem, got="none", remedy=_SOME_SIZE.remedy)

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return _bytes(self.size, self.megabytes) or 0


class DeadLetterMode(enum.StrEnum):
    """What becomes of messages that have used up their retries."""

    KEEP = "Keep"
    DISCARD = "Discard"


_MORE_THAN_THE_QUOTA = Rule(
    "!has(self.retention) || !has(self.backlogQuota) || !has(self.retention.size)"
    " || !has(self.backlogQuota.size) || !isQuantity(self.retention.size)"
    " || !isQuantity(self.backlogQuota.size)"
    " || quantity(self.retention.size).isGreaterThan(quantity(self.backlogQuota.size))",
    "retention.size has to be more than backlogQuota.size, or the broker refuses both",
    "raise retention.size, or lower backlogQuota.size",
    got="'retention ' + self.retention.size + ', quota ' + self.backlogQuota.size",
)


class DeadLetterTopic(ApiModel):
    """What becomes of messages that have used up their retries."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_MORE_THAN_THE_QUOTA.to_schema()]})

    mode: DeadLetterMode | None = None
    """`Keep`: they are kept in the dead-letter topic. `Discard`: there is no such topic, and
    consumers acknowledge a message for good once its retries are used up. Java consumers can't
    discard: without a dead-letter topic they retry for ever. Left out: Keep."""

    enabled: Annotated[bool, Strict()] | None = None
    """Deprecated: `mode`, which wins where both are given."""

    partitions: Partitions | None = None
    """How many partitions the topic has, 1 to 1000, where redrive makes it; they are only ever
    added. Left out: it has none, which keeps dead letters in the order in which they came."""

    subscription: Subscription | None = None
    """The durable subscription that keeps dead letters, and that replays read. Name that of a
    consumer of your own here, if one acknowledges dead letters. Left out: `redrive`."""

    message_ttl: Annotated[Ttl, Field(alias="messageTTL")] = "0s"
    """How long a dead letter is kept before the broker drops it, up to 3650d. Left out: `0s`, for
    ever."""

    retention: Retention | None = None
    """What is kept of dead letters that were acknowledged, by a replay for example. Left out: what
    the Pulsar namespace says."""

    backlog_quota: BacklogQuota | None = None
    """How much the dead-letter topic holds. Left out: what the Pulsar namespace says, but a quota
    that drops dead letters is replaced by one that refuses them."""

    sequenced: Annotated[bool, Strict()] = False
    """Whether later messages of a key that has a dead letter follow it, unhandled, until a replay
    has brought all of them back in order. Needs `ordering: PerKey`, and consumers in Python, which
    are restarted for a change. Left out: they are handled."""

    reader_roles: Roles = ()
    """The Pulsar roles of people and tools that read dead letters. Each is granted `consume` on
    the dead-letter topic; the connection has to allow it. Example: `[oncall]`."""

    @property
    def ttl_seconds(self) -> int:
        """Return `message_ttl` in seconds."""
        return int(parse_duration(self.message_ttl).total_seconds())

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(DeadLetterTopic._check_sizes)(self)
        return self

    def _check_sizes(self) -> None:
        kept = None if self.retention is None else self.retention.bytes
        if kept is not None and self.backlog_quota and kept <= self.backlog_quota.bytes:
            raise InvalidSpecError(
                _MORE_THAN_THE_QUOTA.problem,
                got=f"{kept} and {self.backlog_quota.bytes} bytes",
                remedy=_MORE_THAN_THE_QUOTA.remedy,
            )

    @property
    def keeps(self) -> bool:
        """Whether dead letters are kept."""
        if self.mode is not None:
            return self.mode is DeadLetterMode.KEEP
        return self.enabled is not False

    @property
    def edits(self) -> Iterator[str]:
        """Yield what to edit where fields are in use that others have replaced."""
        # true was the default, which the API server wrote into every object.
        if self.mode is None and self.enabled is False:
            yield "replace deadLetter.enabled by deadLetter.mode: Discard"
        for name, part in (("retention", self.retention), ("backlogQuota", self.backlog_quota)):
            if part is not None and part.size is None and part.megabytes is not None:
                yield (
                    f"replace deadLetter.{name}.megabytes by "
                    f"deadLetter.{name}.size: {part.megabytes}Mi"
                )
