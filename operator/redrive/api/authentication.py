"""Credentials at a broker, and how the broker's certificate is verified.

Each Secret and ConfigMap lies where it is read: what the operator uses in the namespace of the
PulsarConnection, what replay jobs use in that of the Replay, whose pods can mount no others.
"""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import ConfigDict, Field

from redrive.api.fields import ObjectKey, ObjectName, SecretKeyRef, TokenSource
from redrive.api.model import ApiModel
from redrive.api.oneof import OneOf, exactly_one, one_given
from redrive.api.rules import Form

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
    """`ConfigMap` or `Secret`; for the operator it lies in the namespace of the PulsarConnection,
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
    after the namespace of the PulsarConnection, below the operator's `--credentials`."""


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
    needed. A Secret lies in the namespace of the PulsarConnection."""

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
