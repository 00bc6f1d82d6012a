"""Why a message was not sent on; raised by `producers` and `writer_schemas`."""

from __future__ import annotations

from redrive.errors import RedriveError


class NotSentError(RedriveError):
    """There is no receipt for a message: whether it was stored is not known."""

    reason = "NotSent"


class TooBigError(NotSentError):
    """A message, or its properties alone, is bigger than the broker takes; it was not stored."""

    reason = "TooBig"


class UnreadableError(NotSentError):
    """A message carries what the client can't read, so there is no copy of it; none was stored."""

    reason = "Unreadable"


class SchemaNotFoundError(NotSentError):
    """The broker does not have the schema that a message was written with; none was stored."""

    reason = "SchemaNotFound"


class SchemaUnsupportedError(NotSentError):
    """The client can't send messages with the schema that one has; none was stored."""

    reason = "SchemaUnsupported"
