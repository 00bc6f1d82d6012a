"""PulsarConnection: a broker, its credentials, and what may be used there."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from redrive.api.authentication import Authentication, Tls
from redrive.api.choices import Choices
from redrive.api.conditions import Conditions
from redrive.api.fields import MAX_LIST, MAX_TOPIC, ObjectName, Role, TokenSource
from redrive.api.model import ApiModel, StatusModel
from redrive.api.rules import Form
from redrive.policy.naming import TopicName

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

TopicPattern = Annotated[
    str,
    Field(max_length=MAX_TOPIC),
    Form(
        r"persistent://[^/\s]+/[^/\s]+/[^/\s]+",
        "a pattern of topics is written persistent://tenant/namespace/name, "
        "where * stands for any characters but a slash",
        "write one like persistent://shop/prod/*",
    ),
]

RolePattern = Annotated[
    str,
    Field(max_length=255),
    Form(
        r"[^\x00-\x1f\x7f]+",
        "a pattern of roles is not empty; * in it stands for any characters",
        "write a role's name, or one like shop-*",
    ),
]


class ReplayIdentity(ApiModel):
    """The Pulsar role of replay jobs. They never use the operator's credentials."""

    role: Role
    """The Pulsar role of the token: each policy grants it `consume` on its dead-letter topic and
    `produce` on its retry topic. Example: `redrive-replay`."""

    token: TokenSource
    """The role's token. Its Secret lies in the namespace of the *policies* that are replayed:
    only their jobs read it, the operator never does."""


class PulsarConnectionSpec(ApiModel):
    """A Pulsar cluster, and what may be done there through this object."""

    service_url: ServiceUrl
    """Where Pulsar clients connect: `pulsar://host:port`, or `pulsar+ssl://host:port` with TLS."""

    admin_url: AdminUrl
    """Where the admin REST API answers: `http://host:port` or `https://host:port`."""

    authentication: Authentication
    """The operator's credentials at the broker."""

    tls: Tls | None = None
    """How the broker's certificate is verified, at an `adminUrl` of https. Left out: by the
    certificate authorities that the operator's image trusts. Replay jobs do not have these
    authorities: policies of a connection with `tls` can't be replayed."""

    allowed_topics: Annotated[tuple[TopicPattern, ...], Field(max_length=MAX_LIST)]
    """The topics that policies may name, and those that retry and dead-letter topics may be, as
    patterns on the full name: `*` stands for any characters but a slash. An empty list allows
    none. Examples: `persistent://shop/*/*`; `persistent://shop/prod/orders` together with
    `persistent://shop/prod/orders-billing-*`."""

    allowed_roles: Annotated[tuple[RolePattern, ...], Field(max_length=MAX_LIST)]
    """The Pulsar roles that policies may grant rights to, as patterns: `*` stands for any
    characters. An empty list allows none. Example: `shop-*`."""

    allowed_namespaces: Annotated[tuple[ObjectName, ...], Field(max_length=MAX_LIST)] | None = None
    """The Kubernetes namespaces whose policies may use this connection, by exact name. Left out:
    its own namespace only. A list is complete: it names the own namespace too if that is meant."""

    replay: ReplayIdentity | None = None
    """The Pulsar role and token of replay jobs. Left out: policies of this connection can't be
    replayed."""

    policy_defaults: Choices | None = None
    """What policies of this connection leave out. A change reaches them at once."""

    def allows_topic(self, topic: TopicName) -> bool:
        """Whether a policy may name *topic*, or derive its name."""
        return any(_matches(p, str(topic), star="[^/]*") for p in self.allowed_topics)

    def allows_role(self, role: str) -> bool:
        """Whether a policy may grant rights to *role*."""
        return any(_matches(p, role, star=".*") for p in self.allowed_roles)

    def allows_namespace(self, namespace: str, own: str) -> bool:
        """Whether a policy in *namespace* may use this connection, which lies in *own*."""
        return namespace in ((own,) if self.allowed_namespaces is None else self.allowed_namespaces)


class PulsarConnectionStatus(StatusModel):
    """What the operator found at the broker."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    conditions: Conditions = ()
    """Ready: the broker answers and the token has rights. Reconciling and Stalled are there only
    while true."""


def _matches(pattern: str, text: str, *, star: str) -> bool:
    regex = star.join(map(re.escape, pattern.split("*")))
    return re.fullmatch(regex, text) is not None
