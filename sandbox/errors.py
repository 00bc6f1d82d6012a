"""What goes wrong while the sandbox is set up, started or stopped; raised all over this package."""

from __future__ import annotations

from redrive.errors import RedriveError


class SandboxError(RedriveError):
    """A part could not be fetched, built, started or stopped."""
