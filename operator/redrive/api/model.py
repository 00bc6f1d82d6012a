"""Base of all models of the API: rules, unions, enum fields, shared field types, parsing.

A rule on a field is an annotation of its type. The API server checks it at admission, in CEL, and
the model checks it again when an object is read. Messages have the three parts of `redrive.errors`:
the problem, the value, the remedy.

Absent, `null` and `{}` are equivalent. Server-side apply turns an object that loses its last field
into `null`, or into `{}` since Kubernetes 1.36, so the presence of an object has no meaning. Models
drop empty objects before validation. Rules use `present(self.field)` in place of `has(self.field)`,
which `redrive.api.crds` expands by the schema of the field.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    InstanceOf,
    PlainSerializer,
    Strict,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from redrive.errors import NOTHING, InvalidSpecError, RedriveError
from redrive.policy import naming


class ApiModel(BaseModel):
    """Part of a manifest as an immutable value, with keys in camelCase."""

    model_config = ConfigDict(
        defer_build=True,  # commands and jobs use few of the models
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Rules on several fields, beside those of each field."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        return {k: v for k, v in data.items() if not is_empty(v)}

    def to_manifest(self) -> dict[str, Any]:
        """Return the value in the form of a manifest, without None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def is_empty(value: object) -> bool:
    """Return True for None, and for an object without values at any depth."""
    return value is None or (isinstance(value, Mapping) and all(map(is_empty, value.values())))


class StatusModel(ApiModel):
    """Status, written by operators only. A newer one may add keys, so unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


VALIDATIONS = "x-kubernetes-validations"
_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Rule:
    """A rule that the API server checks at admission.

    Attributes:
        holds: CEL expression over `self`, and over `oldSelf` for a rule about changes. It may use
            `present` (see the module).
        problem: the problem if it does not hold.
        remedy: the remedy.
        got: CEL expression of the value as a string; empty shows no value.
    """

    holds: str
    problem: str
    remedy: str
    got: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Return the rule as an entry of `x-kubernetes-validations`."""
        written = {"rule": self.holds, "message": f"{self.problem}; {self.remedy}"}
        if self.got:
            before, after = json.dumps(f"{self.problem}; got "), json.dumps(f"; {self.remedy}")
            # Adjacent literals are joined. If the expression fails, because the value has a line
            # break, the API server shows the message above.
            message = f"{before} + {self.got} + {after}".replace('" + "', "")
            written["messageExpression"] = message
        return written

    def error(self, got: object = NOTHING) -> InvalidSpecError:
        """Return the error of an object that was read and breaks the rule; *got* is its value."""
        return InvalidSpecError(self.problem, got=got, remedy=self.remedy)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        written = handler(schema)
        written.setdefault(VALIDATIONS, []).append(self.to_schema())
        return written


@dataclass(frozen=True)
class Form:
    """The form of a string, as a regular expression that RE2 and Python interpret equally.

    It must match the whole string. It becomes the schema's `pattern`, or a CEL rule if the value
    may have to be hidden.

    Attributes:
        hides: regular expression of a part that may be a secret; a value that contains it is not
            shown. Empty shows every value.
    """

    regex: str
    problem: str
    remedy: str
    hides: str = ""

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(refusing(self._check), handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        whole = f"^(?:{self.regex})$"
        if not self.hides:
            return handler(schema) | {"pattern": whole}
        # With a pattern the API server would show the value.
        got = f"(self.matches({json.dumps(self.hides)}) ? {json.dumps(_HIDDEN)} : {QUOTED})"
        rule = Rule(f"self.matches({json.dumps(whole)})", self.problem, self.remedy, got=got)
        return rule.__get_pydantic_json_schema__(schema, handler)

    def _check(self, text: str) -> str:
        if re.fullmatch(self.regex, text, re.ASCII):
            return text
        if self.hides and re.search(self.hides, text):
            raise InvalidSpecError(f"{self.problem}; got {_HIDDEN}", remedy=self.remedy)
        raise InvalidSpecError(self.problem, got=text[:128], remedy=self.remedy)


_HIDDEN = "a hidden value, which may contain a secret"
QUOTED = '"\'" + self + "\'"'
"""CEL expression that quotes a string as Python does."""


def refusing(check: Callable[[_T], _U]) -> Callable[[_T], _U]:
    """Return *check*, which raises errors of redrive, as a validator for pydantic."""

    def validator(value: _T) -> _U:
        try:
            return check(value)
        except RedriveError as error:
            raise ValueError(str(error)) from error

    return validator


def at_most_one(name: str, *fields: str) -> Rule:
    """Return the rule that at most one of *fields* is set; setting none means the default.

    Args:
        name: the union, for the message.
        fields: names as in a manifest.
    """
    fields_present = ", ".join(f"present(self.{field})" for field in fields)
    names = " + ".join(f"(present(self.{field}) ? '{field} ' : '')" for field in fields)
    return Rule(
        f"[{fields_present}].filter(given, given).size() <= 1",
        f"`{name}` must be at most one of {', '.join(fields)}",
        "keep one of them",
        got=f'"\'" + ({names}).trim() + "\'"',  # `join` exceeds the cost limit of rules
    )


class CheckedModel(ApiModel):
    """A model whose fields depend on each other."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        try:
            self._check()
        except RedriveError as error:
            raise ValueError(str(error)) from error
        return self

    def _check(self) -> None:
        """Check all fields together.

        Raises:
            InvalidSpecError: they contradict each other.
        """
        raise NotImplementedError


class OneOf(CheckedModel):
    """A union with at most one field. Without any it is empty, as if it were left out."""

    def _check(self) -> None:
        fields = type(self).model_fields.items()
        names = [field.alias for name, field in fields if getattr(self, name) is not None]
        if len(names) > 1:
            raise self.RULES[0].error(" ".join(map(str, names)))


def of_its_type(name: str, members: Mapping[str, str]) -> Rule:
    """Return the rule that a typed union has the field of its `type`, and no other.

    Args:
        name: the union, for the message.
        members: value of `type` → its field; other values have no field.
    """
    pairs = [f"(self.type == '{word}') == present(self.{field})" for word, field in members.items()]
    fields = ", ".join(f"{field} with type {word}" for word, field in members.items())
    return Rule(
        f"!has(self.type) || {' && '.join(pairs)}",
        f"`{name}` must have the field of its type and no other",
        f"set {fields}",
        got='"\'" + self.type + "\'"',
    )


class TypedUnion(CheckedModel):
    """A union whose field `type` selects its other field."""

    MEMBERS: ClassVar[Mapping[str, str]]
    """Value of `type` → its field."""

    def _check(self) -> None:
        word = self.type  # type: ignore[attr-defined]  # each union has its own values
        fields = {info.alias: getattr(self, name) for name, info in type(self).model_fields.items()}
        for value, field in self.MEMBERS.items():
            if (word == value) != (fields[field] is not None):
                raise self.RULES[0].error(str(word))


E = TypeVar("E", bound=enum.StrEnum)


def one_of(kind: type[E], field: str, form: str = "") -> tuple[object, ...]:
    """Return the annotations of a field with the values of *kind*.

    Args:
        kind: its values.
        field: the field, for the message.
        form: description of its values for the message. Defaults to all of them.
    """
    *words, last = kind
    form = form or f"{', '.join(words)} or {last}"
    problem, remedy = f"{field} must be {form}", f"use one of {', '.join(kind)}"

    def parse(value: object) -> E:
        member = next((word for word in kind if word == value), None)
        if member is None:
            raise InvalidSpecError(problem, got=str(value)[:64], remedy=remedy)
        return member

    schema = WithJsonSchema({"type": "string", "enum": [word.value for word in kind]})
    return schema, BeforeValidator(refusing(parse)), PlainSerializer(str)


_M = TypeVar("_M", bound=ApiModel)


def parse_spec(model: type[_M], body: Mapping[str, Any]) -> _M:
    """Parse the spec of *body*, an object of the API.

    Admission refuses nearly all invalid objects, but an object may be older than a rule.

    Raises:
        InvalidSpecError: a field is missing, unknown or invalid. A value is shown only if it
            violates a rule of redrive: other values might be misplaced secrets.
    """
    return parse(model, body.get("spec") or {}, "spec")


def parse(model: type[_M], fields: Mapping[str, Any], root: str) -> _M:
    """Parse *fields*; messages have their path from *root*.

    Raises:
        InvalidSpecError: see `parse_spec`.
    """
    try:
        return model.model_validate(dict(fields))
    except ValidationError as error:
        texts = [
            root
            + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
            + f": {text}"
            for path, _, text in map(_problem, error.errors())
        ]
        problem, _, remedy = " | ".join(texts).rpartition("; ")
        raise InvalidSpecError(problem, remedy=remedy) from error


class FieldProblem(NamedTuple):
    """Problem of one field of a spec.

    Attributes:
        path: its steps from the spec, names as in a manifest.
        type: type of the error in pydantic: `missing`, `extra_forbidden`, `value_error` for a rule
            of redrive, or another.
        text: problem, value and remedy.
    """

    path: tuple[int | str, ...]
    type: str
    text: str


def field_problems(model: type[ApiModel], fields: Mapping[str, Any]) -> list[FieldProblem]:
    """Return the problems of all fields that `parse` would refuse."""
    try:
        model.model_validate(dict(fields))
    except ValidationError as error:
        return [_problem(details) for details in error.errors()]
    return []


def _problem(details: ErrorDetails) -> FieldProblem:
    match details["type"]:
        case "value_error":
            text = str(details["ctx"]["error"])
        case "missing":
            text = "is missing; add it"
        case "extra_forbidden":
            text = "is not a known field; remove it, or correct its name"
        case _:
            expected = details["msg"][:1].lower() + details["msg"][1:]
            # Lists are parsed as tuples.
            expected = expected.replace("tuple ", "list ").replace(" after validation", "")
            kind = type(details["input"]).__name__
            text = f"{expected}; got a value of type {kind}; correct it"
    return FieldProblem(details["loc"], details["type"], text)


MAX_TOPIC = 1_024
SET = {"x-kubernetes-list-type": "set"}
"""Schema of a list without order and duplicates."""
BY_NAME = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}


def items(most: int, kind: dict[str, Any], *, least: int | None = None) -> Any:  # noqa: ANN401
    """Return the bounds of a list whose items the API server merges as *kind*: SET or BY_NAME."""
    return Field(min_length=least, max_length=most, json_schema_extra=kind)


"""Schema of a list of objects with unique names; server-side apply merges them by name."""

ObjectName = Annotated[
    str,
    Field(max_length=253),
    Form(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
        "the name of a Kubernetes object must be lower-case letters, digits, '-' and '.'",
        "use the name that kubectl shows",
    ),
]

LabelKey = Annotated[
    str,
    Field(max_length=317),
    Form(
        r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[a-zA-Z0-9]([-_.a-zA-Z0-9]{0,61}[a-zA-Z0-9])?",
        "a label key must be letters, digits, '-', '_' and '.', optionally after a domain and '/'",
        "use the key that kubectl shows",
    ),
]

Role = Annotated[
    str,
    Field(max_length=255),
    Form(
        r"[^*\x00-\x1f\x7f]+",
        "a role must be one name, neither a pattern nor empty",
        "list each role",
    ),
]


def _short_together(field: str, most: int) -> tuple[object, ...]:
    """Return the annotations of a list of roles with at most *most* characters in total.

    The broker stores the grants of a Pulsar namespace in one record, repeated for each topic.
    """
    rule = Rule(
        f"self.map(role, role.size()).sum() <= {most}",
        f"`{field}` must have at most {most} characters in all roles together",
        "use shorter roles, or fewer",
    )

    def check(roles: tuple[str, ...]) -> tuple[str, ...]:
        length = sum(map(len, roles))
        if length > most:
            raise rule.error(length)
        return roles

    return rule, AfterValidator(refusing(check))


ConsumerRoles = Annotated[
    tuple[Role, ...],
    items(32, SET),
    *_short_together("consumerRoles", 2_048),
]
ReaderRoles = Annotated[
    tuple[Role, ...],
    items(16, SET),
    *_short_together("readerRoles", 1_024),
]


def parse_topic(value: object) -> naming.TopicName:
    """Parse the full name of a Pulsar topic."""
    if isinstance(value, naming.TopicName):
        return value
    return naming.TopicName.parse_whole(value if isinstance(value, str) else repr(value))


PULSAR_TOPIC = r"persistent://[-=:.\w]+/[-=:.\w]+/[^/\s\x00-\x1f\x7f]{1,255}"
PULSAR_TOPIC_RULES = (
    Rule(
        r"!self.matches('/[.][.]?(/|$)')",
        "a topic must be written as persistent://tenant/namespace/name, the name without slashes "
        f"or white space and of at most {naming.MAX_NAME} characters, no part . or ..",
        "use the full name of a persistent topic",
        got=QUOTED,
    ),
    Rule(
        r"!self.matches('-partition-\\p{Nd}+$')",
        "a policy applies to a whole topic, not to one partition of it",
        "use the topic without the -partition-N at its end",
        got=QUOTED,
    ),
    Rule(
        r"!self.matches('/(_|%(25)*5[fF]){2}[^/]*$')"
        f" && !self.contains('{naming.PENDING_ACKS}')"
        f" && !self.startsWith('persistent://{naming.SYSTEM_NAMESPACE}/')"
        f" && !self.matches('^persistent://pulsar/[^/]+/{naming.HEALTH_CHECK}$')",
        naming.SYSTEM_TOPIC,
        "use a topic of an application",
        got=QUOTED,
    ),
)
TopicField = Annotated[
    InstanceOf[naming.TopicName],
    WithJsonSchema({"type": "string", "maxLength": MAX_TOPIC, "pattern": f"^{PULSAR_TOPIC}$"}),
    *PULSAR_TOPIC_RULES,
    BeforeValidator(refusing(parse_topic)),
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
        f"a subscription must have 1 to {naming.MAX_NAME} characters without slashes or white "
        "space, and not be . or .., because topic names and URLs contain it",
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
        "a key of a Secret must be letters, digits, '-', '_' and '.'",
        "use the key, not its value",
    ),
]


ApprovalAbove = Annotated[int, Strict(), Field(ge=0, le=1_000_000_000)]
"""Number of messages that a Replay may move without approval."""


class SecretKeyRef(ApiModel):
    """One key of a Secret."""

    name: ObjectName
    """Name of the Secret."""

    key: ObjectKey
    """Key within the Secret. Example: `token`, or `client-secret`."""


class TokenSource(ApiModel):
    """Source of a token (a JWT); the token itself is never in a manifest."""

    secret_ref: SecretKeyRef
    """The Secret and its key that contain the token, as text."""


class CaKind(enum.StrEnum):
    """Kind of object with certificate authorities."""

    CONFIG_MAP = "ConfigMap"
    SECRET = "Secret"  # noqa: S105  a kind of object


class CaRef(ApiModel):
    """Certificate authorities, as PEM under a key of a ConfigMap or Secret."""

    kind: CaKind = CaKind.CONFIG_MAP
    """Kind of the object. For the operator it must be in the namespace of the BrokerConnection, for
    replay jobs in that of the Replay. Defaults to ConfigMap."""

    name: ObjectName
    """Name of the object."""

    key: ObjectKey
    """Key within it. Example: `ca.crt`."""


class Tls(ApiModel):
    """Verification of the broker's certificate. Its host name is always verified."""

    ca_ref: CaRef
    """Certificate authorities to trust, in place of those of the image."""
