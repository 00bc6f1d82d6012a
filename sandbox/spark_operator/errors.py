"""The reasons for which an application does not run. The object's status shows the message."""

from __future__ import annotations


class RefusedError(Exception):
    """The spec of the object cannot be submitted; the message goes into its status."""


class MissingConfigError(Exception):
    """A Secret, a ConfigMap or a key does not exist (yet), so the container cannot start."""


class GoneError(Exception):
    """The object was deleted before a write to it."""


class UnavailableError(Exception):
    """The API server did not answer, or answered with a temporary error."""
