"""Access to an HTTP server: headers and TLS, their renewal, and the origins that they may go to."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Protocol

from yarl import URL

from redrive.admin.shares import fair
from redrive.policy.values import Patterns

_PORT = re.compile(r":[0-9]+\Z")


@dataclass(frozen=True)
class Access:
    """Credentials as they are sent; never shown.

    Attributes:
        headers: sent with every call.
        tls: TLS settings; None trusts the certificate authorities of this machine.
        hosts: allowed hosts of redirects, beside the origin of the call's URL, as patterns in
            which `*` stands for any characters but a dot. A pattern without a port has the port
            of the call's URL.
        signing_key: name and secret of an access key of RocketMQ, by which calls are signed.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    signing_key: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def bearer(
        cls,
        token: str,
        tls: ssl.SSLContext | None = None,
        hosts: tuple[str, ...] = (),
    ) -> Access:
        """Return credentials of the role of *token*."""
        return cls({"Authorization": f"Bearer {token}"}, tls, hosts)

    def may_go_to(self, target: URL, asked: URL) -> bool:
        """Return True if a call to *asked* may be redirected to *target* with these credentials.

        The scheme must be the same, so data sent over TLS is never sent without it.
        """
        if same_origin(target, asked):
            return True
        if target.scheme != asked.scheme or not target.host:
            return False
        patterns = tuple(
            pattern.lower() if _PORT.search(pattern) else f"{pattern.lower()}:{asked.port}"
            for pattern in self.hosts
        )
        address = f"{target.host_subcomponent}:{target.port}"
        return Patterns(patterns, but=".").match(address.lower())

    @property
    def held(self) -> Access:
        """Return these credentials, which never change."""
        return self

    async def renewed(self, refused: Access) -> Access | None:  # noqa: ARG002  of the protocol
        """Return None: there are no other credentials."""
        return None


class Credentials(Protocol):
    """Credentials that may be renewed."""

    @property
    def held(self) -> Access:
        """Return the current credentials."""

    async def renewed(self, refused: Access) -> Access | None:
        """Return new credentials after a broker refused *refused* (401); None if there are none.

        Raises:
            RedriveError: they cannot be read.
        """


MAX_AUTHORITIES = 2**19
"""Maximum characters of certificate authorities: their parsing blocks the event loop, by 0.2 s for
a thousand certificates. Those of an operating system have half of this."""
MAX_CHAIN = 2**16
"""Maximum bytes of a client certificate with its chain."""
MAX_KEY = 2**12
"""Maximum bytes of a private key. One of RSA with 4096 bits has 3.2 KiB; a signature by one with
16384 bits, in each handshake, blocks the event loop for 0.3 s."""


def tls_context(
    *, ca: str | None = None, certificate: bytes | None = None, key: bytes | None = None
) -> ssl.SSLContext:
    """Return TLS settings that verify host names and require TLS 1.2 or newer.

    Args:
        ca: trusted certificates in PEM, in place of this machine's.
        certificate: client certificate in PEM with its chain; requires *key*.
        key: in PEM, without a password.

    Raises:
        ValueError: a value is not PEM, or too long, or the key does not belong to the certificate.
    """
    for value, most in ((ca, MAX_AUTHORITIES), (certificate, MAX_CHAIN), (key, MAX_KEY)):
        if value is not None and len(value) > most:
            raise ValueError(f"{len(value)} bytes, more than {most}")
    if ca is not None and not ca.strip():
        raise ValueError("it is empty")  # the library would trust this machine's authorities
    try:
        made = ssl.create_default_context(cadata=ca)
        if certificate is not None and key is not None:
            with _file(certificate + b"\n" + key) as file:
                made.load_cert_chain(file, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(error.reason or "not PEM") from None
    # A server chooses the group of DHE, and one of 10000 bits blocks the event loop for a second.
    names = [cipher["name"] for cipher in made.get_ciphers() if cipher["kea"] != "kx-dhe"]
    made.set_ciphers(":".join(names))
    made.options |= ssl.OP_NO_RENEGOTIATION
    return fair(made)


def _no_password() -> str:
    raise ValueError("the key is protected by a password")


@contextmanager
def _file(content: bytes) -> Iterator[str]:
    """Yield the path of a file with *content*, in memory if possible: the library needs a file."""
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


def same_origin(one: URL, other: URL) -> bool:
    """Return True if both have the same scheme, host and port."""
    return (one.scheme, (one.host or "").lower(), one.port) == (
        other.scheme,
        (other.host or "").lower(),
        other.port,
    )
