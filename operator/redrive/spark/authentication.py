"""Who to be for the broker, in the words of Pulsar's client; and what a client is given. Pure.

A secret stands in an option only in forms that Spark redacts in plans and pages, see
`spark.redaction.regex`: a token after `token:`. What lies in files is read by each process, so
the same paths exist on driver and executors.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from redrive.errors import RedriveError

PLUGIN = "pulsar.client.authPluginClassName"
PARAMETERS = "pulsar.client.authParams"
TRUSTED = "pulsar.client.tlsTrustCertsFilePath"


class InvalidAuthenticationError(RedriveError):
    """The options do not say how to authenticate; what they say is never shown."""

    reason: ClassVar[str] = "InvalidAuthentication"


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


def of_options(options: Mapping[str, str]) -> SourceAuthentication:
    """Read the options that are about it.

    Raises:
        InvalidAuthenticationError: they don't fit together.
    """
    trusted, text = options.get(TRUSTED), options.get(PARAMETERS, "")
    written = options.get(PLUGIN)
    if written is None:
        if text:
            raise _invalid(f"{PARAMETERS} is given without {PLUGIN}", f"give {PLUGIN} too")
        return SourceAuthentication(trusted=trusted)
    try:
        plugin = Plugin(written.rpartition(".")[2])
    except ValueError:
        raise InvalidAuthenticationError(
            f"{PLUGIN} is an unknown one", got=written, remedy=f"use one of {', '.join(Plugin)}"
        ) from None
    if plugin is Plugin.TOKEN:
        return _token(text, trusted)
    if plugin is Plugin.TLS:
        return _tls(text, trusted)
    if plugin is Plugin.OAUTH2:
        return _oauth2(text, trusted)
    return SourceAuthentication(trusted=trusted)


def _token(text: str, trusted: str | None) -> SourceAuthentication:
    if text.startswith("file:"):
        return SourceAuthentication(Plugin.TOKEN, None, {"token": _path(text)}, {}, trusted)
    _, marked, token = text.partition("token:")
    if (
        not marked
        or text.partition("token:")[0]
        or not token.strip().isascii()
        or not token.strip()
    ):
        raise _invalid(
            f"{PARAMETERS} of a token is neither token:… nor file:///…",
            "write token: before the token, by which Spark redacts it; better, name a file",
        )
    return SourceAuthentication(Plugin.TOKEN, token, {}, {}, trusted)


def _tls(text: str, trusted: str | None) -> SourceAuthentication:
    names = {"tlsCertFile": "certificate", "tlsKeyFile": "key"}
    parts = dict(part.strip().partition(":")[::2] for part in text.split(","))
    if set(parts) != set(names) or not all(parts.values()):
        raise _invalid(
            f"{PARAMETERS} of TLS is not tlsCertFile:PATH,tlsKeyFile:PATH",
            "name the files of the certificate and of its key",
        )
    files = {names[name]: path.removeprefix("//") for name, path in parts.items()}
    return SourceAuthentication(Plugin.TLS, None, files, {}, trusted)


def _oauth2(text: str, trusted: str | None) -> SourceAuthentication:
    try:
        parts: dict[str, Any] = json.loads(text)
        kind, key = parts.pop("type", "client_credentials"), parts.pop("privateKey")
        fits = kind == "client_credentials" and str(key).startswith("file:")
        fits = fits and "issuerUrl" in parts and set(parts) <= {"issuerUrl", "audience", "scope"}
    except (ValueError, AttributeError, KeyError, TypeError):
        fits = False
    if not fits:
        raise _invalid(
            f"{PARAMETERS} of OAuth 2.0 is not JSON with issuerUrl and privateKey, and if needed "
            "type, audience and scope",
            'write {"issuerUrl": "https://…", "privateKey": "file:///…"}: the client\'s secret '
            "stands in a file only",
        )
    issuer = {name: str(value) for name, value in parts.items()}
    return SourceAuthentication(Plugin.OAUTH2, None, {"client": _path(str(key))}, issuer, trusted)


def _path(url: str) -> str:
    return url.removeprefix("file:").removeprefix("//")


def _invalid(problem: str, remedy: str) -> InvalidAuthenticationError:
    return InvalidAuthenticationError(problem, remedy=remedy)
