"""The kind BrokerConnection: its spec, and how it authenticates.

Credentials at a broker, and how the broker's certificate is verified.

Each Secret and ConfigMap lies where it is read: what the operator uses in the namespace of the
BrokerConnection, what replay jobs use in that of the Replay, whose pods can mount no others.

BrokerConnection: a broker, its credentials, and what may be used there.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from redrive.api.conditions import Conditions
from redrive.api.job import JobTemplate
from redrive.api.model import (
    MAX_TOPIC,
    SET,
    VALIDATIONS,
    ApiModel,
    ApprovalAbove,
    Form,
    ObjectKey,
    ObjectName,
    OneOf,
    Role,
    Rule,
    SecretKeyRef,
    StatusModel,
    TokenSource,
    check_one,
    exactly_one,
    one_given,
    refusing,
)
from redrive.api.permissions import (
    MAX_PATTERNS,
    MAX_RULES,
    AllowRule,
    Namespaces,
    Permissions,
    RolePattern,
    TopicPattern,
)
from redrive.api.policy_defaults import PolicyDefaults
from redrive.errors import InvalidSpecError

Url = Annotated[
    str,
    Field(max_length=1_024),
    Form(
        r"https?://[^\s/@?#]+(/[^\s@?#]*)?",
        "the URL of an issuer is written https://host or https://host/path, without password",
        "give the address below which .well-known/openid-configuration lies",
        hides="[@?#]",
    ),
]
Word = Annotated[
    str,
    Field(max_length=1_024),
    Form(r"[^\x00-\x1f\x7f]+", "this is one line of text and not empty", "write it in one line"),
]


FileName = Annotated[
    str,
    Field(max_length=253),
    Form(
        r"[a-zA-Z0-9][-._a-zA-Z0-9]*",
        "the name of a file is letters, digits, '-', '_' and '.', the first a letter or digit",
        "give the name alone: the folder is that of the namespace",
    ),
]


class CaKind(enum.StrEnum):
    """Where certificate authorities may lie."""

    CONFIG_MAP = "ConfigMap"
    SECRET = "Secret"  # noqa: S105  a kind of object


class CaRef(ApiModel):
    """Certificate authorities, as PEM under a key of a ConfigMap or Secret."""

    kind: CaKind = CaKind.CONFIG_MAP
    """`ConfigMap` or `Secret`; for the operator it lies in the namespace of the BrokerConnection,
    for replay jobs in that of the Replay."""

    name: ObjectName
    """Name of the object."""

    key: ObjectKey
    """Key within it. Example: `ca.crt`."""


class Tls(ApiModel):
    """How the broker's certificate is verified. Its host name is verified in any case."""

    ca_ref: CaRef
    """The certificate authorities to trust, in place of those that the image trusts."""


class TokenOrigin(OneOf):
    """Where a token (a JWT) lies; a token itself never stands in a manifest."""

    ONE = exactly_one("the origin of a token", "secretRef", "file")
    model_config = ConfigDict(json_schema_extra=one_given(ONE))

    secret_ref: SecretKeyRef | None = None
    """The Secret and the key in it that hold the token, as text."""

    file: FileName | None = None
    """The name of a file that holds the token, as text, in the operator's pod: in the folder named
    after the namespace of the BrokerConnection, below the operator's `--credentials`."""


class SecretName(ApiModel):
    """A Secret as a whole."""

    name: ObjectName
    """Name of the Secret."""


class ClientCertificate(ApiModel):
    """Where a client certificate lies."""

    secret_ref: SecretName
    """A Secret of type `kubernetes.io/tls`: the certificate with its chain under `tls.crt`, its key
    under `tls.key`."""


class SecretText(ApiModel):
    """Where a password lies; it never stands in a manifest."""

    secret_ref: SecretKeyRef
    """The Secret and the key in it that hold it, as text."""


class OAuth2(ApiModel):
    """Client credentials (RFC 6749, section 4.4)."""

    issuer_url: Url
    """The issuer: below it lies `.well-known/openid-configuration`."""

    client_id: Word
    """The id of the client at the issuer."""

    client_secret: SecretText
    """The secret of that id."""

    audience: Word | None = None
    """What the token is for, where the issuer requires it. Example: `urn:pulsar:main`."""

    scope: Word | None = None
    """The scopes to request, separated by blanks."""

    ca_ref: CaRef | None = None
    """The certificate authorities to trust for the issuer, in place of those that the image
    trusts."""


class NoAuthentication(ApiModel):
    """No credentials; an empty object."""


class Authentication(OneOf):
    """The operator's credentials at the broker."""

    ONE = exactly_one("authentication", "token", "tls", "oauth2", "none")
    model_config = ConfigDict(json_schema_extra=one_given(ONE))

    token: TokenOrigin | None = None
    """A token (a JWT) of a role that administers the tenants concerned; a super-user is not
    needed. A Secret lies in the namespace of the BrokerConnection."""

    tls: ClientCertificate | None = None
    """A client certificate (mutual TLS); `adminUrl` is one of https then."""

    oauth2: OAuth2 | None = None
    """A token that an issuer of OAuth 2.0 gives for client credentials."""

    none: NoAuthentication | None = None
    """No credentials, written `none: {}`: for development brokers that ask for none."""


class ReplayAuthentication(OneOf):
    """The credentials of replay jobs at the broker.

    Their Secrets lie in the namespaces of the Replays, whose pods mount them; the operator never
    reads them.
    """

    ONE = exactly_one("replay.authentication", "token", "tls", "oauth2", "none")
    model_config = ConfigDict(json_schema_extra=one_given(ONE))

    token: TokenSource | None = None
    """A token (a JWT) of the role."""

    tls: ClientCertificate | None = None
    """A client certificate (mutual TLS) of the role; `serviceUrl` is one of pulsar+ssl then, and
    `adminUrl` one of https."""

    oauth2: OAuth2 | None = None
    """A token of the role that an issuer of OAuth 2.0 gives for client credentials."""

    none: NoAuthentication | None = None
    """No credentials, written `none: {}`: for development brokers that ask for none."""


_MORE_THAN_AN_ADDRESS = "[@?#]"
"""What begins a password, or a query that may hold one, in a URL."""

ServiceUrl = Annotated[
    str,
    Field(max_length=MAX_TOPIC),
    Form(
        r"pulsar(\+ssl)?://[^\s/@?#]+/?",
        "serviceUrl is written pulsar://host:port or pulsar+ssl://host:port",
        "give the address that Pulsar clients connect to",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

AdminUrl = Annotated[
    str,
    Field(max_length=MAX_TOPIC),
    Form(
        r"https?://[^\s/@?#]+(/[^\s@?#]*)?",
        "adminUrl is written http://host:port or https://host:port, without user or password",
        "give the address of Pulsar's admin REST API, without /admin/v2",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

HostPattern = Annotated[
    str,
    Field(max_length=253),
    Form(
        r"[-.*:_a-zA-Z0-9\[\]]+",
        "a pattern of hosts is a host name or address without port, where * stands for any "
        "characters but a dot",
        "write one like broker-*.pulsar.svc",
    ),
]

_OLD_FIELDS = ("allowedTopics", "allowedRoles", "allowedNamespaces")
_ALLOWS = Rule(
    "has(self.allow) ? !has(self.allowedTopics) && !has(self.allowedRoles)"
    " && !has(self.allowedNamespaces) : has(self.allowedTopics) && has(self.allowedRoles)",
    "a connection says by spec.allow what may be done through it",
    f"give allow, and take {', '.join(_OLD_FIELDS)} away, which it replaces",
)


class ReplayIdentity(ApiModel):
    """The Pulsar role of replay jobs, and their credentials: never those of the operator."""

    ONE: ClassVar[Rule] = exactly_one("the credentials of replay jobs", "authentication", "token")
    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [ONE.to_schema()]})

    role: Role
    """The Pulsar role of the credentials: each policy grants it `consume` on its dead-letter topic
    and `produce` on its retry topic. Example: `redrive-replay`."""

    authentication: ReplayAuthentication | None = None
    """The role's credentials."""

    tls: Tls | None = None
    """How jobs verify the certificates of the broker. Left out: by the certificate authorities that
    the image of jobs trusts. Where `spec.tls` is given, this has to be, too."""

    approval_above: ApprovalAbove | None = None
    """How many messages a Replay may move without approval, whatever its RetryPolicy says. One of
    more waits for the annotation `redrive.io/approved-by`. Left out: what the policy says."""

    token: TokenSource | None = None
    """Deprecated: `authentication.token`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(ReplayIdentity._check_one)(self)
        return self

    def _check_one(self) -> None:
        check_one(self.ONE, self.authentication, self.token)

    @property
    def credentials(self) -> ReplayAuthentication:
        """Return the credentials, be they given by the old field."""
        return self.authentication or ReplayAuthentication(token=self.token)


class BrokerConnectionSpec(ApiModel):
    """A Pulsar cluster, and what may be done there through this object."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_ALLOWS.to_schema()]})

    service_url: ServiceUrl
    """Where Pulsar clients connect: `pulsar://host:port`, or `pulsar+ssl://host:port` with TLS."""

    admin_url: AdminUrl
    """Where the admin REST API answers: `http://host:port` or `https://host:port`."""

    redirect_hosts: Annotated[
        tuple[HostPattern, ...], Field(max_length=64, json_schema_extra=SET)
    ] = ()
    """Hosts, beside that of `adminUrl`, to which the brokers of the cluster may redirect calls with
    the operator's credentials, as patterns: `*` stands for any characters but a dot. Left out:
    none, which is right for one broker and for a Pulsar proxy. Example:
    `pulsar-broker-*.pulsar-broker.pulsar.svc.cluster.local`."""

    authentication: Authentication
    """The operator's credentials at the broker."""

    tls: Tls | None = None
    """How the broker's certificate is verified, at an `adminUrl` of https. Left out: by the
    certificate authorities that the operator's image trusts. Replay jobs have authorities of
    their own (`replay.tls`)."""

    allow: Annotated[tuple[AllowRule, ...], Field(max_length=MAX_RULES)] | None = None
    """Which Kubernetes namespaces may use which topics and roles, as rules that add up: a rule's
    topics go with its own namespaces and roles, and with no other rule's. What no rule allows is
    refused; an empty list allows nothing."""

    allowed_topics: Annotated[tuple[TopicPattern, ...], Field(max_length=MAX_PATTERNS)] | None = (
        None
    )
    """Deprecated: `topics` of a rule of `allow`."""

    allowed_roles: Annotated[tuple[RolePattern, ...], Field(max_length=MAX_PATTERNS)] | None = None
    """Deprecated: `roles` of a rule of `allow`."""

    allowed_namespaces: Annotated[tuple[ObjectName, ...], Field(max_length=MAX_PATTERNS)] | None = (
        None
    )
    """Deprecated: `namespaces.names` of a rule of `allow`."""

    replay: ReplayIdentity | None = None
    """The Pulsar role and credentials of replay jobs. Left out: policies of this connection can't
    be replayed."""

    job: JobTemplate | None = None
    """The pods of replay jobs, and what Replays may ask for otherwise. Left out: as the operator
    was started."""

    policy_defaults: PolicyDefaults | None = None
    """What policies of this connection leave out. A change reaches them at once, but for
    `naming`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(BrokerConnectionSpec._check_allow)(self)
        return self

    def _check_allow(self) -> None:
        old = [self.allowed_topics, self.allowed_roles, self.allowed_namespaces]
        if self.allow is None and None in old[:2]:
            raise InvalidSpecError(_ALLOWS.problem, got="none", remedy=_ALLOWS.remedy)
        if self.allow is not None and old != [None] * 3:
            raise InvalidSpecError(_ALLOWS.problem, got="both", remedy=_ALLOWS.remedy)

    @property
    def rules(self) -> tuple[AllowRule, ...]:
        """Return what is allowed; the old lists are one rule, under which deletions go on."""
        if self.allow is not None:
            return self.allow
        names = self.allowed_namespaces
        return (
            AllowRule(
                namespaces=None if names is None else Namespaces(names=names),
                topics=self.allowed_topics or (),
                roles=self.allowed_roles or (),
                delete=True,
            ),
        )

    @property
    def selects_namespaces(self) -> bool:
        """Whether it takes the labels of a Kubernetes namespace to tell what is permitted there."""
        return any(rule.namespaces and rule.namespaces.selector for rule in self.rules)

    def permissions(self, namespace: str, labels: Mapping[str, str], own: str) -> Permissions:
        """Return what is permitted to the objects of a Kubernetes namespace.

        Args:
            namespace: its name.
            labels: its labels; read only where `selects_namespaces`.
            own: the namespace that this connection lies in.
        """
        return Permissions(
            tuple(rule for rule in self.rules if rule.is_for(namespace, labels, own))
        )

    @property
    def edits(self) -> tuple[str, ...]:
        """Return what to edit where fields are in use that others have replaced."""
        found = []
        if self.allow is None:
            rules = json.dumps([rule.to_manifest() for rule in self.rules], ensure_ascii=False)
            found.append(f"replace {', '.join(_OLD_FIELDS)} by allow: {rules}")
        if self.replay is not None and self.replay.token is not None:
            given = json.dumps(self.replay.credentials.to_manifest(), ensure_ascii=False)
            found.append(f"replace replay.token by replay.authentication: {given}")
        return tuple(found)


class BrokerConnectionStatus(StatusModel):
    """What the operator found at the broker."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    conditions: Conditions = ()
    """Ready: the broker answers and the token has rights. Reconciling and Stalled are there only
    while true."""

    warnings: Annotated[str, Field(max_length=1024)] | None = None
    """The types of the conditions that need attention although the object is ready, separated by
    commas; not there while there is none."""

    broker_version: Annotated[str, Field(max_length=64)] | None = None
    """The release of the broker, read every minute. Example: `4.0.8`. Not there where a proxy hides
    it."""

    policies: int | None = None
    """How many RetryPolicies use it, of all namespaces that it is for, counted every minute. Those
    that are being deleted count: their deletion needs the connection, which is not deleted before
    them."""
