"""How a policy's topics are named: each by a name that is given, or by a scheme.

The scheme may be left to the connection. It is on record in the status of a policy from before its
first topic is created, and never changes then: messages wait under these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from redrive.api.fields import TopicField
from redrive.api.model import ApiModel
from redrive.api.rules import Rule, refusing
from redrive.policy.naming import Scheme


def _scheme(value: object) -> Scheme:
    return Scheme.parse(value if isinstance(value, str) else repr(value))


SchemeField = Annotated[
    Scheme,
    WithJsonSchema({"type": "string", "enum": [scheme.value for scheme in Scheme]}),
    BeforeValidator(refusing(_scheme)),
    PlainSerializer(str),
]


NAMING_SCHEME = "namingScheme"
"""The field of a policy's status that records the scheme."""


class Naming(ApiModel):
    """How retry and dead-letter topic are named: by a scheme, or each by a name that is given."""

    scheme: SchemeField | None = None
    """Names what is not given. `pulsar`: `<topic>-<subscription>-RETRY` and `…-DLQ`.
    `tdmq-2.7.2`: `<subscription>-RETRY` and `…-DLQ`. `tdmq-2.6.1`: `<subscription>-retry` and
    `…-dlq`. `rocketmq`: `%RETRY%<subscription>` and `%DLQ%<subscription>`. With all but the first,
    a subscription's name can be used for one topic of a namespace only. Left out: what the
    connection's `policyDefaults` say when the policy is provisioned first, else `pulsar`;
    `status.namingScheme` shows it, and it never changes."""

    retry_topic: TopicField | None = None
    """Full name of the retry topic, in the tenant and namespace of the source topic; the
    connection has to allow it. Left out: the scheme names it."""

    dead_letter_topic: TopicField | None = None
    """Full name of the dead-letter topic, in the tenant and namespace of the source topic; the
    connection has to allow it. Left out: the scheme names it."""


class DefaultNaming(ApiModel):
    """How topics are named where a policy leaves it out."""

    scheme: SchemeField | None = None
    """The scheme, as in `naming.scheme` of a policy. It is for policies that are provisioned from
    then on; older ones keep theirs, because messages wait under their names (condition
    `NamingSchemeKept`). Left out: `pulsar`."""


_FIELDS = ("retryTopic", "deadLetterTopic")


def _given(field: str, of: str) -> str:
    """Return the CEL expression for a field of `naming`; an empty string where it is not given."""
    return f"(has({of}.naming) && has({of}.naming.{field}) ? {of}.naming.{field} : '')"


def _beside(field: str) -> Rule:
    given = _given(field, "self")
    namespace = "self.topic.substring(0, self.topic.lastIndexOf('/') + 1)"
    return Rule(
        f"{given} == '' || {given}.startsWith({namespace})",
        "retry and dead-letter topic lie in the tenant and namespace of their source topic",
        "name a topic of that namespace, or leave the name to the scheme",
        got=f'"\'" + {given} + "\'"',
    )


def _unchanged(holds: str) -> Rule:
    return Rule(
        holds,
        "the naming of a policy can't change: messages wait under the old names",
        "make another RetryPolicy with the other names once this one's topics are drained",
    )


GIVEN_NAMES = (
    *map(_beside, _FIELDS),
    _unchanged(" && ".join(f"{_given(f, 'self')} == {_given(f, 'oldSelf')}" for f in _FIELDS)),
)
"""Rules on the spec of a policy."""

_SCHEME, _BEFORE = (_given("scheme", f"{of}.spec") for of in ("self", "oldSelf"))
_RECORDED, _RECORDED_BEFORE = (
    f"(has({of}.status) && has({of}.status.namingScheme) ? {of}.status.namingScheme : '')"
    for of in ("self", "oldSelf")
)
_KEPT = (
    "(has(oldSelf.status) && has(oldSelf.status.retryTopic) && "
    f"{_RECORDED_BEFORE} == '' ? '{Scheme.PULSAR}' : {_RECORDED_BEFORE})"
)
SAME_SCHEME = (
    _unchanged(f"{_SCHEME} == '' || {_RECORDED} == '' || {_SCHEME} == {_RECORDED}"),
    # One that is taken away has to be known still.
    _unchanged(
        f"{_SCHEME} == {_BEFORE} || ({_BEFORE} == '' ? {_KEPT} == '' || {_SCHEME} == {_KEPT}"
        f" : {_SCHEME} == '' && ({_BEFORE} == '{Scheme.PULSAR}' || {_RECORDED_BEFORE} != ''))"
    ),
)
"""Rules on a whole policy, of which the first holds for its status too."""


def kept_scheme(status: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme that a policy was provisioned with; None where it was not yet.

    Args:
        status: of the policy. Before it held the scheme, the schema's default stood in each policy
            that named none: `pulsar`.
    """
    if status.get(NAMING_SCHEME):
        return Scheme(status[NAMING_SCHEME])
    return Scheme.PULSAR if "retryTopic" in status else None
