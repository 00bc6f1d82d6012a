"""Why a message was not sent on; raised by `writer_schemas` and by whatever sends copies."""

from __future__ import annotations

from redrive.errors import RedriveError


class NotSentError(RedriveError):
    """There is no receipt for a message: whether it was stored is not known."""

    reason = "NotSent"


class NotCopyableError(NotSentError):
    """A message can't be copied as it is, however often that is tried; none was stored."""

    reason = "NotCopyable"


class TooBigError(NotCopyableError):
    """A message, or its properties alone, is bigger than the broker takes; it was not stored."""

    reason = "TooBig"


class UnreadableError(NotCopyableError):
    """A message carries what the client can't read, so there is no copy of it; none was stored."""

    reason = "Unreadable"


class SchemaError(NotSentError):
    """A message can't be sent with the schema that it was written with; none was stored."""

    reason = "Schema"


class SchemaNotFoundError(SchemaError, NotCopyableError):
    """The broker does not have the schema that a message was written with; none was stored."""

    reason = "SchemaNotFound"


class SchemaUnsupportedError(SchemaError, NotCopyableError):
    """The client can't send messages with the schema that one has; none was stored."""

    reason = "SchemaUnsupported"


class SchemaRefusedError(SchemaError):
    """The topic that a message goes to does not take the schema that it was written with."""

    reason = "SchemaRefused"
