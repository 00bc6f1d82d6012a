"""Credentials of a BrokerConnection as an `Access` to its broker, with rotation and token refresh.

Every reconcile uses them. Secrets are read by name, never listed or watched: a watch would need
permission to read all Secrets. They are cached for `CACHE_SECONDS`, and read again at once when a
broker refuses them. A thousand policies cost one read every 15 s. A changed Secret is in use within
that time, or after the first refusal. The token of an issuer is kept for 80 % of its lifetime.

If an issuer or the API server fails, the current credentials stay in use until they expire. A
deleted Secret is reported at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from redrive.admin.access import Access, tls_context
from redrive.admin.errors import AdminError
from redrive.admin.http import Http
from redrive.api.connection import (
    Authentication,
    BrokerConnectionSpec,
    CaRef,
    ClientCertificate,
    OAuth2,
    TokenOrigin,
)
from redrive.auth import oauth2
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import (
    Kubernetes,
    NotFoundError,
    ReferenceNotFoundError,
    UnavailableError,
)
from redrive.kube.resources import Key
from redrive.reasons import Reason

CACHE_SECONDS = 15.0
"""Seconds that credentials are cached before they are read again."""
REFUSED_SECONDS = 1.0
"""Minimum interval of reads while a broker refuses them, or while they cannot be read."""
_EARLY = 0.2
"""Share of a token's lifetime by which it is renewed before its end."""
_TRANSIENT = (UnavailableError, AdminError)
"""Errors that do not invalidate the cached credentials: any of an issuer, or Kubernetes is down."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Material:
    """Credentials as read; equal if nothing changed.

    Attributes:
        token: token to send; None with a client certificate.
        ca: certificate authorities to trust, in PEM.
        certificate: client certificate in PEM, with its `key`.
        lifetime: seconds for which the token is valid; None if unknown.
    """

    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    lifetime: float | None = field(default=None, compare=False)


class KeptCredentials:
    """Cached credentials of one connection, shared by all its users.

    Args:
        read: reads them; raises a `RedriveError` on failure.
        clock: monotonic seconds.
        hosts: allowed hosts of redirects, see `Access.hosts`.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Material]],
        clock: Callable[[], float] = time.monotonic,
        hosts: tuple[str, ...] = (),
    ) -> None:
        self._read = read
        self._clock = clock
        self._hosts = hosts
        self._reading = asyncio.Lock()
        self._held = Access()
        self._material: Material | None = None
        self._failure: RedriveError | None = None
        self._due = self._read_at = self._valid_until = float("-inf")

    @property
    def held(self) -> Access:
        """Return the latest credentials."""
        return self._held

    async def refresh(self) -> None:
        """Read the credentials again if they are due.

        One caller reads for all; the others do not wait while the cached credentials are valid.

        Raises:
            RedriveError: the read failed, and nothing valid is cached. All callers that waited for
                the read, or that come within a second after it, get the same error.
        """
        if self._reading.locked() and self._is_valid():
            return
        async with self._reading:
            if self._clock() >= self._due:
                await self._read_now()
            if self._failure is not None and not self._is_valid():
                raise self._failure

    async def renewed(self, refused: Access) -> Access | None:
        """Return new credentials after a broker refused *refused*; None if there are none.

        Raises:
            RedriveError: the read failed.
        """
        async with self._reading:
            if self._held is refused and self._clock() >= self._read_at + REFUSED_SECONDS:
                await self._read_now()
            if self._failure is not None and (self._held is refused or not self._is_valid()):
                raise self._failure
            return None if self._held is refused else self._held

    def _is_valid(self) -> bool:
        """Return True if the cached credentials may be used, even if the last read failed."""
        usable = self._failure is None or isinstance(self._failure, _TRANSIENT)
        return usable and self._clock() < self._valid_until

    async def _read_now(self) -> None:
        began = self._clock()
        try:
            material = await self._read()
        except RedriveError as error:
            if self._failure is None:
                logger.warning("credentials cannot be read: %s", error)
            self._failure = error
            # After the read: otherwise each caller that waited for a slow one would read again.
            self._read_at = self._clock()
            self._due = self._read_at + REFUSED_SECONDS
            return
        self._failure = None
        self._read_at = self._clock()
        lifetime = float("inf") if material.lifetime is None else material.lifetime
        self._valid_until = began + lifetime
        kept = CACHE_SECONDS if material.lifetime is None else lifetime * (1 - _EARLY)
        self._due = max(began + kept, self._read_at + REFUSED_SECONDS)
        if material != self._material:
            self._held = _access(material, self._hosts)
            self._material = material


class CredentialReader:
    """Reads credentials from the source that a spec names.

    Args:
        kubernetes: reads Secrets and ConfigMaps.
        http: requests tokens of issuers.
        files: folder that has a folder of files for each namespace; None without one.
    """

    def __init__(self, kubernetes: Kubernetes, http: Http, files: Path | None) -> None:
        self._kubernetes = kubernetes
        self._http = http
        self._files = files

    async def read(self, namespace: str, spec: BrokerConnectionSpec) -> Material:
        """Read the credentials of a connection in *namespace*.

        Raises:
            RedriveError: a part is missing or invalid.
        """
        tls = spec.pulsar.tls
        ca = None if tls is None else await self._ca(namespace, tls.ca_ref)
        match spec.pulsar.authentication:
            case Authentication(token=TokenOrigin() as origin):
                return Material(token=await self._token(namespace, origin), ca=ca)
            case Authentication(oauth2=OAuth2() as client):
                issued = await self._issued(namespace, client)
                return Material(token=issued.token, ca=ca, lifetime=issued.lifetime)
            case Authentication(tls=ClientCertificate() as certificate):
                pem, key = await self._certificate(Key(namespace, certificate.secret_ref.name))
                return Material(ca=ca, certificate=pem, key=key)
            case _:
                return Material(ca=ca)

    async def _token(self, namespace: str, origin: TokenOrigin) -> str:
        if origin.file is not None:
            return await asyncio.to_thread(self._from_file, namespace, origin.file)
        assert origin.secret_ref is not None  # noqa: S101  either file or secretRef is set
        secret = Key(namespace, origin.secret_ref.name)
        return await self._kubernetes.read_secret_key(secret, origin.secret_ref.key)

    def _from_file(self, namespace: str, name: str) -> str:
        if self._files is None:
            raise Reason.TOKEN_FILE_INVALID.error(
                "this operator has no folder of credentials",
                remedy="start it with --credentials, or use a Secret",
            )
        file = self._files / namespace / name
        try:
            text = file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Reason.TOKEN_FILE_INVALID.error(
                f"the file {file} cannot be read",
                got=type(error).__name__,
                remedy="mount it into the operator's pod, or correct authentication.token.file",
            ) from None
        if not text or not text.isprintable():
            raise Reason.TOKEN_FILE_INVALID.error(
                f"the file {file} has no token: it is empty or not plain text",
                remedy="store the token itself in it",
            )
        return text

    async def _certificate(self, secret: Key) -> tuple[bytes, bytes]:
        read = self._kubernetes.read_key
        certificate = await read(resources.SECRETS, secret, "tls.crt")
        key = await read(resources.SECRETS, secret, "tls.key")
        try:
            tls_context(certificate=certificate, key=key)
        except ValueError as error:
            raise Reason.CERTIFICATE_INVALID.error(
                f"the Secret {secret} has no certificate with its key",
                got=str(error),
                remedy="store them under tls.crt and tls.key, in PEM and without a password",
            ) from None
        return certificate, key

    async def _ca(self, namespace: str, ref: CaRef) -> str:
        """Read certificate authorities, and validate them."""
        kind = {r.kind: r for r in (resources.SECRETS, resources.CONFIG_MAPS)}[ref.kind]
        where = f"{ref.kind} {namespace}/{ref.name}"
        try:
            pem = (
                await self._kubernetes.read_key(kind, Key(namespace, ref.name), ref.key)
            ).decode()
            tls_context(ca=pem)
        except (NotFoundError, ReferenceNotFoundError, ValueError) as error:
            raise Reason.CA_INVALID.error(
                f"{where} has no certificate authorities under {ref.key!r}",
                got=str(error),
                remedy="store them there in PEM, or correct the caRef",
            ) from None
        return pem

    async def _issued(self, namespace: str, spec: OAuth2) -> oauth2.Issued:
        ref = spec.client_secret.secret_ref
        secret = await self._kubernetes.read_secret_key(Key(namespace, ref.name), ref.key)
        ca = None if spec.ca_ref is None else await self._ca(namespace, spec.ca_ref)
        client = oauth2.Client(
            spec.issuer_url,
            spec.client_id,
            secret,
            audience=spec.audience,
            scope=spec.scope,
            tls=None if ca is None else tls_context(ca=ca),
        )
        return await oauth2.issue(client, self._http)


def _access(material: Material, hosts: tuple[str, ...]) -> Access:
    tls = None
    if material.ca is not None or material.certificate is not None:
        tls = tls_context(ca=material.ca, certificate=material.certificate, key=material.key)
    if material.token is None:
        return Access(tls=tls, hosts=hosts)
    return Access.bearer(material.token, tls, hosts)
