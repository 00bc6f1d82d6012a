"""Commands and frames of the Pulsar binary protocol, and entries to store. Pure.

Numbers of kinds and fields are those of `PulsarApi.proto`. A frame is its size, the size of the
command, and the command; a frame with messages ends with their metadata and payload. An entry is
one message or a batch, with the fields of `MessageMetadata` and `SingleMessageMetadata`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa
from google_crc32c import value as crc32c

from redrive.reading.metadata import decode_delivery
from redrive.reading.positions import (
    ONE_BYTE,
    decode_fields,
    encode_nested,
    encode_number,
    encode_varint,
)

CONNECT, CONNECTED = 2, 3
SUBSCRIBE, FLOW, MESSAGE, CLOSE_CONSUMER = 4, 11, 9, 16
ACK, ACK_RESPONSE = 10, 38
LAST_MESSAGE_ID, LAST_MESSAGE_ID_RESPONSE = 29, 30
PRODUCER, PRODUCER_SUCCESS = 5, 17
SEND, SEND_RECEIPT, SEND_ERROR = 6, 7, 8
CLOSE_PRODUCER, SUCCESS, ERROR = 15, 13, 14
PING, PONG = 18, 19
LOOKUP, LOOKUP_RESPONSE = 23, 24
GET_SCHEMA, GET_SCHEMA_RESPONSE = 34, 35
AUTH_CHALLENGE, AUTH_RESPONSE = 36, 37
EXCLUSIVE, SHARED, FAILOVER, KEY_SHARED = range(4)
"""Types of a subscription."""

_CLIENT = b"redrive"
_VERSION = 19
"""Version of the protocol; a broker uses the older of this and its own."""
_NEWEST = 2**63 - 1
_CHECKSUM_FOLLOWS = b"\x0e\x01"
_RECEIPT = encode_number(1, SEND_RECEIPT) + encode_nested(SEND_RECEIPT, b"")[:1]
_MESSAGE = encode_number(1, MESSAGE) + encode_nested(MESSAGE, b"")[:1]
_SIZES = struct.Struct(">II")
MAX_FRAME = 16 * 2**20
"""Answers to these requests are smaller; schemas are the largest. Entries may be larger if the
broker accepts such messages."""


class Command(NamedTuple):
    """A received command.

    Attributes:
        kind: one of the kinds above, or another.
        numbers: its numeric fields.
        nested: its other fields.
        entry: the bytes after it in its frame: the stored entry of a MESSAGE.
        place: ledger and entry of a MESSAGE, of which nothing else is decoded.
    """

    kind: int
    numbers: dict[int, int]
    nested: dict[int, bytes]
    entry: bytes = b""
    place: tuple[int, int] = (-1, -1)


def frame(kind: int, body: bytes = b"") -> bytes:
    """Write a command with these fields."""
    command = encode_number(1, kind) + encode_nested(kind, body)
    return _SIZES.pack(len(command) + 4, len(command)) + command


def take_frames(received: bytearray, limit: int = MAX_FRAME) -> list[Command]:
    """Remove and return the complete commands of *received*.

    Args:
        received: begins with a frame.
        limit: of the size of a frame, in bytes.

    Raises:
        ValueError: it contains no frames.
    """
    taken: list[Command] = []
    at, end = 0, len(received)
    whole = b""
    while end - at >= _SIZES.size:
        total, size = _SIZES.unpack_from(received, at)
        if not size + 4 <= total <= limit:
            msg = f"a frame of {total} bytes with a command of {size}"
            raise ValueError(msg)
        if end - at < total + 4:
            break
        whole = whole or bytes(received)  # a slice of a bytearray is copied twice
        begin, behind = at + _SIZES.size, at + total + 4
        entry = begin + size
        command = whole[begin:entry]
        if command.startswith(_MESSAGE) and size > 3 and command[3] == size - 4:  # noqa: PLR2004  as most
            taken.append(_delivery(command[4:], whole[entry:behind]))
        else:
            taken.append(_read(command, whole[entry:behind]))
        at = behind
    del received[:at]
    return taken


def _read(command: bytes, entry: bytes) -> Command:
    if command.startswith(_RECEIPT) and len(command) > 3 and command[3] == len(command) - 4:  # noqa: PLR2004
        return Command(SEND_RECEIPT, *decode_fields(command[4:]), entry)
    numbers, nested = decode_fields(command)
    kind = numbers.get(1, 0)
    fields = nested.get(kind, b"")
    if kind == MESSAGE:
        return _delivery(fields, entry)
    return Command(kind, *decode_fields(fields), entry)


def _delivery(fields: bytes, entry: bytes) -> Command:
    message_id = decode_delivery(fields).message_id
    return Command(MESSAGE, {}, {}, entry, (message_id.ledger, message_id.entry))


def connect(method: str, credentials: bytes, broker: str | None = None) -> bytes:
    """Open a connection.

    Args:
        method: of authentication; empty for none.
        credentials: credentials of the method.
        broker: as `host:port`, the destination for a proxy.
    """
    body = encode_nested(1, _CLIENT) + encode_number(4, _VERSION)
    if method:
        body += encode_nested(5, method.encode()) + encode_nested(3, credentials)
    if broker is not None:
        body += encode_nested(6, broker.encode())
    return frame(
        CONNECT, body + encode_nested(10, encode_number(1, 1))
    )  # the broker requests new credentials when due


def auth_response(method: str, credentials: bytes) -> bytes:
    """Send credentials again, see `connect`."""
    shown = encode_nested(1, method.encode()) + encode_nested(2, credentials)
    return frame(
        AUTH_RESPONSE,
        encode_nested(1, _CLIENT) + encode_nested(2, shown) + encode_number(3, _VERSION),
    )


def lookup(topic: str, request: int, *, authoritative: bool) -> bytes:
    """Request the broker of a topic."""
    body = (
        encode_nested(1, topic.encode())
        + encode_number(2, request)
        + encode_number(3, authoritative)
    )
    return frame(LOOKUP, body)


def get_schema(topic: str, request: int, version: int | None) -> bytes:
    """Request a version of the schema of a topic; None for its latest."""
    body = encode_number(1, request) + encode_nested(2, topic.encode())
    if version is not None:
        body += encode_nested(3, version.to_bytes(8, "big"))
    return frame(GET_SCHEMA, body)


def producer(topic: str, request: int, number_of: int, name: str, schema: bytes | None) -> bytes:
    """Open a producer.

    Args:
        topic: a partition, or an unpartitioned topic.
        request: number of the request, which the answer contains.
        number_of: id of the producer on this connection.
        name: of the producer.
        schema: from the answer to `get_schema`.
    """
    body = (
        encode_nested(1, topic.encode()) + encode_number(2, number_of) + encode_number(3, request)
    )
    body += encode_nested(4, name.encode())
    if schema is not None:
        body += encode_nested(7, schema)
    return frame(PRODUCER, body + encode_number(9, 1))


def close_producer(number_of: int, request: int) -> bytes:
    """Close a producer."""
    return frame(CLOSE_PRODUCER, encode_number(1, number_of) + encode_number(2, request))


def subscribe(  # noqa: PLR0913  fields of the command
    topic: str,
    request: int,
    number_of: int,
    name: str,
    after: tuple[int, int],
    *,
    compacted: bool = False,
) -> bytes:
    """Begin to read, without a subscription that outlives the connection.

    Args:
        topic: a partition, or an unpartitioned topic.
        request: number of the request, which the answer contains.
        number_of: of the consumer on this connection.
        name: of the subscription, for the broker's statistics.
        after: ledger and entry after which to begin; -1 for both means the oldest, and 2**63 - 1
            the newest.
        compacted: True to read only the last message of each key in the compacted part of the
            topic.
    """
    exclusive = encode_number(3, EXCLUSIVE)
    ledger, entry = after
    if 0 <= ledger < _NEWEST:
        entry += 1  # a broker begins with the entry, because of incomplete batches
    begin = encode_number(1, ledger % 2**64) + encode_number(2, entry % 2**64)
    body = encode_nested(1, topic.encode()) + encode_nested(2, name.encode()) + exclusive
    body += (
        encode_number(4, number_of)
        + encode_number(5, request)
        + encode_number(8, 0)
        + encode_nested(9, begin)
    )
    if compacted:
        body += encode_number(11, 1)
    return frame(SUBSCRIBE, body + encode_number(15, 0))  # creates no topic


def consume(topic: str, request: int, number_of: int, subscription: str, kind: int) -> bytes:
    """Open a consumer of a subscription.

    Args:
        topic: a partition, or an unpartitioned topic.
        request: number of the request, which the answer contains.
        number_of: of the consumer on this connection.
        subscription: its name.
        kind: the type of the subscription, which all its consumers share.
    """
    body = (
        encode_nested(1, topic.encode())
        + encode_nested(2, subscription.encode())
        + encode_number(3, kind)
        + encode_number(4, number_of)
        + encode_number(5, request)
        + encode_nested(6, _CLIENT)
    )
    return frame(SUBSCRIBE, body + encode_number(15, 0))  # creates no topic


def acknowledge(number_of: int, request: int, entry: tuple[int, int]) -> bytes:
    """Acknowledge an entry that a consumer has received: its ledger, and its id there."""
    ledger, number = entry
    body = encode_number(1, number_of) + encode_number(2, 0)
    body += encode_nested(3, encode_number(1, ledger) + encode_number(2, number))
    return frame(ACK, body + encode_number(8, request))


def flow(number_of: int, messages: int) -> bytes:
    """Permit a consumer to receive so many more messages."""
    return frame(FLOW, encode_number(1, number_of) + encode_number(2, messages))


def last_message_id(request: int, number_of: int) -> bytes:
    """Request the last message of a consumer's topic."""
    return frame(LAST_MESSAGE_ID, encode_number(1, number_of) + encode_number(2, request))


def payload(command: bytes, metadata: bytes, content: bytes) -> bytes:
    """Return the frame of an entry to store.

    Args:
        command: the fields of a SEND.
        metadata: of the message, or the batch.
        content: of the message, or the messages of the batch.
    """
    command = encode_number(1, SEND) + encode_nested(SEND, command)
    stored = b"%b%b%b" % (struct.pack(">I", len(metadata)), metadata, content)
    head = _SIZES.pack(len(command) + len(stored) + 10, len(command))
    checksum = struct.pack(">I", crc32c(stored))
    return b"%b%b%b%b%b" % (head, command, _CHECKSUM_FOLLOWS, checksum, stored)


_LZ4 = pa.Codec("lz4_raw")
_COMPRESSION = encode_number(8, 1)
COMPRESSED_FROM = 1_024
"""Smallest content to compress, in bytes."""


class OutgoingMessage(NamedTuple):
    """A message to send.

    Attributes:
        sequence_id: from 1.
        value: None for a null message.
        event_time: in milliseconds since 1970; None without one.
    """

    sequence_id: int
    value: bytes | None
    properties: Mapping[str, str]
    key: str | None
    ordering_key: str | None
    event_time: int | None


def alone(message: OutgoingMessage) -> bytes:
    """Return the metadata of a single message, without the fields that a producer adds."""
    parts: list[bytes] = []
    for name, value in message.properties.items():
        parts += (b"\x22", _pair(name, value))
    if message.key:
        parts.append(encode_nested(6, message.key.encode()))
    if message.event_time:
        parts.append(encode_number(12, message.event_time))
    if message.ordering_key:
        parts.append(encode_nested(18, message.ordering_key.encode()))
    if message.value is None:
        parts.append(encode_number(25, 1))
    return b"".join(parts)


def in_batch(message: OutgoingMessage) -> bytes:
    """Return a message as part of the payload of a batch."""
    parts: list[bytes] = []
    for name, value in message.properties.items():
        parts += (b"\x0a", _pair(name, value))
    if message.key:
        parts.append(encode_nested(2, message.key.encode()))
    content = message.value or b""
    parts += (b"\x18", encode_varint(len(content)))
    if message.event_time:
        parts.append(encode_number(5, message.event_time))
    if message.ordering_key:
        parts.append(encode_nested(7, message.ordering_key.encode()))
    parts += (b"\x40", encode_varint(message.sequence_id))
    if message.value is None:
        parts.append(encode_number(9, 1))
    metadata = b"".join(parts)
    return b"%b%b%b" % (struct.pack(">I", len(metadata)), metadata, content)


def batch(last: int, count: int) -> bytes:
    """Return the metadata of a batch, without the fields that a producer adds.

    Args:
        last: sequence id of its last message, which a broker that deduplicates keeps.
        count: number of messages.
    """
    return encode_number(11, count) + encode_number(24, last)


def compressed(content: bytes) -> tuple[bytes, bytes]:
    """Return *content*, compressed if that is smaller, and the metadata of the compression."""
    if len(content) >= COMPRESSED_FROM:
        smaller = _LZ4.compress(content, asbytes=True)
        if len(smaller) < len(content):
            return smaller, _COMPRESSION + encode_number(9, len(content))
    return content, b""


@functools.lru_cache(1_024)
def _name(name: str) -> bytes:
    return encode_nested(1, name.encode())


def _pair(name: str, value: str) -> bytes:
    """Return a property after its size."""
    head, text = _name(name), value.encode()
    size = len(text)
    if size < ONE_BYTE:
        return b"%b%b\x12%c%b" % (encode_varint(len(head) + size + 2), head, size, text)
    pair = head + encode_nested(2, text)
    return encode_varint(len(pair)) + pair
