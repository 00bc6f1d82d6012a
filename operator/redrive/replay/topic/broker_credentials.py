"""What a process shows to a broker, read again for each use; what it is, subclasses say.

Of OAuth 2.0 each process keeps a token until most of its life is over.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulsar

from redrive.admin import oauth2
from redrive.admin.access import Access, context
from redrive.admin.errors import AdminError
from redrive.errors import RedriveError
from redrive.replay.protocol.connection import ShownCredentials

_USED_SHARE = 0.8
"""Of the life of a token, how long it is used; the rest is for an issuer that gives none."""
_PAUSE_SECONDS = 30.0
"""Such an issuer is asked again after so long: each use waits for its answer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    issued: oauth2.Issued
    at: float

    def end_of(self, share: float) -> float:
        """Return when this share of its life is over."""
        return self.at + self.issued.lifetime * share


class BrokerCredentials(ABC):
    """What a process shows to a broker, and trusts in: made once for each it shows.

    Args:
        hosts: where else than to the host of the admin URL they may go, see `Access.hosts`.

    Raises:
        RedriveError: from each method, when a file is missing or not what it should be.
        AdminError: likewise, when an issuer gives no token.
    """

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
        """Return them as `redrive.replay.protocol` takes them."""
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

    @abstractmethod
    def _missing(self, file: Path, got: str) -> RedriveError:
        """Return the error for a file that is not there, or is empty."""

    @abstractmethod
    def _no_pem(self, got: str) -> RedriveError:
        """Return the error for certificate, key or authorities that are none."""

    def _authentication(self) -> pulsar.Authentication | None:
        if (certificate := self._certificate()) is not None:
            self._tls()  # the client does not say what is wrong with it
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
            logger.warning("the credentials can't be renewed", exc_info=True)
        return self._last

    def _issued(self) -> str:
        with self._issuing:
            held, now = self._held, time.monotonic()
            if held is None or now >= min(self._renewal_due, held.end_of(1.0)):
                try:
                    held = _Held(asyncio.run(self._issue()), now)
                    self._renewal_due = held.end_of(_USED_SHARE)
                except AdminError:
                    now = time.monotonic()
                    if held is None or now >= held.end_of(1.0):
                        raise
                    logger.warning("the last token is used till its end", exc_info=True)
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
            return context(**parts)
        except ValueError as error:
            raise self._no_pem(str(error)) from None

    def _text(self, file: Path) -> str:
        try:
            found = self._bytes(file).decode("ascii").strip()
        except UnicodeDecodeError:
            found = ""
        if not found:
            raise self._missing(file, "nothing that is plain text")
        return found

    def _bytes(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as error:
            raise self._missing(file, type(error).__name__) from None


def _immortal(authentication: pulsar.Authentication) -> pulsar.Authentication:
    """Keep what calls Python until the process is gone.

    Threads of a client go on for a moment after it is closed. The one that drops the last
    reference to a function waits for the interpreter, and aborts a process that ends by then.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(authentication))
    return authentication
