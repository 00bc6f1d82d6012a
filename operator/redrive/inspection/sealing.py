"""Records of messages, encrypted for the one call that asked for them. Pure but for random keys.

A call makes a key pair and names its public key in the Inspection (X25519). The job encrypts with
ChaCha20-Poly1305, by a key of its own that it drops. So a status contains ciphertext that its
readers, backups of the cluster and the job itself cannot decrypt later.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from redrive.errors import InvalidSpecError, RedriveError

MAX_OPENED = 32 * 2**20
"""Bytes of decrypted records, as JSON. A job of another version could compress any length."""
_KEY_BYTES, _TAG_BYTES = 32, 16
_NONCE = bytes(12)
"""The same each time: no key encrypts twice."""


class Recipient:
    """A key pair for one Inspection.

    Attributes:
        public_key: for `recipient` of the spec.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public_key = base64.b64encode(self._private.public_key().public_bytes_raw()).decode()

    def open(self, sealed: str, uid: str, record: type) -> list[Any]:
        """Decrypt the records of the Inspection with this uid, of the TypedDict *record*.

        Raises:
            RedriveError: they are for another key or Inspection, or of another version.
        """
        try:
            content = base64.b64decode(sealed, validate=True)
            sender, text = content[:_KEY_BYTES], content[_KEY_BYTES:]
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(sender))
            cipher = ChaCha20Poly1305(_derive(shared, sender, self.public_key))
            text = cipher.decrypt(_NONCE, text, uid.encode())
            records = json.loads(zlib.decompressobj().decompress(text, MAX_OPENED))
            if isinstance(records, list) and all(
                fields.keys() == record.__annotations__.keys() for fields in records
            ):
                return records
        except (InvalidTag, AttributeError, TypeError, ValueError, zlib.error) as error:
            raise _unreadable() from error
        raise _unreadable()


def seal(records: Sequence[object], recipient: str, uid: str, max_length: int) -> str:
    """Encrypt as many of the first *records* as fit into *max_length* characters of base64.

    A record that does not fit alone is left out. The JSON has at most `MAX_OPENED` bytes.

    Args:
        records: the first ones are preferred; without a record the text has 80 characters.
        recipient: public key.
        uid: of the Inspection, without which the text can't be decrypted.
        max_length: at least 80.

    Raises:
        InvalidSpecError: *recipient* is not a public key.
    """
    max_bytes = max_length // 4 * 3 - _KEY_BYTES - _TAG_BYTES
    if _share(records, max_bytes) > 1:
        records = [record for record in records if _share([record], max_bytes) <= 1]
        while len(records) > 1 and (share := _share(records, max_bytes)) > 1:
            # Sizes differ, so the share that fits is an estimate: the loop corrects it.
            records = records[: max(1, min(len(records) - 1, int(len(records) / share)))]
    return _sealed(records, recipient, uid)


def _share(records: Sequence[object], max_bytes: int) -> float:
    """Return the size of *records* relative to their limits: at most 1 if they fit."""
    content = json.dumps(records).encode()
    return max(len(content) / MAX_OPENED, len(zlib.compress(content)) / max_bytes)


def _sealed(records: Sequence[object], recipient: str, uid: str) -> str:
    private = X25519PrivateKey.generate()
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(base64.b64decode(recipient)))
    except ValueError as error:
        raise InvalidSpecError(
            "`recipient` must be a public key of X25519",
            got=recipient,
            remedy="use redrive peek or causes, which makes one for each call",
        ) from error
    sender = private.public_key().public_bytes_raw()
    cipher = ChaCha20Poly1305(_derive(shared, sender, recipient))
    content = zlib.compress(json.dumps(records).encode())
    return base64.b64encode(sender + cipher.encrypt(_NONCE, content, uid.encode())).decode()


def _derive(shared: bytes, sender: bytes, recipient: str) -> bytes:
    """Return the key of one message; it is bound to both public keys."""
    info = b"redrive inspection" + sender + base64.b64decode(recipient)
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(shared)


def _unreadable() -> RedriveError:
    return RedriveError(
        "the result of the Inspection can't be decrypted",
        remedy="repeat the command with the version of the operator: see redrive version",
        reason="MessagesUnreadable",
    )
