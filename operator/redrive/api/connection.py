"""The kind BrokerConnection: a broker, its credentials, and the permissions of its users.

Secrets and ConfigMaps are in the namespace where they are used: those of the operator in the
namespace of the BrokerConnection, those of replay jobs in the namespace of the Replay, whose pods
mount them.

All settings of a Pulsar cluster are under `spec.pulsar`, all of a RocketMQ cluster under
`spec.rocketmq`. A connection has one of the two.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from redrive.api import model
from redrive.api.conditions import Conditions, WarningTypes
from redrive.api.job import MAX_TEMPLATES, AvailableTemplate, ConnectionJobs
from redrive.api.permissions import (
    MAX_RULES,
    AllowRule,
    Consent,
    HostPattern,
    MaskedPayloads,
    NamespaceRule,
    Permissions,
    RuleName,
    consent,
)
from redrive.api.policy_defaults import PolicyDefaults
from redrive.api.rocketmq import ONE_BROKER, ONLY_PULSAR, RocketMQCluster
from redrive.reasons import Reason

Url = Annotated[
    str,
    Field(max_length=1_024),
    model.Form(
        r"https?://[^\s/@?#]+(/[^\s@?#]*)?",
        "the URL of an issuer must be https://host or https://host/path, without password",
        "use the address above .well-known/openid-configuration",
        hides="[@?#]",
    ),
]
Word = Annotated[
    str,
    Field(max_length=1_024),
    model.Form(
        r"[^\x00-\x1f\x7f]+", "the text must be one line and not empty", "write it in one line"
    ),
]


FileName = Annotated[
    str,
    Field(max_length=253),
    model.Form(
        r"[a-zA-Z0-9][-._a-zA-Z0-9]*",
        "the name of a file must be letters, digits, '-', '_' and '.', the first a letter or digit",
        "use the name only: the folder is that of the namespace",
    ),
]


class TokenOrigin(model.OneOf):
    """Source of a token (a JWT); the token itself is never in a manifest."""

    RULES = (model.at_most_one("token", "secretRef", "file"),)

    secret_ref: model.SecretKeyRef | None = None
    """The Secret and its key that contain the token, as text."""

    file: FileName | None = None
    """Name of a file that contains the token, as text, in the operator's pod. Its folder is named
    after the namespace of the BrokerConnection, below the operator's `--credentials`."""


class SecretName(model.ApiModel):
    """A Secret as a whole."""

    name: model.ObjectName
    """Name of the Secret."""


class ClientCertificate(model.ApiModel):
    """Source of a client certificate."""

    secret_ref: SecretName
    """A Secret of type `kubernetes.io/tls`, with the certificate and its chain under `tls.crt` and
    the key under `tls.key`."""


class SecretText(model.ApiModel):
    """Source of a client secret; the client secret itself is never in a manifest."""

    secret_ref: model.SecretKeyRef
    """The Secret and its key that contain the client secret, as text."""


class OAuth2(model.ApiModel):
    """Client credentials (RFC 6749, section 4.4)."""

    issuer_url: Annotated[Url, Field(alias="issuerURL")]
    """URL of the issuer. The token endpoint in its `.well-known/openid-configuration` must have the
    same scheme, host and port."""

    client_id: Annotated[Word, Field(alias="clientID")]
    """Id of the client at the issuer."""

    client_secret: SecretText
    """Secret of that client."""

    audience: Word | None = None
    """Audience of the token, if the issuer requires it. Defaults to none. Example:
    `urn:pulsar:main`."""

    scope: Word | None = None
    """Scopes to request, separated by blanks. Defaults to none. Example: `pulsar admin`."""

    ca_ref: model.CaRef | None = None
    """Certificate authorities to trust for the issuer, in place of those of the image."""


class AuthenticationType(enum.StrEnum):
    """Kind of credentials."""

    TOKEN = "Token"  # noqa: S105  a kind of credentials
    TLS = "TLS"
    OAUTH2 = "OAuth2"
    NONE = "None"


_MEMBERS = {
    AuthenticationType.TOKEN.value: "token",
    AuthenticationType.TLS.value: "tls",
    AuthenticationType.OAUTH2.value: "oauth2",
}
_TYPE = model.one_of(AuthenticationType, "`type` of `authentication`", "a kind of credentials")


class Authentication(model.TypedUnion):
    """The operator's credentials at the broker."""

    MEMBERS = _MEMBERS
    RULES = (model.of_its_type("authentication", MEMBERS),)

    type: Annotated[AuthenticationType, *_TYPE]
    """Kind of credentials: `Token`, `TLS` or `OAuth2`, each with the field of that name. `None` is
    for development brokers without authentication."""

    token: TokenOrigin | None = None
    """A token (a JWT) of a role that administers the tenants; it need not be a super-user. Its
    Secret must be in the namespace of the BrokerConnection."""

    tls: ClientCertificate | None = None
    """A client certificate (mutual TLS). It requires an `adminURL` of https."""

    oauth2: OAuth2 | None = None
    """A token from an issuer of OAuth 2.0 for client credentials."""


class ReplayAuthentication(model.TypedUnion):
    """Credentials of jobs at the broker.

    Their Secrets must be in the namespaces of the Replays or Inspections, whose pods mount them.
    The operator never reads them.
    """

    MEMBERS = _MEMBERS
    RULES = (model.of_its_type("authentication", MEMBERS),)

    type: Annotated[AuthenticationType, *_TYPE]
    """Kind of credentials: `Token`, `TLS` or `OAuth2`, each with the field of that name. `None` is
    for development brokers without authentication."""

    token: model.TokenSource | None = None
    """A token (a JWT) of the role."""

    tls: ClientCertificate | None = None
    """A client certificate (mutual TLS) of the role. It requires a `serviceURL` of pulsar+ssl and
    an `adminURL` of https."""

    oauth2: OAuth2 | None = None
    """A token of the role from an issuer of OAuth 2.0 for client credentials."""


_MORE_THAN_AN_ADDRESS = "[@?#]"
"""Characters in a URL that may precede a secret: a password or a query."""

ServiceUrl = Annotated[
    str,
    Field(max_length=model.MAX_TOPIC),
    model.Form(
        r"pulsar(\+ssl)?://[^\s/@?#]+/?",
        "`serviceURL` must be pulsar://host:port or pulsar+ssl://host:port",
        "use the address that Pulsar clients connect to",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

AdminUrl = Annotated[
    str,
    Field(max_length=model.MAX_TOPIC),
    model.Form(
        r"https?://[^\s/@?#]+(/[^\s@?#]*)?",
        "`adminURL` must be http://host:port or https://host:port, without user or password",
        "use the address of Pulsar's admin REST API, without /admin/v2",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

EndpointUrl = Annotated[
    str,
    Field(max_length=model.MAX_TOPIC),
    model.Form(
        r"https?://[^\s/@?#]+/?",
        "`endpointURL` must be http://host:port or https://host:port, without user or password",
        "use the address of an object store with the API of S3",
        hides=_MORE_THAN_AN_ADDRESS,
    ),
]

_FOLDER = "/[A-Za-z0-9_=][-A-Za-z0-9_=.]*"
MAX_DESTINATIONS = 16


class JobIdentity(model.ApiModel):
    """Credentials of the Pulsar role of jobs, which differ from the operator's."""

    authentication: ReplayAuthentication
    """Credentials of the role."""

    tls: model.Tls | None = None
    """Verification of the broker's certificates by jobs. Defaults to the certificate authorities of
    the image of jobs. Required if `spec.pulsar.tls` is set."""


class Requirement(enum.StrEnum):
    """Field that the author of a Replay has to fill in."""

    REASON = "Reason"
    TICKET = "Ticket"


_Requirement = Annotated[
    Requirement, *model.one_of(Requirement, "`require`", "a list of Reason and Ticket")
]


class ReplayIdentity(JobIdentity):
    """Pulsar role of replay jobs, and their credentials, which differ from the operator's."""

    role: model.Role
    """The Pulsar role of the credentials. Each policy grants it `consume` on its dead-letter topic,
    and `produce` and `consume` on its retry topic and its ledger. A Replay with another target
    grants it both actions there until it ends; a rule of `allow` for that topic and the namespace
    of the Replay must include the role. Example: `replayer`."""

    approval_above: model.ApprovalAbove | None = None
    """Number of messages that a Replay may move without approval, even if its RetryPolicy permits
    more. A Replay of more messages waits for a ReplayApproval. Defaults to
    `replay.approvalAbove` of the policy."""

    require: Annotated[tuple[_Requirement, ...], model.items(2, model.SET, least=1)] | None = None
    """Fields that a Replay which moves messages must have: `reason`, `ticket` or both. Plans are
    exempt. Defaults to none. Example: `[Reason, Ticket]`."""


class Destination(model.ApiModel):
    """A place for files of Inspections: a folder of an object store, or of a volume."""

    name: RuleName
    """Name of the destination, unique in the connection: 1 to 63 lower-case letters, digits and
    '-'. Inspections refer to it. Example: `archive`."""

    uri: Annotated[
        str,
        Field(max_length=model.MAX_TOPIC),
        model.Form(
            rf"s3://[a-z0-9][-a-z0-9.]{{1,61}}[a-z0-9]({_FOLDER})*/?|file://({_FOLDER})+/?",
            "`uri` must be s3://bucket, s3://bucket/folder or file:///folder",
            "use a bucket, or the path at which the default job template mounts a volume",
            hides=_MORE_THAN_AN_ADDRESS,
        ),
    ]
    """Folder of the files: `s3://bucket/folder`, or `file:///folder` for a folder that exists in
    the pods, at which the default job template of the connection mounts a volume. A file is written
    below it, as `NAMESPACE/POLICY/INSPECTION-UID` with the extension of its format. Example:
    `s3://dead-letters/prod`."""

    endpoint_url: Annotated[EndpointUrl | None, Field(alias="endpointURL")] = None
    """Address of another object store with the API of S3: `http://host:port` or
    `https://host:port`. Defaults to AWS, in the region of the bucket."""

    secret_ref: SecretName | None = None
    """A Secret in the namespaces of the Inspections, whose keys `access-key-id` and
    `secret-access-key` are mounted by their pods, with the consent of its owner. Defaults to the
    credentials of the environment, such as those of the ServiceAccount on AWS."""


class InspectionIdentity(MaskedPayloads, JobIdentity):
    """Pulsar role of the jobs of Inspections, and their credentials."""

    role: model.Role
    """The Pulsar role of the credentials, which must differ from `replay.role`: the pods of
    Inspections may not produce. Each policy grants it `consume` on its dead-letter topic, which the
    broker requires to read a topic. `consume` includes acknowledging, so no person should have
    these credentials. Example: `inspector`."""

    retry_topics: Annotated[Consent, *consent("retryTopics")] = Consent.NEVER
    """`Allowed`: each policy also grants the role `consume` on its retry topic, and Inspections may
    read messages that wait for a retry. Defaults to Never."""

    destinations: Annotated[
        tuple[Destination, ...], model.items(MAX_DESTINATIONS, model.BY_NAME)
    ] = ()
    """Places at which Inspections may write files. Defaults to none: Inspections write no file."""


class PulsarBroker(model.ApiModel):
    """A Pulsar cluster: its addresses, and the operator's credentials there."""

    service_url: Annotated[ServiceUrl, Field(alias="serviceURL")]
    """Address for Pulsar clients: `pulsar://host:port`, or `pulsar+ssl://host:port` with TLS."""

    admin_url: Annotated[AdminUrl, Field(alias="adminURL")]
    """Address of the admin REST API: `http://host:port` or `https://host:port`."""

    redirect_hosts: Annotated[tuple[HostPattern, ...], model.items(64, model.SET)] = ()
    """Hosts, beside that of `adminURL`, to which the brokers may redirect calls with the operator's
    credentials, as patterns: `*` stands for any characters but a dot. A pattern without a port has
    the port of `adminURL`; the scheme is always that of `adminURL`. Defaults to none, which is
    sufficient for one broker and for a Pulsar proxy. Example:
    `pulsar-broker-*.pulsar-broker.pulsar.svc.cluster.local:8443`."""

    authentication: Authentication
    """Credentials of the operator at the broker."""

    tls: model.Tls | None = None
    """Verification of the broker's certificate, for an `adminURL` of https. Defaults to the
    certificate authorities of the operator's image. Replay jobs have their own (`replay.tls`)."""


_ROLES_DIFFER = model.Rule(
    "!has(self.replay) || !has(self.inspection) || self.replay.role != self.inspection.role",
    "`inspection.role` must differ from `replay.role`, which may produce",
    "create a role of its own for Inspections",
    got="self.inspection.role",
)


class BrokerConnectionSpec(model.CheckedModel):
    """A broker, and the permissions of the objects that use it through this connection."""

    RULES = (_ROLES_DIFFER, ONE_BROKER, ONLY_PULSAR)

    pulsar_cluster: Annotated[PulsarBroker | None, Field(alias="pulsar")] = None
    """The Pulsar cluster. A connection has either this or `rocketmq`."""

    rocketmq: RocketMQCluster | None = None
    """The RocketMQ cluster, for RocketMQRetryPolicies. Defaults to none: the connection is for
    Pulsar."""

    allow: Annotated[tuple[AllowRule, ...], model.items(MAX_RULES, model.BY_NAME)] = ()
    """Kubernetes namespaces that may use the connection, with their topics and roles, as additive
    rules: the topics of a rule are combined with its own namespaces and roles only. Defaults to
    none: nothing is allowed."""

    replay: ReplayIdentity | None = None
    """Pulsar role and credentials of replay jobs. Defaults to none: dead letters of the policies of
    this connection cannot be replayed."""

    inspection: InspectionIdentity | None = None
    """Pulsar role and credentials of the jobs of Inspections. Defaults to none: messages of this
    connection cannot be inspected in the cluster."""

    jobs: ConnectionJobs | None = None
    """Job templates and number of executors that Replays may use. Defaults to all templates, with
    their own limits."""

    policy_defaults: PolicyDefaults | None = None
    """Values for fields that policies of this connection leave out. A change applies to them at
    once. Defaults to none."""

    def _check(self) -> None:
        if (self.pulsar_cluster is None) == (self.rocketmq is None):
            raise ONE_BROKER.error()
        others = (self.allow, self.replay, self.inspection, self.jobs, self.policy_defaults)
        if self.rocketmq is not None and any(others):
            raise ONLY_PULSAR.error()
        if self.replay and self.inspection and self.replay.role == self.inspection.role:
            raise _ROLES_DIFFER.error(self.inspection.role)

    @property
    def pulsar(self) -> PulsarBroker:
        """Return the Pulsar cluster.

        Raises:
            RedriveError: the connection is for RocketMQ.
        """
        if self.pulsar_cluster is None:
            raise Reason.OTHER_BROKER.error(
                "the connection is for RocketMQ, and this object needs Pulsar",
                remedy="refer to another BrokerConnection, or create a RocketMQRetryPolicy",
            )
        return self.pulsar_cluster

    @property
    def rules(self) -> Sequence[NamespaceRule]:
        """Return the rules of its broker."""
        return self.allow if self.rocketmq is None else self.rocketmq.allow

    @property
    def selects_namespaces(self) -> bool:
        """Return True if permissions depend on the labels of a Kubernetes namespace."""
        return any(rule.namespaces and rule.namespaces.selector for rule in self.rules)

    def permissions(self, namespace: str, labels: Mapping[str, str], own: str) -> Permissions:
        """Return the permissions of objects in a Kubernetes namespace.

        Args:
            namespace: its name.
            labels: its labels; used only if `selects_namespaces`.
            own: the namespace of this connection.
        """
        return Permissions(
            tuple(
                rule.within(namespace) for rule in self.allow if rule.is_for(namespace, labels, own)
            )
        )


class RuleUsage(model.StatusModel):
    """Use of one rule of `spec.allow`."""

    name: RuleName
    """Name of the rule."""

    namespaces: int
    """Number of namespaces with policies that the rule applies to."""

    policies: int
    """Number of RetryPolicies in these namespaces that use the connection."""


MAX_TARGET_RIGHTS = 64
"""Maximum number of targets at which one Replay has grants."""


class TargetRights(model.StatusModel):
    """Grants that the operator made to the replay role at a target."""

    topic: Annotated[
        str, Field(max_length=model.MAX_TOPIC, pattern="^persistent://[^/]+/[^/]+/[^/]+$")
    ]
    """Full name of the topic."""

    role: Annotated[str, Field(max_length=255)]
    """The role."""

    actions: Annotated[tuple[Annotated[str, Field(max_length=32)], ...], Field(max_length=2)]
    """The actions among `produce` and `consume` that are revoked at the end of the Replay."""


class BrokerConnectionStatus(model.StatusModel):
    """State of the connection, as observed at the broker."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status describes."""

    conditions: Conditions = ()
    """Ready: the broker accepts the credentials. Reconciling and Stalled are present only while
    true."""

    warnings: WarningTypes | None = None
    """Types of the conditions that warn although the object is ready. Absent without any."""

    operator_version: Annotated[str, Field(max_length=64)] | None = None
    """Release of the operator that wrote this status. Example: `0.1.0`."""

    broker_version: Annotated[str, Field(max_length=64)] | None = None
    """Release of the broker, read every minute. Absent if a proxy hides it. Example: `4.0.8`."""

    policies: int | None = None
    """Number of RetryPolicies that use it, in all namespaces that it allows, counted every minute.
    Policies that are being deleted are included: their deletion needs the connection, which is
    deleted after them."""

    allow: Annotated[tuple[RuleUsage, ...], model.items(MAX_RULES, model.BY_NAME)] = ()
    """Use of each rule of `spec.allow`, counted every minute. A policy counts for each rule that
    applies to its namespace."""
    job_templates: (
        Annotated[tuple[AvailableTemplate, ...], model.items(MAX_TEMPLATES, model.BY_NAME)] | None
    ) = None
    """The first 64 job templates that Replays of the connection may use, each in its namespaces.
    Absent if the operator runs no Replays."""

    target_rights: (
        Annotated[
            Mapping[str, Annotated[tuple[TargetRights, ...], Field(max_length=MAX_TARGET_RIGHTS)]],
            Field(max_length=1_000),
        ]
        | None
    ) = None
    """Grants at targets of Replays, by the uid of the Replay; they end with it. A connection with
    such grants is not deleted. Only the operator may write this field: jobs may write the status of
    Replays. Absent without any."""
