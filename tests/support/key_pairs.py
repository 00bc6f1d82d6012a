"""Key pairs that encrypt messages."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


def key_pair(folder: Path) -> tuple[Path, Path]:
    """Write a public and a private key to *folder*; return their files."""
    public, private = folder / "public.pem", folder / "private.pem"
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return public, private
