"""Authentication methods, and the layout of mounted credentials.

The role of a process at the broker, by the names of Pulsar's client, and the credentials that a
client gets. Pure.

An option contains a secret only in a form that Spark redacts in plans and pages, see
`spark.redaction.regex`: a token after `token:`. Each process reads the files of credentials, so
the same paths exist on driver and executors.
"""

from __future__ import annotations

import enum
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from redrive.errors import InvalidSpecError

ACCESS_VARIABLE = "REDRIVE_PULSAR_ACCESS"
"""Holds a `BrokerAccess`, as `encode` writes it."""
USED_SHARE = 0.8
"""Share of the lifetime of an issuer's token after which another one is requested. The rest is for
an issuer that fails."""


class Method(enum.StrEnum):
    """Authentication method of a job."""

    TOKEN = "token"  # noqa: S105  a method
    TLS = "tls"
    OAUTH2 = "oauth2"
    ACCESS_KEY = "accesskey"
    NONE = "none"


@dataclass(frozen=True)
class BrokerAccess:
    """Identity of a job at the broker, without any secret: these are in files.

    Attributes:
        folder: the root of the mounted files: `credentials/`, with the files `token`, `tls.crt` and
            `tls.key`, `client-secret`, or `secret-key`; `ca/ca.crt` and
            `issuer-ca/ca.crt`, if others than the authorities of the image are trusted;
            `ledger/key`, the key of the policy's ledger; `destination/`, keys of the object store
            to which an Inspection writes.
        redirect_hosts: hosts that calls may be redirected to, see `Access.hosts`.
        issuer_url: of OAuth 2.0, as are the fields down to `scope`; None for other methods.
        user: of the access key of RocketMQ; None for other methods.
    """

    method: Method
    folder: str
    redirect_hosts: tuple[str, ...] = ()
    issuer_url: str | None = None
    client_id: str | None = None
    audience: str | None = None
    scope: str | None = None
    user: str | None = None

    def encode(self) -> str:
        """Write it as JSON, without a dollar sign: see `ReplayJob.encode`."""
        return without_dollars(json.dumps(asdict(self), ensure_ascii=False))

    @classmethod
    def decode(cls, text: str) -> BrokerAccess:
        """Read the text that `encode` wrote.

        Raises:
            InvalidSpecError: *text* is something else.
        """
        try:
            fields = json.loads(text)
            fields["method"] = Method(fields["method"])
            return cls(**fields | {"redirect_hosts": tuple(fields["redirect_hosts"])})
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSpecError(
                f"the environment variable {ACCESS_VARIABLE} does not say how to reach the broker",
                got=repr(error),
                remedy="start the job by a Replay; run the same version of operator and image",
            ) from error


def without_dollars(written: str) -> str:
    """Escape dollar signs in JSON: a kubelet expands `$(NAME)` in the arguments of a container."""
    return written.replace("$", "\\u0024")


class Plugin(enum.StrEnum):
    """Authentication method, by the class of the Java client, with or without its package."""

    TOKEN = "AuthenticationToken"  # noqa: S105  a class
    TLS = "AuthenticationTls"
    OAUTH2 = "AuthenticationOAuth2"
    NONE = "AuthenticationDisabled"


@dataclass(frozen=True)
class SourceAuthentication:
    """Authentication by the options of the data source.

    Attributes:
        plugin: the method.
        token: the token itself; None if it is in a file, or with other methods.
        files: by their content: `token`, `certificate`, `key`, or `client`, the key file of
            OAuth 2.0 with `client_id` and `client_secret`.
        issuer: of OAuth 2.0: `issuerUrl`, `audience` and `scope`, where they are set.
        trusted: a file with certificate authorities; None for those of the machine.
    """

    plugin: Plugin = Plugin.NONE
    token: str | None = field(default=None, repr=False)
    files: Mapping[str, str] = field(default_factory=dict)
    issuer: Mapping[str, str] = field(default_factory=dict)
    trusted: str | None = None


@dataclass(frozen=True)
class ShownCredentials:
    """Credentials that a client sends to a broker, and its TLS settings.

    Attributes:
        method: `token`, `tls`, or empty for none.
        token: returns the token to show, a new one when the last is about to expire.
        tls: for addresses of `pulsar+ssl`.
    """

    method: str = ""
    token: Callable[[], str] = field(default=str, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
