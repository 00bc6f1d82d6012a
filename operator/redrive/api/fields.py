"""Types of fields that more than one kind of object has."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    Strict,
    WithJsonSchema,
)

from redrive.api.model import ApiModel
from redrive.api.rules import QUOTED, Form, Rule, refusing
from redrive.policy import naming

MAX_TOPIC = 1_024
MAX_LIST = 256
SET = {"x-kubernetes-list-type": "set"}
"""Schema of a list in which order says nothing, and nothing stands twice."""

ObjectName = Annotated[
    str,
    Field(max_length=253),
    Form(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
        "the name of a Kubernetes object is lower-case letters, digits, '-' and '.'",
        "give the name as kubectl shows it",
    ),
]

LabelKey = Annotated[
    str,
    Field(max_length=317),
    Form(
        r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?",
        "a key is letters, digits, '-', '_' and '.', which may follow the name of a domain and '/'",
        "give the key as kubectl shows it",
    ),
]

Role = Annotated[
    str,
    Field(max_length=255),
    Form(
        r"[^*\x00-\x1f\x7f]+",
        "a role is one name, not a pattern and not empty",
        "name each role",
    ),
]


Roles = Annotated[tuple[Role, ...], Field(max_length=MAX_LIST, json_schema_extra=SET)]


def _topic(value: object) -> naming.TopicName:
    if isinstance(value, naming.TopicName):
        return value
    return naming.TopicName.parse_whole(value if isinstance(value, str) else repr(value))


TopicField = Annotated[
    naming.TopicName,
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": MAX_TOPIC,
            "pattern": r"^persistent://[-=:.\w]+/[-=:.\w]+/[^/\s\x00-\x1f\x7f]{1,255}$",
        }
    ),
    Rule(
        r"!self.matches('/[.][.]?(/|$)')",
        "a topic is written persistent://tenant/namespace/name, the name without slashes or "
        f"white space and of at most {naming.MAX_NAME} characters, no part . or ..",
        "give the full name of a persistent topic",
        got=QUOTED,
    ),
    Rule(
        r"!self.matches('-partition-\\p{Nd}+$')",
        "a policy is for a whole topic, not for one partition of it",
        "name the topic without the -partition-N at its end",
        got=QUOTED,
    ),
    Rule(
        r"!self.matches('/(_|%(25)*5[fF]){2}[^/]*$')"
        f" && !self.contains('{naming.PENDING_ACKS}')"
        f" && !self.startsWith('persistent://{naming.SYSTEM_NAMESPACE}/')"
        f" && !self.matches('^persistent://pulsar/[^/]+/{naming.HEALTH_CHECK}$')",
        naming.SYSTEM_TOPIC,
        "name a topic of an application",
        got=QUOTED,
    ),
    BeforeValidator(refusing(_topic)),
    PlainSerializer(str),
]


Subscription = Annotated[
    str,
    Field(
        max_length=naming.MAX_NAME,
        json_schema_extra={"pattern": r"^[^/\s\x00-\x1f\x7f]+$"},
    ),
    Rule(
        r"!self.matches('[\\p{Z}\\x85]') && !(self in ['.', '..'])",
        f"a subscription is 1 to {naming.MAX_NAME} characters without slashes or white space, and "
        "not . or .., because topics and addresses are made of it",
        "use another subscription name",
        got=QUOTED,
    ),
    Rule(
        f"!self.startsWith('{naming.SYSTEM_PREFIX}') && !self.contains('{naming.PENDING_ACKS}')",
        naming.SYSTEM_SUBSCRIPTION,
        "use another subscription name",
        got=QUOTED,
    ),
    AfterValidator(refusing(naming.check_subscription)),
]


ObjectKey = Annotated[
    str,
    Field(max_length=253),
    Form(
        r"[-._a-zA-Z0-9]+",
        "a key of a Secret is letters, digits, '-', '_' and '.'",
        "give the key, not what the Secret holds under it",
    ),
]


ApprovalAbove = Annotated[int, Strict(), Field(ge=0, le=1_000_000_000)]
"""How many messages a Replay may move without approval."""


class SecretKeyRef(ApiModel):
    """One key of a Secret."""

    name: ObjectName
    """Name of the Secret."""

    key: ObjectKey
    """Key within the Secret, for example `token`."""


class TokenSource(ApiModel):
    """Where a token (a JWT) lies; a token itself never stands in a manifest."""

    secret_ref: SecretKeyRef
    """The Secret and the key in it that hold the token, as text."""
