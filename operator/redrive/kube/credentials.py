"""Credentials of a BrokerConnection as an `Access` to its broker, with rotation and token refresh.

Every reconcile uses them. Secrets are read by name, never listed or watched: a watch would need
permission to read all Secrets. They are cached for `CACHE_SECONDS`, and read again when a broker
refuses them, at most once per second. All policies of a connection share one read every 15 s. A
changed Secret is in use within that time, or after the first refusal. The token of an issuer is
kept for 80 % of its lifetime.

If an issuer fails, its token stays in use until it expires. While the API server fails, credentials
from Secrets stay in use without limit. After a Secret is deleted, the next read fails.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from redrive.admin.access import Access, tls_context
from redrive.admin.errors import AdminError
from redrive.admin.fair_slots import FairSlots
from redrive.admin.http import Http
from redrive.api import connection
from redrive.api.model import CaRef
from redrive.api.rocketmq import RocketMQAuthentication
from redrive.auth import oauth2
from redrive.auth.method import USED_SHARE
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import Kubernetes, NotFoundError, ReferenceNotFoundError, UnavailableError
from redrive.kube.resources import Key
from redrive.reasons import Reason

CACHE_SECONDS = 15.0
"""Seconds that credentials are cached before they are read again."""
REFUSED_SECONDS = 1.0
"""Minimum interval of reads while a broker refuses them, or while they cannot be read."""
MAX_PARSED = 64
"""TLS settings that are kept. Large ones take a megabyte."""
LONG_PARSE_SECONDS = 0.01
PAUSES = 4
"""Pause after a longer parse, as a multiple of its time."""
_TRANSIENT = (UnavailableError, AdminError)
"""Errors that do not invalidate the cached credentials: any of an issuer, or Kubernetes is down."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Material:
    """Credentials as read; equal if nothing changed.

    Attributes:
        token: token to send; None with a client certificate.
        tls: certificate authorities to trust, and a client certificate; None without either.
        lifetime: seconds for which the token is valid; None if unknown.
        user: of RocketMQ, whose secret key the token is; None at Pulsar.
    """

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    lifetime: float | None = field(default=None, compare=False)
    user: str | None = None


class TlsFiles:
    """Parser of certificates and keys; unchanged ones are parsed once.

    OpenSSL blocks the event loop meanwhile, even from a thread. So namespaces take turns, and long
    files take a part of the time only.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns = FairSlots(1)
        self._parsed: dict[bytes, ssl.SSLContext | ValueError] = {}

    async def parse(
        self,
        namespace: str,
        ca: str | None = None,
        certificate: bytes | None = None,
        key: bytes | None = None,
    ) -> ssl.SSLContext:
        """Return `tls_context` of files of a namespace.

        Raises:
            ValueError: as `tls_context` does.
        """
        content = hashlib.sha256(repr((ca, certificate, key)).encode()).digest()
        parsed = self._parsed.get(content)
        if parsed is None:
            async with self._turns.slot(namespace):
                parsed = self._parsed.get(content)
                if parsed is None:
                    began = self._clock()
                    parsed = self._parsed[content] = _parsed(ca, certificate, key)
                    if len(self._parsed) > MAX_PARSED:
                        del self._parsed[next(iter(self._parsed))]
                    if (seconds := self._clock() - began) > LONG_PARSE_SECONDS:
                        await asyncio.sleep(PAUSES * seconds)
        if isinstance(parsed, ValueError):
            raise parsed.with_traceback(None)
        return parsed


def _parsed(
    ca: str | None, certificate: bytes | None, key: bytes | None
) -> ssl.SSLContext | ValueError:
    try:
        return tls_context(ca=ca, certificate=certificate, key=key)
    except ValueError as error:
        return error


class KeptCredentials:
    """Cached credentials of one connection, shared by all its users.

    Attributes:
        held: the latest credentials.

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
        self.held = Access()
        self._material: Material | None = None
        self._failure: RedriveError | None = None
        self._due = self._read_at = self._valid_until = float("-inf")

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
            if self.held is refused and self._clock() >= self._read_at + REFUSED_SECONDS:
                await self._read_now()
            if self._failure is not None and (self.held is refused or not self._is_valid()):
                raise self._failure
            return None if self.held is refused else self.held

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
        kept = CACHE_SECONDS if material.lifetime is None else lifetime * USED_SHARE
        self._due = max(began + kept, self._read_at + REFUSED_SECONDS)
        if material != self._material:
            self.held = _access(material, self._hosts)
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
        self._tls_files = TlsFiles()

    async def read(self, namespace: str, spec: connection.BrokerConnectionSpec) -> Material:
        """Read the credentials of a connection in *namespace*.

        Raises:
            RedriveError: a part is missing or invalid.
        """
        broker = spec.pulsar if spec.rocketmq is None else spec.rocketmq
        ca, tls = None, None
        if broker.tls is not None:
            ca, tls = await self._ca(namespace, broker.tls.ca_ref)
        if spec.rocketmq is not None:
            return await self._access_key(namespace, spec.rocketmq.authentication, tls)
        match spec.pulsar.authentication:
            case connection.Authentication(token=connection.TokenOrigin() as origin):
                return Material(token=await self._token(namespace, origin), tls=tls)
            case connection.Authentication(oauth2=connection.OAuth2() as client):
                issued = await self._issued(namespace, client)
                return Material(token=issued.token, tls=tls, lifetime=issued.lifetime)
            case connection.Authentication(tls=connection.ClientCertificate() as certificate):
                secret = Key(namespace, certificate.secret_ref.name)
                return Material(tls=await self._certificate(secret, ca))
            case _:
                return Material(tls=tls)

    async def _access_key(
        self, namespace: str, authentication: RocketMQAuthentication, tls: ssl.SSLContext | None
    ) -> Material:
        key = authentication.access_key
        if key is None:
            return Material(tls=tls)
        secret = Key(namespace, key.secret_ref.name)
        text = await self._kubernetes.read_secret_key(secret, key.secret_ref.key)
        return Material(token=text, tls=tls, user=key.user)

    async def _token(self, namespace: str, origin: connection.TokenOrigin) -> str:
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

    async def _certificate(self, secret: Key, ca: str | None) -> ssl.SSLContext:
        """Read a client certificate; return TLS settings with it and the valid authorities *ca*."""
        read = self._kubernetes.read_key
        certificate = await read(resources.SECRETS, secret, "tls.crt")
        key = await read(resources.SECRETS, secret, "tls.key")
        try:
            return await self._tls_files.parse(secret.namespace, ca, certificate, key)
        except ValueError as error:
            raise Reason.CERTIFICATE_INVALID.error(
                f"the Secret {secret} has no certificate with its key",
                got=str(error),
                remedy="store them under tls.crt and tls.key, in PEM and without a password",
            ) from None

    async def _ca(self, namespace: str, ref: CaRef) -> tuple[str, ssl.SSLContext]:
        """Read certificate authorities; return them in PEM, and TLS settings that trust them."""
        kind = {r.kind: r for r in (resources.SECRETS, resources.CONFIG_MAPS)}[ref.kind]
        where = f"{ref.kind} {namespace}/{ref.name}"
        try:
            pem = (
                await self._kubernetes.read_key(kind, Key(namespace, ref.name), ref.key)
            ).decode()
            return pem, await self._tls_files.parse(namespace, pem)
        except (NotFoundError, ReferenceNotFoundError, ValueError) as error:
            raise Reason.CA_INVALID.error(
                f"{where} has no certificate authorities under {ref.key!r}",
                got=str(error),
                remedy="store them there in PEM, or correct the caRef",
            ) from None

    async def _issued(self, namespace: str, spec: connection.OAuth2) -> oauth2.Issued:
        ref = spec.client_secret.secret_ref
        secret = await self._kubernetes.read_secret_key(Key(namespace, ref.name), ref.key)
        tls = None if spec.ca_ref is None else (await self._ca(namespace, spec.ca_ref))[1]
        client = oauth2.Client(
            spec.issuer_url,
            spec.client_id,
            secret,
            audience=spec.audience,
            scope=spec.scope,
            tls=tls,
            namespace=namespace,
        )
        return await oauth2.issue(client, self._http)


def _access(material: Material, hosts: tuple[str, ...]) -> Access:
    if material.token is None:
        return Access(tls=material.tls, hosts=hosts)
    if material.user is not None:
        return Access(tls=material.tls, signing_key=(material.user, material.token))
    return Access.bearer(material.token, material.tls, hosts)
