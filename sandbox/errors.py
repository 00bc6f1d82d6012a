"""The error of this package: the sandbox can't be set up, started or stopped."""

from __future__ import annotations

from redrive.errors import RedriveError


class SandboxError(RedriveError):
    """A part could not be fetched, built, started or stopped."""
