"""Permissions of a BrokerConnection: rules, each for some Kubernetes namespaces.

A rule combines its own topics, namespaces and roles. Rules are additive, but do not mix: a role of
one rule gets no grants on a topic of another.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import Field, Strict

from redrive.api import model
from redrive.policy.naming import TopicName
from redrive.policy.values import Patterns

MAX_RULES = 64
MAX_PATTERNS = 64

TopicPattern = Annotated[
    str,
    Field(max_length=model.MAX_TOPIC),
    model.Form(
        r"persistent://[^/\s]+/[^/\s]+/[^/\s]+",
        "a topic pattern must be written as persistent://tenant/namespace/name; "
        "* stands for any characters but a slash",
        "write it like persistent://shop/prod/*",
    ),
]

RolePattern = Annotated[
    str,
    Field(max_length=255),
    model.Form(
        r"[^\x00-\x1f\x7f]+",
        "a role pattern must not be empty; * stands for any characters",
        "use the name of a role, or a pattern like shop-*",
    ),
]

RuleName = Annotated[
    str,
    Field(max_length=63),
    model.Form(
        r"[a-z0-9]([-a-z0-9]*[a-z0-9])?",
        "`name` must be lower-case letters, digits and '-'",
        "use a name like shop",
    ),
]

FieldPath = Annotated[
    str,
    Field(max_length=256),
    model.Form(
        r"\$(\.[A-Za-z_$][A-Za-z0-9_$-]{0,63}|\[\*\])+",
        "a field must be written as a path from `$`, with `[*]` for the items of a list",
        "write it like $.items[*].sku",
    ),
]
MAX_PATHS = 64

NAMESPACE = "{namespace}"
"""Placeholder in a pattern for the Kubernetes namespace of the object that uses the connection."""

LabelValue = Annotated[str, Field(max_length=63)]


class LabelOperator(enum.StrEnum):
    """Relation of a label to the values of an expression."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


_VALUES = model.Rule(
    "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)",
    "In and NotIn require values, Exists and DoesNotExist allow none",
    "add values, or remove them",
    got="self.operator",
)


class LabelExpression(model.CheckedModel):
    """One requirement on a label."""

    RULES = (_VALUES,)

    key: model.LabelKey
    """Key of the label."""

    operator: LabelOperator
    """`In`: the label has one of the values. `NotIn`: it has none of them, or is absent. `Exists`,
    `DoesNotExist`: it is present, or absent."""

    values: Annotated[tuple[LabelValue, ...], model.items(64, model.SET)] = ()
    """Values of `In` and `NotIn`, which require them. Defaults to none."""

    def _check(self) -> None:
        compares = self.operator in {LabelOperator.IN, LabelOperator.NOT_IN}
        if compares != bool(self.values):
            raise _VALUES.error(self.operator.value)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return True if *labels* meet the requirement."""
        match self.operator:
            case LabelOperator.IN:
                return labels.get(self.key) in self.values
            case LabelOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case LabelOperator.EXISTS:
                return self.key in labels
            case LabelOperator.DOES_NOT_EXIST:
                return self.key not in labels


class LabelSelector(model.ApiModel):
    """Selects objects by their labels. A selector without requirements selects none."""

    match_labels: Annotated[Mapping[str, LabelValue], Field(max_length=64)] | None = None
    """Required labels with their values."""

    match_expressions: Annotated[tuple[LabelExpression, ...], Field(max_length=64)] = ()
    """Requirements that must all be met."""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return True if there are requirements and *labels* meet all of them."""
        if not self.match_labels and not self.match_expressions:
            return False
        return (self.match_labels or {}).items() <= labels.items() and all(
            expression.matches(labels) for expression in self.match_expressions
        )


class Namespaces(model.OneOf):
    """Kubernetes namespaces, by name or by their labels."""

    RULES = (model.at_most_one("namespaces", "names", "selector"),)

    names: Annotated[tuple[model.ObjectName, ...], model.items(256, model.SET)] | None = None
    """Exact names. The namespace of the connection is included only if it is in the list."""

    selector: LabelSelector | None = None
    """Labels of namespaces. Only cluster administrators should be able to change them. The label
    `kubernetes.io/metadata.name` is the name of a namespace."""

    def include(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Return True if *namespace* is among them; *labels* are used only with a selector."""
        if self.selector is not None:
            return self.selector.matches(labels)
        return namespace in (self.names or ())


class ShownKeys(enum.StrEnum):
    """Form of keys in masked messages."""

    HASHED = "Hashed"
    CLEAR = "Clear"


class Masking(model.ApiModel):
    """Parts of masked messages that Inspections show."""

    show: Annotated[tuple[FieldPath, ...], model.items(MAX_PATHS, model.SET)] = ()
    """Fields of payloads in JSON or Avro whose texts, numbers and booleans are shown, as paths from
    `$`, with `[*]` for the items of a list. Defaults to none. Example:
    `["$.needs", "$.items[*].sku"]`."""

    keys: Annotated[ShownKeys, *model.one_of(ShownKeys, "`keys`")] = ShownKeys.HASHED
    """`Hashed`: a hash of the key, which differs in each result. `Clear`: the key. Reports always
    have hashes. Defaults to Hashed."""


class Consent(enum.StrEnum):
    """Permission for an action that is refused by default."""

    NEVER = "Never"
    ALLOWED = "Allowed"


def consent(field: str) -> tuple[object, ...]:
    """Return the annotations of a field with a `Consent`."""
    return model.one_of(Consent, f"`{field}`")


class MaskedPayloads(model.ApiModel):
    """Parts of messages that Inspections may show."""

    clear_payloads: Annotated[Consent, *consent("clearPayloads")] = Consent.NEVER
    """`Allowed`: Inspections may return messages in clear text to authors with the verb `reveal` on
    inspections. It needs the admission policies of the chart, which check the verb. Defaults to
    Never."""

    masking: Masking | None = None
    """Parts of masked messages that stay readable for everybody who may create Inspections.
    Defaults to none."""


HostPattern = Annotated[
    str,
    Field(max_length=260),
    model.Form(
        r"([-.*_a-zA-Z0-9]+|\[[.*:a-fA-F0-9]+\])(:[0-9]{1,5})?",
        "a host pattern must be a host name or address, optionally with a port; * stands for any "
        "characters but a dot",
        "write it like broker-*.pulsar.svc or broker-*.pulsar.svc:8080",
    ),
]


class PolicyLimits(model.ApiModel):
    """Limits for the policies of one Kubernetes namespace that use a connection."""

    policies: Annotated[int, Strict(), Field(ge=1, le=10_000)] = 100
    """Number of policies, 1 to 10000. Further ones, the newest, are Stalled with reason
    `LimitExceeded` and change nothing at the broker; provisioned policies come first. Defaults to
    100."""


class NamespaceLimits(PolicyLimits):
    """Limits for the objects of one Kubernetes namespace that use a connection."""

    partitions: Annotated[int, Strict(), Field(ge=1, le=256)] = 64
    """Number of partitions of one retry or dead-letter topic, 1 to 256. A policy that needs more is
    Stalled with reason `LimitExceeded`. Defaults to 64."""

    runs: Annotated[int, Strict(), Field(ge=1, le=100)] = 4
    """Number of concurrent Replays, including plans and suspended runs, 1 to 100. Further ones wait
    with reason `TooManyRuns`. Defaults to 4."""


class NamespaceRule(model.ApiModel):
    """A rule of a connection for objects of some Kubernetes namespaces."""

    name: RuleName
    """Name of the rule, unique in the connection: 1 to 63 lower-case letters, digits and '-'.
    Example: `shop`."""

    namespaces: Namespaces | None = None
    """Kubernetes namespaces of the policies and Replays that the rule applies to. Defaults to the
    namespace of the connection only."""

    def is_for(self, namespace: str, labels: Mapping[str, str], own: str) -> bool:
        """Return True if the rule applies to *namespace*; *own* is that of the connection."""
        if self.namespaces is None:
            return namespace == own
        return self.namespaces.include(namespace, labels)


class AllowRule(NamespaceRule):
    """Topics and roles that objects of some Kubernetes namespaces may use through a connection."""

    topics: Annotated[tuple[TopicPattern, ...], model.items(MAX_PATTERNS, model.SET)]
    """Topics that policies may use as source, retry and dead-letter topics, as patterns of full
    names. `*` stands for any characters but a slash, `{namespace}` for the Kubernetes namespace of
    the object, so that one rule can serve many teams. Examples: `persistent://shop/*/*`;
    `persistent://{namespace}/*/*`; `persistent://shop/prod/orders` together with
    `persistent://shop/prod/orders-billing-*`."""

    roles: Annotated[tuple[RolePattern, ...], model.items(MAX_PATTERNS, model.SET)] = ()
    """Pulsar roles that policies may grant permissions on these topics, as patterns. `*` stands for
    any characters, `{namespace}` for the Kubernetes namespace of the object. Defaults to none.
    Examples: `shop-*`; `{namespace}.*`."""

    adoption: Annotated[Consent, *consent("adoption")] = Consent.NEVER
    """`Allowed`: policies may adopt retry and dead-letter topics, among these topics, that redrive
    did not create. Defaults to Never."""

    deletion: Annotated[Consent, *consent("deletion")] = Consent.NEVER
    """`Allowed`: a `deletionPolicy` may delete topics among these. Defaults to Never."""

    limits: NamespaceLimits | None = None
    """Limits for each namespace of the rule. If several rules apply to a namespace, the highest
    value of each limit applies. Defaults to 100 policies, 64 partitions and 4 runs. Example:
    `{policies: 20, runs: 2}`."""

    def within(self, namespace: str) -> AllowRule:
        """Return the rule with *namespace* in place of `{namespace}`."""
        if not any(NAMESPACE in pattern for pattern in (*self.topics, *self.roles)):
            return self
        topics, roles = (
            tuple(pattern.replace(NAMESPACE, namespace) for pattern in patterns)
            for patterns in (self.topics, self.roles)
        )
        return AllowRule.model_construct(**{**dict(self), "topics": topics, "roles": roles})

    def covers(self, topic: TopicName) -> bool:
        """Return True if *topic* matches the rule; a system topic never does."""
        return not topic.is_system and self._topics.match(str(topic))

    def names(self, role: str) -> bool:
        """Return True if *role* matches the rule."""
        return self._roles.match(role)

    @cached_property
    def _topics(self) -> Patterns:
        return Patterns(self.topics, but="/")

    @cached_property
    def _roles(self) -> Patterns:
        return Patterns(self.roles, but="\n")


@dataclass(frozen=True)
class Permissions:
    """Permissions of the objects of one Kubernetes namespace through a connection.

    Attributes:
        rules: rules that apply to the namespace; without any it may not use the connection.
    """

    rules: tuple[AllowRule, ...]

    @property
    def limits(self) -> NamespaceLimits:
        """Return the limits in effect for the namespace."""
        limits = [dict(rule.limits or NamespaceLimits()) for rule in self.rules]
        highest = {
            name: max((bounds[name] for bounds in limits), default=default)
            for name, default in NamespaceLimits()
        }
        return NamespaceLimits(**highest)

    @property
    def topics(self) -> tuple[str, ...]:
        """Return the patterns of the permitted topics."""
        return tuple(dict.fromkeys(pattern for rule in self.rules for pattern in rule.topics))

    def roles_on(self, topic: TopicName) -> tuple[str, ...]:
        """Return the patterns of the roles that may get grants on *topic*."""
        rules = self._on(topic)
        return tuple(dict.fromkeys(pattern for rule in rules for pattern in rule.roles))

    def allows_topic(self, topic: TopicName) -> bool:
        """Return True if a policy may use *topic*."""
        return bool(self._on(topic))

    def allows_role(self, role: str, topic: TopicName) -> bool:
        """Return True if a policy may grant *role* actions on *topic*."""
        return self.first_refused([role], [topic]) is None

    def first_refused(
        self, roles: Iterable[str], topics: Iterable[TopicName]
    ) -> tuple[str, TopicName] | None:
        """Return the first of *roles* that may not get grants, with the topic."""
        on = [(topic, self._on(topic)) for topic in topics]
        for role in roles:
            for topic, rules in on:
                if not any(rule.names(role) for rule in rules):
                    return role, topic
        return None

    def allows_schema_copy(self, source: TopicName, topic: TopicName) -> bool:
        """Return True if the schema of *source* may be copied to *topic*.

        Roles with grants on *topic* can read its schema, even by a later policy. So all roles that
        policies may grant actions on *topic* must be allowed on *source*. Patterns are compared as
        text.
        """
        return set(self.roles_on(topic)) <= set(self.roles_on(source))

    def allows_adoption(self, topic: TopicName) -> bool:
        """Return True if a policy may adopt *topic*, which redrive did not create."""
        return any(rule.adoption is Consent.ALLOWED for rule in self._on(topic))

    def allows_deletion(self, topic: TopicName) -> bool:
        """Return True if a policy may delete *topic* with it."""
        return any(rule.deletion is Consent.ALLOWED for rule in self._on(topic))

    def _on(self, topic: TopicName) -> tuple[AllowRule, ...]:
        return tuple(rule for rule in self.rules if rule.covers(topic))
