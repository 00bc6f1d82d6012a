"""Credentials of a call to a broker, and how its certificate is verified.

Made where credentials are read (`redrive.kube.credentials`, the replay job); used by `client` for
each call.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Protocol

from redrive.policy.patterns import Patterns


@dataclass(frozen=True)
class Access:
    """Credentials as they go out; never shown.

    Attributes:
        headers: sent with every call.
        tls: how to speak TLS; None trusts the certificate authorities of this machine.
        hosts: where else than to the host of the call's URL they may go when the broker redirects,
            as patterns in which `*` stands for any characters but a dot.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()

    @classmethod
    def bearer(
        cls,
        token: str,
        tls: ssl.SSLContext | None = None,
        hosts: tuple[str, ...] = (),
    ) -> Access:
        """Act as the role of *token*."""
        return cls({"Authorization": f"Bearer {token}"}, tls, hosts)

    def may_go_to(self, host: str) -> bool:
        """Whether one of `hosts` is *host*."""
        return Patterns(tuple(map(str.lower, self.hosts)), but=".").match(host.lower())

    @property
    def held(self) -> Access:
        """Return this: these credentials never change."""
        return self

    async def renewed(self, refused: Access) -> Access | None:  # noqa: ARG002  of the protocol
        """Return None: there are no others."""
        return None


class Credentials(Protocol):
    """Credentials that may change while they are in use."""

    @property
    def held(self) -> Access:
        """What to call with."""

    async def renewed(self, refused: Access) -> Access | None:
        """Return what to try after a broker has refused *refused* (401); None if nothing is new.

        Raises:
            RedriveError: they can't be read.
        """


def context(
    *, ca: str | None = None, certificate: bytes | None = None, key: bytes | None = None
) -> ssl.SSLContext:
    """Return how to speak TLS; host names are verified, and nothing older than TLS 1.2 is spoken.

    Args:
        ca: certificates in PEM that are trusted in place of this machine's.
        certificate: of the client, in PEM, with its chain; with its *key*.
        key: in PEM, without a password.

    Raises:
        ValueError: one of them is no PEM, or the key is not that of the certificate.
    """
    if ca is not None and not ca.strip():
        raise ValueError("it is empty")  # the library would take this machine's
    try:
        made = ssl.create_default_context(cadata=ca)
        if certificate is not None and key is not None:
            with _file(certificate + b"\n" + key) as file:
                made.load_cert_chain(file, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(error.reason or "not PEM") from None
    return made


def _no_password() -> str:
    raise ValueError("the key is protected by a password")


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Give *content* a path, for a library that reads files only: in memory where that is known."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tls")
        try:
            path = Path(f"/proc/self/fd/{descriptor}")
            path.write_bytes(content)
            yield str(path)
        finally:
            os.close(descriptor)
    else:
        with NamedTemporaryFile() as file:  # readable by its owner only
            file.write(content)
            file.flush()
            yield file.name
