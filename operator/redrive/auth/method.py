"""Authentication methods, and the layout of mounted credentials.

Who to be for the broker, in the words of Pulsar's client; and what a client is given. Pure.

A secret stands in an option only in forms that Spark redacts in plans and pages, see
`spark.redaction.regex`: a token after `token:`. What lies in files is read by each process, so
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


class Method(enum.StrEnum):
    """How a job proves who it is."""

    TOKEN = "token"  # noqa: S105  a method
    TLS = "tls"
    OAUTH2 = "oauth2"
    NONE = "none"


@dataclass(frozen=True)
class BrokerAccess:
    """Who a job is for the broker, without any secret: those lie in files.

    Attributes:
        folder: what is mounted lies below it: `credentials/`, with the files `token`, `tls.crt` and
            `tls.key`, or `client-secret`; `ca/ca.crt` and `issuer-ca/ca.crt`, if others than the
            authorities of the image are trusted; `ledger/key`, the key of the policy's ledger.
        redirect_hosts: hosts that they may be redirected to, see `Access.hosts`.
        issuer_url: of OAuth 2.0, like what follows; None where the method is another.
    """

    method: Method
    folder: str
    redirect_hosts: tuple[str, ...] = ()
    issuer_url: str | None = None
    client_id: str | None = None
    audience: str | None = None
    scope: str | None = None

    def encode(self) -> str:
        """Write it as JSON, without a dollar sign: see `ReplayJob.encode`."""
        return without_dollars(json.dumps(asdict(self), ensure_ascii=False))

    @classmethod
    def decode(cls, text: str) -> BrokerAccess:
        """Read what `encode` wrote.

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
    """How to authenticate, by the class of the Java client, which may be written with package."""

    TOKEN = "AuthenticationToken"  # noqa: S105  a class
    TLS = "AuthenticationTls"
    OAUTH2 = "AuthenticationOAuth2"
    NONE = "AuthenticationDisabled"


@dataclass(frozen=True)
class SourceAuthentication:
    """What the options say.

    Attributes:
        plugin: the method.
        token: itself; None if it lies in a file, or the method is another.
        files: by what they hold: `token`, `certificate`, `key`, or `client`, the key file of
            OAuth 2.0 with `client_id` and `client_secret`.
        issuer: of OAuth 2.0: `issuerUrl`, `audience` and `scope`, as far as they are given.
        trusted: a file with certificate authorities; None for those of the machine.
    """

    plugin: Plugin = Plugin.NONE
    token: str | None = field(default=None, repr=False)
    files: Mapping[str, str] = field(default_factory=dict)
    issuer: Mapping[str, str] = field(default_factory=dict)
    trusted: str | None = None


@dataclass(frozen=True)
class ShownCredentials:
    """What a client shows to a broker, and how it speaks TLS.

    Attributes:
        method: `token`, `tls`, or empty for not at all.
        token: returns the token to show, a new one when the last is about to expire.
        tls: for addresses of `pulsar+ssl`.
    """

    method: str = ""
    token: Callable[[], str] = field(default=str, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
