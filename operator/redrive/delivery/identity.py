"""Names that no other process has; called by consumers and producers when they are made."""

from __future__ import annotations

import os


def identity(called: str | None = None) -> str:
    """Return *called*, by default the host's name, followed by something random."""
    return f"{called or _host()}-{os.urandom(6).hex()}"


def _host() -> str:
    import platform  # noqa: PLC0415 - takes long, and only those without a name need it

    return platform.node()
