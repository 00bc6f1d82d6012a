"""Credentials of jobs and notebooks, read from files, and their token refresh.

The base class reads files again for each use, because a kubelet renews them when their Secret
changes, and a run may be long. One subclass has the credentials of the replay role, mounted in the
pod of a job, the other one those that options of the data source name. With OAuth 2.0 each process
keeps a token for 80 % of its lifetime, and to its end if the issuer does not answer.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import functools
import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pulsar

from redrive.admin.access import Access, tls_context
from redrive.admin.errors import AdminError
from redrive.admin.http import Http
from redrive.auth import oauth2
from redrive.auth.method import (
    ACCESS_VARIABLE,
    USED_SHARE,
    BrokerAccess,
    Method,
    Plugin,
    ShownCredentials,
    SourceAuthentication,
)
from redrive.errors import RedriveError

_PAUSE_SECONDS = 30.0
"""Time between two requests to an issuer that fails: each use of the credentials waits for the
answer."""

_Problem = tuple[str, str]
"""Text of an error, with a file, and the remedy."""

_parsed = functools.lru_cache(maxsize=8)(tls_context)
"""Unchanged authorities and certificates are parsed once: a list of all public ones takes longer
than a request."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    issued: oauth2.Issued
    at: float

    def end_of(self, share: float) -> float:
        """Return the moment at which this share of its lifetime is over."""
        return self.at + self.issued.lifetime * share


class BrokerCredentials(ABC):
    """Credentials of a process at a broker, and the authorities that it trusts.

    Args:
        hosts: further hosts that the credentials may be sent to, see `Access.hosts`.

    Raises:
        RedriveError: from each method, when a file is missing or has another content.
        AdminError: likewise, when an issuer gives no token.
    """

    reason: ClassVar[str]
    """Reason of the errors about files."""
    missing: ClassVar[_Problem]
    not_pem: ClassVar[_Problem]

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        self._hosts = hosts
        self._issuing = threading.Lock()
        self._held: _Held | None = None
        self._renewal_due = 0.0
        self._last: str | None = None
        self._kept: pulsar.Authentication | None = None

    def access(self) -> Access:
        """Return them as the admin API takes them. Never call it where an event loop runs."""
        token, tls = self._token(), self._tls()
        if token is None:
            return Access(tls=tls, hosts=self._hosts)
        return Access.bearer(token, tls, self._hosts)

    def client(self, service_url: str) -> dict[str, Any]:
        """Return them as `pulsar.Client` takes them."""
        options: dict[str, Any] = {"authentication": self._authentication()}
        if service_url.startswith("pulsar+ssl:"):
            options["tls_validate_hostname"] = True
            if (authorities := self._authorities()) is not None:
                options["tls_trust_certs_file_path"] = str(authorities)
        return options

    def protocol(self) -> ShownCredentials:
        """Return them as `redrive.reading.frames` takes them."""
        tls = self._tls()
        if self._certificate() is not None:
            return ShownCredentials("tls", tls=tls)
        self._last = self._token()
        if self._last is None:
            return ShownCredentials(tls=tls)
        return ShownCredentials("token", lambda: self._renewed() or "", tls)

    @abstractmethod
    def _token(self) -> str | None:
        """Return the token to show; None for a method without."""

    @abstractmethod
    async def _issue(self) -> oauth2.Issued:
        """Have an issuer give a token."""

    @abstractmethod
    def _certificate(self) -> tuple[Path, Path] | None:
        """Return the files of the certificate to show and of its key; None for other methods."""

    @abstractmethod
    def _authorities(self) -> Path | None:
        """Return the file of those that are trusted; None for those of the machine."""

    def _authentication(self) -> pulsar.Authentication | None:
        if (certificate := self._certificate()) is not None:
            self._tls()  # the error of the client names no cause
            return pulsar.AuthenticationTLS(*map(str, certificate))
        self._last = self._token()
        if self._last is None:
            return None
        if self._kept is None:
            self._kept = _immortal(pulsar.AuthenticationToken(self._renewed))
        return self._kept

    def _renewed(self) -> str | None:
        """Return the token for one more connection; the client takes no exception."""
        try:
            self._last = self._token()
        except RedriveError:
            logger.warning(
                "the credentials can't be renewed; the last ones stay in use", exc_info=True
            )
        return self._last

    def _issued(self) -> str:
        with self._issuing:
            held, now = self._held, time.monotonic()
            if held is None or now >= min(self._renewal_due, held.end_of(1.0)):
                try:
                    held = _Held(asyncio.run(self._issue()), now)
                    self._renewal_due = held.end_of(USED_SHARE)
                except AdminError:
                    now = time.monotonic()
                    if held is None or now >= held.end_of(1.0):
                        raise
                    logger.warning(
                        "issuer failed; the current token stays in use until it expires",
                        exc_info=True,
                    )
                    self._renewal_due = now + _PAUSE_SECONDS
                self._held = held
            return held.issued.token

    def _tls(self) -> Any:  # noqa: ANN401  an SSLContext, or None
        authorities, files = self._authorities(), self._certificate()
        ca = None if authorities is None else self._text(authorities)
        if files is not None:
            certificate, key = map(self._bytes, files)
            return self._context(ca=ca, certificate=certificate, key=key)
        return None if ca is None else self._context(ca=ca)

    def _context(self, **parts: Any) -> Any:  # noqa: ANN401  as `context` takes them
        try:
            return _parsed(**parts)
        except ValueError as error:
            raise self._unusable(self.not_pem, str(error)) from None

    def _unusable(self, problem: _Problem, got: str, file: Path | None = None) -> RedriveError:
        text, remedy = problem
        return RedriveError(text.format(file), got=got, remedy=remedy, reason=self.reason)

    def _text(self, file: Path) -> str:
        try:
            text = self._bytes(file).decode("ascii").strip()
        except UnicodeDecodeError as error:  # from None: it contains the content
            raise self._unusable(self.missing, type(error).__name__, file) from None
        if not text:
            raise self._unusable(self.missing, "", file)
        return text

    def _bytes(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as error:
            raise self._unusable(self.missing, type(error).__name__, file) from None


def _immortal(authentication: pulsar.Authentication) -> pulsar.Authentication:
    """Keep an object that calls Python until the process ends.

    Threads of a client run for a moment after it is closed. The one that drops the last reference
    to a function waits for the interpreter, and aborts a process that ends meanwhile.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(authentication))
    return authentication


class JobCredentials(BrokerCredentials):
    """Credentials of a job, and the authorities that it trusts, in files below one folder.

    Raises:
        RedriveError: from each method, when a file is missing or has another content.
        AdminError: likewise, when an issuer gives no token.
    """

    reason = "CredentialsMissing"
    missing = (
        "the credentials of the job are not at {}",
        "store them in the Secret that the BrokerConnection names for its jobs",
    )
    not_pem = (
        "the mounted files are no certificate with its key, or no authorities",
        "store them in PEM in the Secret or ConfigMap that the connection names",
    )

    def __init__(self, access: BrokerAccess) -> None:
        super().__init__(access.redirect_hosts)
        self._access = access
        self._folder = Path(access.folder)

    def access(self) -> Access:
        """Return them as the clients for administration take them."""
        if self._access.method is not Method.ACCESS_KEY:
            return super().access()
        secret = self._text(self._folder / "credentials" / "secret-key")
        return Access(tls=self._tls(), signing_key=(self._access.user or "", secret))

    def ledger_key(self) -> bytes:
        """Return the key that signs the records of the policy's ledger.

        Raises:
            RedriveError: the file is missing, or holds something else.
        """
        file = self._folder / "ledger" / "key"
        try:
            return bytes.fromhex(self._text(file))
        except (RedriveError, ValueError):
            raise RedriveError(
                f"file {file} must contain the key of the ledger, in hexadecimal digits",
                remedy="mount the Secret that the operator creates for the policy, with the label "
                "redrive.io/policy",
                reason="CredentialsMissing",
            ) from None

    def object_store_keys(self) -> dict[str, str]:
        """Return the keys of the destination of an Inspection by name; empty if none are mounted.

        Raises:
            RedriveError: a file is not readable.
        """
        folder = self._folder / "destination"
        return {file.name: self._text(file) for file in sorted(folder.glob("*-*"))}

    def _token(self) -> str | None:
        if self._access.method is Method.TOKEN:
            return self._text(self._folder / "credentials" / "token")
        return self._issued() if self._access.method is Method.OAUTH2 else None

    async def _issue(self) -> oauth2.Issued:
        access = self._access
        client = oauth2.Client(
            access.issuer_url or "",
            access.client_id or "",
            self._text(self._folder / "credentials" / "client-secret"),
            audience=access.audience,
            scope=access.scope,
        )
        if (authorities := self._folder / "issuer-ca" / "ca.crt").exists():
            client = replace(client, tls=self._context(ca=self._text(authorities)))
        async with Http.open() as http:
            return await oauth2.issue(client, http)

    def _certificate(self) -> tuple[Path, Path] | None:
        folder = self._folder / "credentials"
        return (
            (folder / "tls.crt", folder / "tls.key") if self._access.method is Method.TLS else None
        )

    def _authorities(self) -> Path | None:
        file = self._folder / "ca" / "ca.crt"
        return file if file.exists() else None


_job_credentials: dict[str, JobCredentials] = {}


def job_credentials() -> JobCredentials:
    """Return the credentials that the environment names, the same ones for a whole process.

    Raises:
        RedriveError: it names none.
        InvalidSpecError: its variable can't be read.
    """
    written = os.environ.get(ACCESS_VARIABLE, "")
    if not written:
        raise RedriveError(
            f"the environment variable {ACCESS_VARIABLE} is not set",
            remedy="give it to driver and executors, as the operator does",
            reason="CredentialsMissing",
        )
    if written not in _job_credentials:
        _job_credentials[written] = JobCredentials(BrokerAccess.decode(written))
    return _job_credentials[written]


class SourceCredentials(BrokerCredentials):
    """Credentials of a query, and the authorities that it trusts.

    Raises:
        RedriveError: from each method, when a file is missing or of another form.
        AdminError: likewise, when an issuer gives no token.
    """

    reason = "CredentialsUnreadable"
    missing = (
        "there are no credentials at {}, which an option names",
        "put the file there on the driver and on each executor",
    )
    not_pem = (
        "the files that the options name are no certificate with its key, or no authorities",
        "put files in PEM there, on the driver and on each executor",
    )

    def __init__(self, options: SourceAuthentication) -> None:
        super().__init__()
        self._options = options

    def _token(self) -> str | None:
        if self._options.plugin is Plugin.OAUTH2:
            return self._issued()
        if "token" in self._options.files:
            return self._text(self._file("token"))
        return self._options.token

    async def _issue(self) -> oauth2.Issued:
        issuer, file = self._options.issuer, self._file("client")
        try:
            key = json.loads(self._text(file))
            named = str(key["client_id"]), str(key["client_secret"])
        except (ValueError, KeyError, TypeError):
            got = "no JSON with client_id and client_secret"
            raise self._unusable(self.missing, got, file) from None
        authorities = self._authorities()
        tls = None if authorities is None else self._context(ca=self._text(authorities))
        client = oauth2.Client(
            issuer["issuerUrl"],
            *named,
            audience=issuer.get("audience"),
            scope=issuer.get("scope"),
            tls=tls,
        )
        async with Http.open() as http:
            return await oauth2.issue(client, http)

    def _certificate(self) -> tuple[Path, Path] | None:
        if self._options.plugin is not Plugin.TLS:
            return None
        return self._file("certificate"), self._file("key")

    def _authorities(self) -> Path | None:
        return None if self._options.trusted is None else Path(self._options.trusted)

    def _file(self, name: str) -> Path:
        return Path(self._options.files[name])


_source_credentials: dict[str, SourceCredentials] = {}


def source_credentials(options: SourceAuthentication) -> SourceCredentials:
    """Return the credentials that *options* name, the same ones for a whole process."""
    key = json.dumps(dataclasses.asdict(options))
    return _source_credentials.setdefault(key, SourceCredentials(options))
