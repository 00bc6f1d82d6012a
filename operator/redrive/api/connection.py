"""The kind BrokerConnection: a broker, its credentials, and the permissions of its users.

Each Secret and ConfigMap lies where it is read: what the operator uses in the namespace of the
BrokerConnection, what replay jobs use in that of the Replay, whose pods can mount no others.

All about a Pulsar cluster lies under `spec.pulsar`, so that a broker of another kind can be a
member beside it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

from pydantic import ConfigDict, Field

from redrive.api.conditions import Conditions, WarningTypes
from redrive.api.job import MAX_TEMPLATES, AvailableTemplate, ConnectionJobs
from redrive.api.model import (
    BY_NAME,
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
    SecretKeyRef,
    StatusModel,
    TokenSource,
    TypedUnion,
    at_most_one,
    of_its_type,
    one_of,
)
from redrive.api.permissions import MAX_RULES, AllowRule, Permissions, RuleName
from redrive.api.policy_defaults import PolicyDefaults

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
    """Kind of the object, which lies in the namespace of the BrokerConnection for the operator, and
    in that of the Replay for replay jobs. Defaults to ConfigMap."""

    name: ObjectName
    """Name of the object."""

    key: ObjectKey
    """Key within it. Example: `ca.crt`."""


class Tls(ApiModel):
    """Verification of the broker's certificate. Its host name is always verified."""

    ca_ref: CaRef
    """The certificate authorities to trust, in place of those that the image trusts."""


class TokenOrigin(OneOf):
    """Where a token (a JWT) lies; a token itself never stands in a manifest."""

    ONE = at_most_one("token", "secretRef", "file")
    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [ONE.to_schema()]})

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

    issuer_url: Annotated[Url, Field(alias="issuerURL")]
    """The issuer: below it lies `.well-known/openid-configuration`, whose token endpoint must have
    the same scheme, host and port."""

    client_id: Annotated[Word, Field(alias="clientID")]
    """The id of the client at the issuer."""

    client_secret: SecretText
    """The secret of that id."""

    audience: Word | None = None
    """Audience of the token, where the issuer requires it. Defaults to none. Example:
    `urn:pulsar:main`."""

    scope: Word | None = None
    """Scopes to request, separated by blanks. Defaults to none. Example: `pulsar admin`."""

    ca_ref: CaRef | None = None
    """The certificate authorities to trust for the issuer, in place of those that the image
    trusts."""


class AuthenticationType(enum.StrEnum):
    """A kind of credentials."""

    TOKEN = "Token"  # noqa: S105  a kind of credentials
    TLS = "TLS"
    OAUTH2 = "OAuth2"
    NONE = "None"


_MEMBERS = {
    AuthenticationType.TOKEN.value: "token",
    AuthenticationType.TLS.value: "tls",
    AuthenticationType.OAUTH2.value: "oauth2",
}
_TYPE = one_of(
    AuthenticationType,
    "`type` of `authentication` must be a kind of credentials",
    "use one of Token, TLS, OAuth2, None",
)


class Authentication(TypedUnion):
    """The operator's credentials at the broker."""

    MEMBERS = _MEMBERS
    RULE = of_its_type("authentication", MEMBERS)
    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [RULE.to_schema()]})

    type: Annotated[AuthenticationType, *_TYPE]
    """The kind of credentials: `Token`, `TLS` or `OAuth2`, each with the field of that name; or
    `None`, for development brokers without authentication."""

    token: TokenOrigin | None = None
    """A token (a JWT) of a role that administers the tenants concerned; a super-user is not
    needed. A Secret lies in the namespace of the BrokerConnection."""

    tls: ClientCertificate | None = None
    """A client certificate (mutual TLS); `adminURL` is one of https then."""

    oauth2: OAuth2 | None = None
    """A token that an issuer of OAuth 2.0 gives for client credentials."""


class ReplayAuthentication(TypedUnion):
    """The credentials of replay jobs at the broker.

    Their Secrets lie in the namespaces of the Replays, whose pods mount them; the operator never
    reads them.
    """

    MEMBERS = _MEMBERS
    RULE = of_its_type("replay.authentication", MEMBERS)
    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [RULE.to_schema()]})

    type: Annotated[AuthenticationType, *_TYPE]
    """The kind of credentials: `Token`, `TLS` or `OAuth2`, each with the field of that name; or
    `None`, for development brokers without authentication."""

    token: TokenSource | None = None
    """A token (a JWT) of the role."""

    tls: ClientCertificate | None = None
    """A client certificate (mutual TLS) of the role; `serviceURL` is one of pulsar+ssl then, and
    `adminURL` one of https."""

    oauth2: OAuth2 | None = None
    """A token of the role that an issuer of OAuth 2.0 gives for client credentials."""


_MORE_THAN_AN_ADDRESS = "[@?#]"
"""What begins a password, or a query that may hold one, in a URL."""

ServiceUrl = Annotated[
    str,
    Field(max_length=MAX_TOPIC),
    Form(
        r"pulsar(\+ssl)?://[^\s/@?#]+/?",
        "`serviceURL` must be pulsar://host:port or pulsar+ssl://host:port",
        "give the address that Pulsar clients connect to",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

AdminUrl = Annotated[
    str,
    Field(max_length=MAX_TOPIC),
    Form(
        r"https?://[^\s/@?#]+(/[^\s@?#]*)?",
        "`adminURL` must be http://host:port or https://host:port, without user or password",
        "give the address of Pulsar's admin REST API, without /admin/v2",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

HostPattern = Annotated[
    str,
    Field(max_length=253),
    Form(
        r"([-.*_a-zA-Z0-9]+|\[[.*:a-fA-F0-9]+\])(:[0-9]{1,5})?",
        "a pattern of hosts is a host name or address, with a port or without, where * stands for "
        "any characters but a dot",
        "write one like broker-*.pulsar.svc or broker-*.pulsar.svc:8080",
    ),
]


class ReplayIdentity(ApiModel):
    """The Pulsar role of replay jobs, and their credentials: never those of the operator."""

    role: Role
    """The Pulsar role of the credentials. Each policy grants it `consume` on its dead-letter topic,
    and `produce` and `consume` on its retry topic and its ledger. A Replay with another target
    grants it both rights there until it ends; a rule of `allow` for that topic and the namespace of
    the Replay has to name the role. Example: `replayer`."""

    authentication: ReplayAuthentication
    """The role's credentials."""

    tls: Tls | None = None
    """Verification of the broker's certificates by jobs. Defaults to the certificate authorities
    that the image of jobs trusts. Required where `spec.pulsar.tls` is given."""

    approval_above: ApprovalAbove | None = None
    """Number of messages that a Replay may move without approval, even if its RetryPolicy permits
    more. A Replay of more messages waits for a ReplayApproval. Defaults to
    the policy's `replay.approvalAbove`."""


class PulsarBroker(ApiModel):
    """A Pulsar cluster: its addresses, and the operator's credentials there."""

    service_url: Annotated[ServiceUrl, Field(alias="serviceURL")]
    """Where Pulsar clients connect: `pulsar://host:port`, or `pulsar+ssl://host:port` with TLS."""

    admin_url: Annotated[AdminUrl, Field(alias="adminURL")]
    """Where the admin REST API answers: `http://host:port` or `https://host:port`."""

    redirect_hosts: Annotated[
        tuple[HostPattern, ...], Field(max_length=64, json_schema_extra=SET)
    ] = ()
    """Hosts, beside that of `adminURL`, to which the brokers of the cluster may redirect calls with
    the operator's credentials, as patterns: `*` stands for any characters but a dot. A pattern
    without a port is for the port of `adminURL`; the scheme is always that of `adminURL`. Defaults
    to none, which is right for one broker and for a Pulsar proxy. Example:
    `pulsar-broker-*.pulsar-broker.pulsar.svc.cluster.local:8443`."""

    authentication: Authentication
    """The operator's credentials at the broker."""

    tls: Tls | None = None
    """Verification of the broker's certificate, at an `adminURL` of https. Defaults to the
    certificate authorities that the operator's image trusts. Replay jobs have authorities of their
    own (`replay.tls`)."""


class BrokerConnectionSpec(ApiModel):
    """A broker, and the permissions of the objects that use it through this connection."""

    pulsar: PulsarBroker
    """The Pulsar cluster."""

    allow: Annotated[
        tuple[AllowRule, ...],
        Field(
            max_length=MAX_RULES,
            json_schema_extra=BY_NAME,
        ),
    ] = ()
    """Which Kubernetes namespaces may use which topics and roles, as rules that add up: the topics
    of a rule go with its own namespaces and roles, and with no other rule's. Everything else is
    refused. Defaults to none: nothing is allowed."""

    replay: ReplayIdentity | None = None
    """The Pulsar role and credentials of replay jobs. Defaults to none: policies of this connection
    can't be replayed."""

    jobs: ConnectionJobs | None = None
    """Job templates and numbers of executors that Replays may use. Defaults to all templates, with
    their own bounds."""

    policy_defaults: PolicyDefaults | None = None
    """Values for fields that policies of this connection leave out. A change reaches them at once.
    Defaults to none."""

    @property
    def selects_namespaces(self) -> bool:
        """Return True if permissions depend on the labels of a Kubernetes namespace."""
        return any(rule.namespaces and rule.namespaces.selector for rule in self.allow)

    def permissions(self, namespace: str, labels: Mapping[str, str], own: str) -> Permissions:
        """Return what is permitted to the objects of a Kubernetes namespace.

        Args:
            namespace: its name.
            labels: its labels; read only where `selects_namespaces`.
            own: the namespace that this connection lies in.
        """
        return Permissions(
            tuple(
                rule.within(namespace) for rule in self.allow if rule.is_for(namespace, labels, own)
            )
        )


class RuleUsage(StatusModel):
    """Use of one rule of `spec.allow`."""

    name: RuleName
    """Name of the rule."""

    namespaces: int
    """Number of namespaces with policies that the rule is for."""

    policies: int
    """Number of RetryPolicies in them that use the connection."""


class TargetRights(StatusModel):
    """Rights that the operator granted to the replay role at a target."""

    topic: Annotated[str, Field(max_length=MAX_TOPIC, pattern="^persistent://[^/]+/[^/]+/[^/]+$")]
    """Full name of the topic."""

    role: Annotated[str, Field(max_length=255)]
    """The role."""

    actions: Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(max_length=2)]
    """Those of `produce` and `consume` that are taken back at the end of the Replay."""


class BrokerConnectionStatus(StatusModel):
    """State of the connection, as the operator found it at the broker."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    conditions: Conditions = ()
    """Ready: the broker answers and the token has rights. Reconciling and Stalled are there only
    while true."""

    warnings: WarningTypes | None = None
    """Types of the conditions that need attention although the object is ready. Absent without
    any."""

    operator_version: Annotated[str, Field(max_length=64)] | None = None
    """Release of the operator that wrote this status. Example: `0.1.0`."""

    broker_version: Annotated[str, Field(max_length=64)] | None = None
    """The release of the broker, read every minute. Example: `4.0.8`. Not there where a proxy hides
    it."""

    policies: int | None = None
    """How many RetryPolicies use it, of all namespaces that it is for, counted every minute. Those
    that are being deleted count: their deletion needs the connection, which is not deleted before
    them."""

    allow: Annotated[
        tuple[RuleUsage, ...],
        Field(
            max_length=MAX_RULES,
            json_schema_extra=BY_NAME,
        ),
    ] = ()
    """Use of each rule of `spec.allow`, counted every minute. A policy counts for each rule that is
    for its namespace."""
    job_templates: (
        Annotated[
            tuple[AvailableTemplate, ...],
            Field(
                max_length=MAX_TEMPLATES,
                json_schema_extra=BY_NAME,
            ),
        ]
        | None
    ) = None
    """The first 64 job templates that Replays of the connection may use, each in the namespaces
    that it is for. Absent where the operator runs no Replays."""

    target_rights: (
        Annotated[
            Mapping[str, Annotated[tuple[TargetRights, ...], Field(max_length=64)]],
            Field(max_length=1_000),
        ]
        | None
    ) = None
    """Rights at targets of Replays, by the uid of the Replay with which they end. A connection with
    such rights is not deleted. Only the operator may write it: jobs may write the status of
    Replays. Absent without any."""
