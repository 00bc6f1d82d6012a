"""Why an application does not run; raised by the pure parts, shown in the object's status."""

from __future__ import annotations


class RefusedError(Exception):
    """The spec of the object cannot be submitted; the message goes into its status."""


class MissingConfigError(Exception):
    """A Secret, a ConfigMap or a key is not there (yet), so that the container cannot start."""


class GoneError(Exception):
    """The object was deleted while something was written to it."""


class UnavailableError(Exception):
    """The API server did not answer, or answered with an error that may pass."""
