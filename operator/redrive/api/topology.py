"""Which topics a policy has beside its source, and how they are named."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, Strict, WithJsonSchema

from redrive.api.fields import MAX_LIST, Role, TopicField
from redrive.api.ladder import IS_DURATION, SECONDS, WRITTEN
from redrive.api.model import ApiModel
from redrive.api.rules import QUOTED, Rule, refusing
from redrive.errors import InvalidSpecError
from redrive.policy import durations
from redrive.policy.ladder import MAX_DELAY
from redrive.policy.naming import Scheme

MAX_PARTITIONS = 1_000
MAX_TTL = timedelta(days=3_650)
MAX_MEGABYTES = 2**30


def _scheme(value: object) -> Scheme:
    return Scheme.parse(value if isinstance(value, str) else repr(value))


SchemeField = Annotated[
    Scheme,
    WithJsonSchema({"type": "string", "maxLength": 64}),
    Field(validate_default=True),
    Rule(
        f"self in {json.dumps(list(Scheme))}",
        "the naming scheme is an unknown one",
        f"use one of {', '.join(Scheme)}",
        got=QUOTED,
    ),
    BeforeValidator(refusing(_scheme)),
    PlainSerializer(str),
]


class Naming(ApiModel):
    """How retry and dead-letter topic are named: by a scheme, or each by a name that is given."""

    scheme: SchemeField = Scheme.PULSAR
    """Names what is not given. `pulsar`: `<topic>-<subscription>-RETRY` and `…-DLQ`.
    `tdmq-2.7.2`: `<subscription>-RETRY` and `…-DLQ`. `tdmq-2.6.1`: `<subscription>-retry` and
    `…-dlq`. `rocketmq`: `%RETRY%<subscription>` and `%DLQ%<subscription>`. With all but the first,
    a subscription's name can be used for one topic of a namespace only."""

    retry_topic: TopicField | None = None
    """Full name of the retry topic, in the tenant and namespace of the source topic; the
    connection has to allow it. Left out: the scheme names it."""

    dead_letter_topic: TopicField | None = None
    """Full name of the dead-letter topic, in the tenant and namespace of the source topic; the
    connection has to allow it. Left out: the scheme names it."""


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
    if durations.parse(text) > MAX_TTL:
        raise InvalidSpecError(_NOT_TOO_LONG.problem, got=text[:64], remedy=_NOT_TOO_LONG.remedy)
    return text


def _check_retry_ttl(text: str) -> str:
    if timedelta(0) < durations.parse(text) <= MAX_DELAY:
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


def _check_megabytes(size: int) -> int:
    if not 1 <= size <= MAX_MEGABYTES:
        raise InvalidSpecError(
            f"a size is from 1 to {MAX_MEGABYTES} MB",
            got=size,
            remedy="choose a number within these bounds",
        )
    return size


Megabytes = Annotated[
    int,
    Strict(),
    WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_MEGABYTES}),
    AfterValidator(refusing(_check_megabytes)),
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
        return int(durations.parse(self.message_ttl).total_seconds())


class Retention(ApiModel):
    """What is kept of messages that are acknowledged, until the first of the limits is reached."""

    time: Ttl | None = None
    """For how long after their acknowledgement, up to 3650d. Left out: without limit of time."""

    megabytes: Megabytes | None = None
    """How many MB at most, 1 to 1073741824. Left out: without limit of size."""

    def to_broker(self) -> dict[str, int]:
        """Write it as the broker does, in minutes and MB; -1 is no limit."""
        minutes = -1 if self.time is None else int(durations.parse(self.time).total_seconds() / 60)
        size = -1 if self.megabytes is None else self.megabytes
        return {"retentionTimeInMinutes": minutes, "retentionSizeInMB": size}


class BacklogQuota(ApiModel):
    """How much the topic holds. Once it is full, it refuses messages and drops none."""

    megabytes: Megabytes
    """How many MB, 1 to 1073741824. A message that can't be dead-lettered because of it is handled
    again by its consumer, until there is room."""

    @property
    def bytes(self) -> int:
        """Return the size in bytes."""
        return self.megabytes * 1024 * 1024


class DeadLetterTopic(ApiModel):
    """What becomes of messages that have used up their retries."""

    enabled: Annotated[bool, Strict()] = True
    """Whether they are kept in the dead-letter topic. `false` discards them: there is no such
    topic, and consumers acknowledge a message for good once its retries are used up. Java
    consumers can't discard: without a dead-letter topic they retry for ever."""

    message_ttl: Annotated[Ttl, Field(alias="messageTTL")] = "0s"
    """How long a dead letter is kept before the broker drops it, up to 3650d. Left out: `0s`, for
    ever."""

    retention: Retention | None = None
    """What is kept of dead letters that were acknowledged, by a replay for example. Left out: what
    the Pulsar namespace says."""

    backlog_quota: BacklogQuota | None = None
    """How much the dead-letter topic holds. Left out: what the Pulsar namespace says, but a quota
    that drops dead letters is replaced by one that refuses them."""

    reader_roles: Annotated[tuple[Role, ...], Field(max_length=MAX_LIST)] = ()
    """The Pulsar roles of people and tools that read dead letters. Each is granted `consume` on
    the dead-letter topic; the connection has to allow it. Example: `[oncall]`."""

    @property
    def ttl_seconds(self) -> int:
        """Return `message_ttl` in seconds."""
        return int(durations.parse(self.message_ttl).total_seconds())
