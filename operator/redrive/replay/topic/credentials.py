"""The credentials of the replay role, as a job finds them in its pod.

Read from files each time, which a kubelet renews when their Secret changes: a run may be long. Of
OAuth 2.0 each process keeps a token until most of its life is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pulsar

from redrive.admin import oauth2
from redrive.admin.access import Access, context
from redrive.admin.http import Http
from redrive.errors import RedriveError
from redrive.replay.spec import ACCESS_VARIABLE, BrokerAccess, Method

_USED_SHARE = 0.8
"""Of the life of a token, how long it is used."""

logger = logging.getLogger(__name__)


class CredentialsMissingError(RedriveError):
    """The pod of the job lacks credentials, or what is there is none."""

    reason: ClassVar[str] = "CredentialsMissing"


@dataclass(frozen=True)
class _Held:
    token: str
    until: float


class JobCredentials:
    """What a job shows to the broker, and trusts in.

    Raises:
        CredentialsMissingError: from each method, when a file is missing or not what it should be.
        AdminError: likewise, when an issuer gives no token.
    """

    def __init__(self, access: BrokerAccess) -> None:
        self._access = access
        self._folder = Path(access.folder)
        self._issuing = threading.Lock()
        self._held: _Held | None = None

    def access(self) -> Access:
        """Return them as the admin API takes them. Never call it where an event loop runs."""
        token, hosts = self._token(), self._access.redirect_hosts
        tls = self._tls()
        if token is None:
            return Access(tls=tls, hosts=hosts)
        return Access.bearer(token, tls, hosts)

    def client(self, service_url: str) -> dict[str, Any]:
        """Return them as `pulsar.Client` takes them."""
        options: dict[str, Any] = {"authentication": self._authentication()}
        if service_url.startswith("pulsar+ssl:"):
            options["tls_validate_hostname"] = True
            if (authorities := self._folder / "ca" / "ca.crt").exists():
                options["tls_trust_certs_file_path"] = str(authorities)
        return options

    def _authentication(self) -> pulsar.Authentication | None:
        if self._access.method is Method.TLS:
            self._tls()  # the client does not say what is wrong with it
            return pulsar.AuthenticationTLS(*map(str, self._certificate))
        token = self._token()
        return None if token is None else pulsar.AuthenticationToken(self._renewed(token))

    def _renewed(self, token: str) -> Any:  # noqa: ANN401  a function, as the client takes one
        """Return what gives a token for each connection; the client takes no exception."""

        def renewed() -> str:
            nonlocal token
            try:
                token = self._token() or token
            except RedriveError:
                logger.warning("the credentials can't be renewed", exc_info=True)
            return token

        return renewed

    def _token(self) -> str | None:
        if self._access.method is Method.TOKEN:
            return self._text("credentials/token")
        return self._issued() if self._access.method is Method.OAUTH2 else None

    def _issued(self) -> str:
        with self._issuing:
            if self._held is None or time.monotonic() >= self._held.until:
                began = time.monotonic()
                issued = asyncio.run(self._issue())
                self._held = _Held(issued.token, began + issued.lifetime * _USED_SHARE)
            return self._held.token

    async def _issue(self) -> oauth2.Issued:
        given = self._access
        authorities = "issuer-ca/ca.crt"
        client = oauth2.Client(
            given.issuer_url or "",
            given.client_id or "",
            self._text("credentials/client-secret"),
            audience=given.audience,
            scope=given.scope,
        )
        if (self._folder / authorities).exists():
            client = replace(client, tls=self._context(ca=self._text(authorities)))
        async with Http.open() as http:
            return await oauth2.issue(client, http)

    @property
    def _certificate(self) -> tuple[Path, Path]:
        folder = self._folder / "credentials"
        return folder / "tls.crt", folder / "tls.key"

    def _tls(self) -> Any:  # noqa: ANN401  an SSLContext, or None
        authorities = "ca/ca.crt"
        ca = self._text(authorities) if (self._folder / authorities).exists() else None
        if self._access.method is Method.TLS:
            certificate, key = map(self._bytes, self._certificate)
            return self._context(ca=ca, certificate=certificate, key=key)
        return None if ca is None else self._context(ca=ca)

    @staticmethod
    def _context(**parts: Any) -> Any:  # noqa: ANN401  as `context` takes them
        try:
            return context(**parts)
        except ValueError as error:
            raise CredentialsMissingError(
                "what is mounted is no certificate with its key, or no authorities",
                got=str(error),
                remedy="store them in PEM in the Secret or ConfigMap of the connection's replay",
            ) from None

    def _text(self, name: str) -> str:
        try:
            found = self._bytes(self._folder / name).decode("ascii").strip()
        except UnicodeDecodeError:
            found = ""
        if not found:
            raise _missing(self._folder / name, "nothing that is plain text")
        return found

    @staticmethod
    def _bytes(file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as error:
            raise _missing(file, type(error).__name__) from None


def _missing(file: Path, got: str) -> CredentialsMissingError:
    return CredentialsMissingError(
        f"the credentials of the replay role are not at {file}",
        got=got,
        remedy="store them in the Secret that replay.authentication of the PulsarConnection names",
    )


_known: dict[str, JobCredentials] = {}


def of_this_job() -> JobCredentials:
    """Return the credentials that the environment tells of, the same for a whole process.

    Raises:
        CredentialsMissingError: it tells of none.
        InvalidSpecError: what it tells can't be read.
    """
    written = os.environ.get(ACCESS_VARIABLE, "")
    if not written:
        raise CredentialsMissingError(
            f"the environment variable {ACCESS_VARIABLE} is not set",
            remedy="give it to driver and executors, as the operator does",
        )
    if written not in _known:
        _known[written] = JobCredentials(BrokerAccess.decode(written))
    return _known[written]
