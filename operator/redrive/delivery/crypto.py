"""End-to-end encryption of contents; taken by consumers and producers as `crypto=`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulsar

from redrive.errors import InvalidSpecError


@dataclass(frozen=True)
class Crypto:
    """Encrypt contents before the broker sees them, and decrypt what comes from it.

    Keys and properties are not encrypted, nor is the cause that travels with a failed message: see
    `Redaction`.

    Attributes:
        key: the name that encrypted messages give for their key.
        public_key: a file, in PEM, of the key that contents are encrypted with.
        private_key: a file of the key that decrypts them; needed by consumers only.

    Raises:
        InvalidSpecError: the name is empty, or there is no such file.
    """

    key: str
    public_key: str | os.PathLike[str]
    private_key: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        """Refuse what the client would take for no encryption, or find out at the first message."""
        if not self.key:
            raise InvalidSpecError(
                "encrypted messages name their key", got="an empty name", remedy="give key= a name"
            )
        for file in (os.fspath(self.public_key), os.fspath(self.private_key)):
            if file and not os.access(file, os.R_OK):
                raise InvalidSpecError(
                    "keys are read from files in PEM",
                    got=f"{file}, which can't be read",
                    remedy="mount the key there, and let this process read it",
                )


def for_consumer(crypto: Crypto | None) -> Mapping[str, Any]:
    """Return what `Client.subscribe` and `Client.create_reader` take of *crypto*.

    Raises:
        InvalidSpecError: it has no private key.
    """
    if crypto is None:
        return {}
    if not crypto.private_key:
        raise InvalidSpecError(
            "a consumer decrypts messages",
            got="crypto= without a private key",
            remedy="give private_key= a file",
        )
    return {"crypto_key_reader": _reader(crypto)}


def for_producer(crypto: Crypto | None) -> Mapping[str, Any]:
    """Return what `Client.create_producer` takes of *crypto*."""
    if crypto is None:
        return {}
    return {"encryption_key": crypto.key, "crypto_key_reader": _reader(crypto)}


def _reader(crypto: Crypto) -> pulsar.CryptoKeyReader:
    return pulsar.CryptoKeyReader(os.fspath(crypto.public_key), os.fspath(crypto.private_key))
