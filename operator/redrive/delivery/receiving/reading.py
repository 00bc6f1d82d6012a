"""What a message carries, whatever its producer wrote; called wherever a message is looked at.

`policy.text` reads what should be text and may be none.
"""

from __future__ import annotations

import pulsar

from redrive.policy import text


def partition_key(message: pulsar.Message) -> str:
    """Return the key of *message*, in base64 if it is no text; empty if it has none."""
    return text.key(message.partition_key)


def ordering_key(message: pulsar.Message) -> str:
    """Return the ordering key of *message*, in base64 if it is no text; empty if it has none."""
    return text.key(message.ordering_key)


def properties(message: pulsar.Message) -> dict[str, str] | None:
    """Return the properties of *message*; None if one is no text: the client then shows none."""
    return text.properties(message.properties)


def schema_version(message: pulsar.Message) -> int | None:
    """Return the version of its topic's schema that *message* was produced with; None if none."""
    try:
        written = message.schema_version().encode()
    except UnicodeDecodeError as error:  # the client takes the bytes of the number for text
        written = error.object
    return int.from_bytes(written, "big") if written else None


def id_text(message_id: pulsar.MessageId) -> str:
    """Write an id as the Java client does: ledger, entry, partition, and the index in a batch."""
    parts = [message_id.ledger_id(), message_id.entry_id(), message_id.partition()]
    if message_id.batch_index() >= 0:
        parts.append(message_id.batch_index())
    return ":".join(map(str, parts))
