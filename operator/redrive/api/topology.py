"""Which topics a policy has beside its source, and how they are named."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, Strict, WithJsonSchema

from redrive.api.fields import TopicField
from redrive.api.model import ApiModel
from redrive.api.rules import QUOTED, Rule, refusing
from redrive.errors import InvalidSpecError
from redrive.policy.naming import Scheme

MAX_PARTITIONS = 1_000


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


class Retry(ApiModel):
    """The retry topic."""

    partitions: Partitions | None = None
    """How many partitions it has, 1 to 1000. Left out: as many as the source topic, also when that
    grows later. Partitions are only ever added."""


class DeadLetter(ApiModel):
    """What becomes of messages that have used up their retries."""

    enabled: Annotated[bool, Strict()] = True
    """Whether they are kept in the dead-letter topic. `false` discards them: there is no such
    topic, and consumers acknowledge a message for good once its retries are used up. Java
    consumers can't discard: without a dead-letter topic they retry for ever."""
