"""What a message carries, whatever its producer wrote; called wherever a message is looked at.

The client takes every key and property for UTF-8 and raises where it is none. Producers in other
languages may send such bytes, and no message may end a consumer or a replay.
"""

from __future__ import annotations

import binascii
import codecs
import threading
from collections.abc import Callable

import pulsar


def partition_key(message: pulsar.Message) -> str:
    """Return the key of *message*, in base64 if it is no text; empty if it has none."""
    return _text(message.partition_key)


def ordering_key(message: pulsar.Message) -> str:
    """Return the ordering key of *message*, in base64 if it is no text; empty if it has none."""
    return _text(message.ordering_key)


def properties(message: pulsar.Message) -> dict[str, str] | None:
    """Return the properties of *message*; None if one is no text: the client then shows none."""
    try:
        found: dict[str, str] = message.properties()
    except UnicodeDecodeError:
        return None
    return found


NO_VERSION = 2**63 - 1
"""The version of a message whose metadata names none that a topic can have."""


def schema_version(message: pulsar.Message) -> int | None:
    """Return the version of its topic's schema that *message* was produced with; None if none.

    The producer writes it, in any number of bytes. One that does not fit the 8 bytes of a broker's
    versions is `NO_VERSION`: every look-up of it ends as one of a version that was deleted.
    """
    try:
        written = message.schema_version().encode()
    except UnicodeDecodeError as error:  # the client takes the bytes of the number for text
        written = error.object
    return min(int.from_bytes(written, "big"), NO_VERSION) if written else None


def size(message: pulsar.Message) -> int:
    """Return how many bytes the payload of *message* has, without a copy of it."""
    return int(message._message.length())  # noqa: SLF001 - the client shows it nowhere else


def id_text(message_id: pulsar.MessageId) -> str:
    """Write an id as the Java client does: ledger, entry, partition, and the index in a batch."""
    parts = [message_id.ledger_id(), message_id.entry_id(), message_id.partition()]
    if message_id.batch_index() >= 0:
        parts.append(message_id.batch_index())
    return ":".join(map(str, parts))


def _text(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        return binascii.b2a_base64(error.object, newline=False).decode()


def sequence_key(message: pulsar.Message) -> str:
    """Return the key within which messages have an order; empty if it has none."""
    return ordering_key(message) or partition_key(message)


_reading_raw = threading.Lock()


def raw_properties(message: pulsar.Message) -> dict[bytes, bytes]:
    """Return the properties of *message* as the bytes that its producer wrote.

    The client decodes them as UTF-8, with the error handler that Python has for `strict`. In this
    call and thread that one keeps the bytes that are no text.
    """
    strict, lossless = codecs.lookup_error("strict"), codecs.lookup_error("surrogateescape")
    here = threading.get_ident()

    def keep(error: UnicodeError) -> tuple[str | bytes, int]:
        return (lossless if threading.get_ident() == here else strict)(error)

    with _reading_raw:
        codecs.register_error("strict", keep)
        try:
            texts: dict[str, str] = message.properties()
        finally:
            codecs.register_error("strict", strict)
    return {_raw(name): _raw(value) for name, value in texts.items()}


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
