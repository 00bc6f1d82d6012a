"""Credentials of a BrokerConnection as an `Access` to its broker, with rotation and token refresh.

Called by `connections` at every reconcile. Secrets are read by name, never listed or watched: a
watch would need the right to read all of them. They are cached for `KEPT_SECONDS`, and read again
at once when a broker refuses them. A thousand policies cost one read every 15 s, and a changed
Secret is in use within that time, or after the first refusal.

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

from redrive.admin.errors import AdminError
from redrive.admin.http import Access, Http, tls_context
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
    SecretKeyNotFoundError,
    SecretNotFoundError,
    UnavailableError,
)
from redrive.kube.resources import Key
from redrive.reasons import Reason

KEPT_SECONDS = 15.0
"""How long what was read is used without another look."""
REFUSED_SECONDS = 1.0
"""How often it is read at most while a broker refuses it, or while it can't be read."""
_EARLY = 0.2
"""The share of a token's life before whose end another one is fetched."""
_PASSING = (UnavailableError, AdminError)
"""What says nothing against what is held: of an issuer all, of Kubernetes that it is away."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Material:
    """What an `Access` is made of; equal where nothing has changed.

    Attributes:
        token: to send; None where the certificate says who we are.
        ca: authorities to trust, in PEM.
        certificate: in PEM, with its `key`.
        lifetime: for how many seconds the token is good; None where that isn't known.
    """

    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    lifetime: float | None = field(default=None, compare=False)


class KeptCredentials:
    """Cached credentials of one connection, shared by all that use it.

    Args:
        read: reads what they are made of; raises a `RedriveError` where it can't.
        clock: monotonic seconds.
        hosts: where they may go by a redirect, as `Access.hosts`.
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
        self._due = self._looked_at = self._good_until = float("-inf")

    @property
    def held(self) -> Access:
        """Return what was read last."""
        return self._held

    async def refresh(self) -> None:
        """Read again what was read long ago.

        One caller reads for all; the others do not wait while what is held is valid.

        Raises:
            RedriveError: it can't be read, and nothing valid is held. All callers that waited for
                the read, or that come within a second after it, get the same error.
        """
        if self._reading.locked() and self._is_good():
            return
        async with self._reading:
            if self._clock() >= self._due:
                await self._look()
            if self._failure is not None and not self._is_good():
                raise self._failure

    async def renewed(self, refused: Access) -> Access | None:
        """Return what to try after a broker has refused *refused*; None if nothing is new.

        Raises:
            RedriveError: it can't be read.
        """
        async with self._reading:
            if self._held is refused and self._clock() >= self._looked_at + REFUSED_SECONDS:
                await self._look()
            if self._failure is not None and (self._held is refused or not self._is_good()):
                raise self._failure
            return None if self._held is refused else self._held

    def _is_good(self) -> bool:
        """Whether what is held may be used, even if the last look has brought nothing."""
        passing = self._failure is None or isinstance(self._failure, _PASSING)
        return passing and self._clock() < self._good_until

    async def _look(self) -> None:
        began = self._clock()
        try:
            material = await self._read()
        except RedriveError as error:
            if self._failure is None:
                logger.warning("credentials can't be read: %s", error)
            self._failure = error
            # From now on: otherwise each caller that waited for a slow read would read again.
            self._looked_at = self._clock()
            self._due = self._looked_at + REFUSED_SECONDS
            return
        self._failure = None
        self._looked_at = self._clock()
        lifetime = float("inf") if material.lifetime is None else material.lifetime
        self._good_until = began + lifetime
        kept = KEPT_SECONDS if material.lifetime is None else lifetime * (1 - _EARLY)
        self._due = max(began + kept, self._looked_at + REFUSED_SECONDS)
        if material != self._material:
            self._held = _access(material, self._hosts)
            self._material = material


class CredentialReader:
    """Reads credentials from where a spec says that they lie.

    Args:
        kubernetes: reads Secrets and ConfigMaps.
        http: asks issuers.
        files: the folder with a folder of files for each namespace; None if there is none.
    """

    def __init__(self, kubernetes: Kubernetes, http: Http, files: Path | None) -> None:
        self._kubernetes = kubernetes
        self._http = http
        self._files = files

    async def read(self, namespace: str, spec: BrokerConnectionSpec) -> Material:
        """Read the credentials of a connection in *namespace*.

        Raises:
            RedriveError: something is missing, or is not what it should be.
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
                found = await self._certificate(Key(namespace, certificate.secret_ref.name))
                return Material(ca=ca, certificate=found[0], key=found[1])
            case _:
                return Material(ca=ca)

    async def _token(self, namespace: str, origin: TokenOrigin) -> str:
        if origin.file is not None:
            return await asyncio.to_thread(self._from_file, namespace, origin.file)
        assert origin.secret_ref is not None  # noqa: S101  one of the two
        secret = Key(namespace, origin.secret_ref.name)
        return await self._kubernetes.read_secret_key(secret, origin.secret_ref.key)

    def _from_file(self, namespace: str, name: str) -> str:
        if self._files is None:
            raise Reason.TOKEN_FILE_INVALID.error(
                "this operator was given no folder of credentials",
                remedy="start it with --credentials, or name a Secret",
            )
        file = self._files / namespace / name
        try:
            text = file.read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Reason.TOKEN_FILE_INVALID.error(
                f"the file {file} can't be read",
                got=type(error).__name__,
                remedy="mount it into the operator's pod, or correct authentication.token.file",
            ) from None
        if not text or not text.isprintable():
            raise Reason.TOKEN_FILE_INVALID.error(
                f"the file {file} holds no token: it is empty or not plain text",
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
                f"the Secret {secret} holds no certificate with its key",
                got=str(error),
                remedy="store them under tls.crt and tls.key, in PEM and without a password",
            ) from None
        return certificate, key

    async def _ca(self, namespace: str, ref: CaRef) -> str:
        """Read authorities, and see that they are some."""
        kind = {r.kind: r for r in (resources.SECRETS, resources.CONFIG_MAPS)}[ref.kind]
        where = f"{ref.kind} {namespace}/{ref.name}"
        try:
            pem = (
                await self._kubernetes.read_key(kind, Key(namespace, ref.name), ref.key)
            ).decode()
            tls_context(ca=pem)
        except (NotFoundError, SecretNotFoundError, SecretKeyNotFoundError, ValueError) as error:
            raise Reason.CA_INVALID.error(
                f"no certificate authorities are under {ref.key!r} of the {where}",
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
