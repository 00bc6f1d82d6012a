"""The error of this package."""

from __future__ import annotations

from redrive.errors import RedriveError


class SandboxError(RedriveError):
    """A component could not be fetched, built, started, called or stopped."""
