"""Base of all models of the API: rules, unions, enum fields, shared field types, parsing.

A rule on a field is an annotation of its type. The API server checks it at admission, in CEL, and
the model checks it again when an object is read. Messages have the three parts that
`redrive.errors` gives to all of them: the problem, the value, the remedy.

Absent, `null` and `{}` mean the same. Server-side apply turns an object that loses its last field
into `null`, or into `{}` from Kubernetes 1.36 on, so no object has a meaning by its presence. The
models drop empty objects before they validate; rules write `present(self.field)` in place of
`has(self.field)`, which `redrive.api.crds` expands by the schema of the field.
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
    PlainSerializer,
    Strict,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy import naming


class ApiModel(BaseModel):
    """A part of a manifest as an immutable value; its keys are written in camelCase."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: object) -> object:
        if not isinstance(data, Mapping):
            return data
        return {k: v for k, v in data.items() if not is_empty(v)}

    def to_manifest(self) -> dict[str, Any]:
        """Write the value as it stands in a manifest; what is None is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def is_empty(value: object) -> bool:
    """Return True for None, and for an object that holds nothing else, at any depth."""
    return value is None or (isinstance(value, Mapping) and all(map(is_empty, value.values())))


class StatusModel(ApiModel):
    """A status: written by operators only, maybe by a newer one, so unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore")


VALIDATIONS = "x-kubernetes-validations"
_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(frozen=True)
class Rule:
    """A rule that the API server checks an object against.

    Attributes:
        holds: a CEL expression over `self`, and over `oldSelf` where it is about a change. It may
            use `present` (see the module).
        problem: what is wrong where it does not hold.
        remedy: what to do about it.
        got: a CEL expression for what was found, as a string; empty where nothing can be shown.
    """

    holds: str
    problem: str
    remedy: str
    got: str = ""

    def to_schema(self) -> dict[str, Any]:
        """Write the rule as an entry of `x-kubernetes-validations`."""
        written = {"rule": self.holds, "message": f"{self.problem}; {self.remedy}"}
        if self.got:
            before, after = json.dumps(f"{self.problem}; got "), json.dumps(f"; {self.remedy}")
            # Literals side by side become one. Where the message can't be made, because what was
            # found holds a line break, the API server takes the one above.
            message = f"{before} + {self.got} + {after}".replace('" + "', "")
            written["messageExpression"] = message
        return written

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        written = handler(schema)
        written.setdefault(VALIDATIONS, []).append(self.to_schema())
        return written


@dataclass(frozen=True)
class Form:
    """The form of a string, by a regular expression that RE2 and Python read alike.

    The expression has to match the whole string: the schema's `pattern`, or a CEL rule where what
    was found may have to be hidden.

    Attributes:
        hides: an expression for what is not shown if it is found anywhere in the string: it may
            hold a secret. Empty shows whatever was found.
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
        # The API server repeats what does not match a pattern.
        got = f"(self.matches({json.dumps(self.hides)}) ? {json.dumps(_HIDDEN)} : {QUOTED})"
        rule = Rule(f"self.matches({json.dumps(whole)})", self.problem, self.remedy, got=got)
        return rule.__get_pydantic_json_schema__(schema, handler)

    def _check(self, text: str) -> str:
        if re.fullmatch(self.regex, text, re.ASCII):
            return text
        if self.hides and re.search(self.hides, text):
            raise InvalidSpecError(f"{self.problem}; got {_HIDDEN}", remedy=self.remedy)
        raise InvalidSpecError(self.problem, got=text[:128], remedy=self.remedy)


_HIDDEN = "what may hold a secret, so it is not shown"
QUOTED = '"\'" + self + "\'"'
"""The CEL expression that shows a string as Python would."""


def refusing(check: Callable[[_T], _U]) -> Callable[[_T], _U]:
    """Make *check*, which raises one of our errors, a validator that pydantic can place."""

    def validator(value: _T) -> _U:
        try:
            return check(value)
        except RedriveError as error:
            raise ValueError(str(error)) from error

    return validator


def at_most_one(what: str, *fields: str) -> Rule:
    """Return the rule that at most one of *fields* is given; none of them is the default.

    Args:
        what: the field, as the message names it.
        fields: names as in a manifest.
    """
    fields_present = ", ".join(f"present(self.{field})" for field in fields)
    return Rule(
        f"[{fields_present}].filter(given, given).size() <= 1",
        f"`{what}` must be at most one of {', '.join(fields)}",
        "keep one of them",
        got="'more than one of them'",
    )


class OneOf(ApiModel):
    """A union of which one field is given. Without any it is empty, as if it were left out."""

    ONE: ClassVar[Rule]

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(OneOf._check_one)(self)
        return self

    def _check_one(self) -> None:
        if sum(getattr(self, name) is not None for name in type(self).model_fields) > 1:
            raise InvalidSpecError(
                self.ONE.problem, got="more than one of them", remedy=self.ONE.remedy
            )


def of_its_type(what: str, members: Mapping[str, str]) -> Rule:
    """Return the rule that a typed union has the field of its `type`, and no other.

    Args:
        what: the field, as the message names it.
        members: value of `type` → the field that goes with it; other values have no field.
    """
    pairs = [f"(self.type == '{word}') == present(self.{name})" for word, name in members.items()]
    fields = ", ".join(f"{name} with type {word}" for word, name in members.items())
    return Rule(
        f"!has(self.type) || {' && '.join(pairs)}",
        f"`{what}` must have the field of its type and no other",
        f"give {fields}",
        got='"\'" + self.type + "\'"',
    )


class TypedUnion(ApiModel):
    """A union whose field `type` selects which of its other fields is given."""

    MEMBERS: ClassVar[Mapping[str, str]]
    """Value of `type` → the field that goes with it."""

    RULE: ClassVar[Rule]

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(TypedUnion._check_members)(self)
        return self

    def _check_members(self) -> None:
        word = self.type  # type: ignore[attr-defined]  # each union has values of its own
        for value, field in self.MEMBERS.items():
            if (word == value) != (getattr(self, field) is not None):
                raise InvalidSpecError(self.RULE.problem, got=str(word), remedy=self.RULE.remedy)


E = TypeVar("E", bound=enum.StrEnum)


def one_of(kind: type[E], problem: str, remedy: str) -> tuple[object, ...]:
    """Return the annotations of a field that holds one of the words of *kind*."""

    def parse(value: object) -> E:
        found = next((word for word in kind if word == value), None)
        if found is None:
            raise InvalidSpecError(problem, got=str(value)[:64], remedy=remedy)
        return found

    schema = WithJsonSchema({"type": "string", "enum": [word.value for word in kind]})
    return schema, BeforeValidator(refusing(parse)), PlainSerializer(str)


_M = TypeVar("_M", bound=ApiModel)


class InvalidFieldsError(InvalidSpecError):
    """Fields of a spec hold what they can't; the message names each by its path."""

    def __init__(self, problems: list[str]) -> None:
        Exception.__init__(self, " | ".join(problems))


def parse_spec(model: type[_M], body: Mapping[str, Any]) -> _M:
    """Read the spec of *body*, a whole object of the API.

    Admission has refused nearly all that this refuses; an object may be older than the rule.

    Raises:
        InvalidFieldsError: a field is missing, unknown, or holds what it can't. A value found is
            shown only where a rule of ours was broken: anything else might be a misplaced secret.
    """
    return parse(model, body.get("spec") or {}, "spec")


def parse(model: type[_M], fields: Mapping[str, Any], root: str) -> _M:
    """Read *fields*, which messages name by their path from *root*.

    Raises:
        InvalidFieldsError: see `parse_spec`.
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
        raise InvalidFieldsError(texts) from error


class FieldProblem(NamedTuple):
    """Problem of one field of a spec.

    Attributes:
        path: its steps from the spec, names as in a manifest.
        type: of the error, as pydantic names it: `missing`, `extra_forbidden`, `value_error` for a
            rule of ours, or another.
        text: problem, value and remedy.
    """

    path: tuple[int | str, ...]
    type: str
    text: str


def field_problems(model: type[ApiModel], fields: Mapping[str, Any]) -> list[FieldProblem]:
    """Return the problem of each field that `parse` would refuse; none where it reads *fields*."""
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
            # Lists are read as tuples.
            expected = expected.replace("tuple ", "list ").replace(" after validation", "")
            kind = type(details["input"]).__name__
            text = f"{expected}; got a value of type {kind}; correct it"
    return FieldProblem(details["loc"], details["type"], text)


MAX_TOPIC = 1_024
SET = {"x-kubernetes-list-type": "set"}
"""Schema of a list in which order says nothing, and nothing stands twice."""
BY_NAME = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""Schema of a list of objects with different names, each of which server-side apply merges."""

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


def _short_together(field: str, most: int) -> tuple[object, ...]:
    """Return the annotations of a list of roles with at most *most* characters in all of them.

    The broker keeps the rights of a whole Pulsar namespace in one record, repeated for each topic.
    """
    rule = Rule(
        f"self.map(role, role.size()).sum() <= {most}",
        f"`{field}` must have at most {most} characters in all roles together",
        "use shorter roles, or fewer",
    )

    def check(roles: tuple[str, ...]) -> tuple[str, ...]:
        length = sum(map(len, roles))
        if length > most:
            raise InvalidSpecError(rule.problem, got=length, remedy=rule.remedy)
        return roles

    return rule, AfterValidator(refusing(check))


ConsumerRoles = Annotated[
    tuple[Role, ...],
    Field(max_length=32, json_schema_extra=SET),
    *_short_together("consumerRoles", 2_048),
]
ReaderRoles = Annotated[
    tuple[Role, ...],
    Field(max_length=16, json_schema_extra=SET),
    *_short_together("readerRoles", 1_024),
]


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
"""Number of messages that a Replay may move without approval."""


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
