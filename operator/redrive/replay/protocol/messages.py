"""A message, alone or in a batch → what an entry of a topic is made of. Pure.

Numbers of fields are those of `MessageMetadata` and `SingleMessageMetadata` in `PulsarApi.proto`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa

from redrive.replay.protocol.protobuf import ONE_BYTE, nested, number, varint

_LZ4 = pa.Codec("lz4_raw")
_COMPRESSION = number(8, 1)
COMPRESSED_FROM = 1_024
"""Less than so many bytes are not worth it."""


class OutgoingMessage(NamedTuple):
    """A message to send.

    Attributes:
        sequence_id: from 1.
        value: None for one without.
        event_time: in milliseconds since 1970; None for one without.
    """

    sequence_id: int
    value: bytes | None
    properties: Mapping[str, str]
    key: str | None
    ordering_key: str | None
    event_time: int | None


def alone(message: OutgoingMessage) -> bytes:
    """Return the metadata of a message that is an entry, but for what a producer adds."""
    parts: list[bytes] = []
    for name, value in message.properties.items():
        parts += (b"\x22", _pair(name, value))
    if message.key:
        parts.append(nested(6, message.key.encode()))
    if message.event_time:
        parts.append(number(12, message.event_time))
    if message.ordering_key:
        parts.append(nested(18, message.ordering_key.encode()))
    if message.value is None:
        parts.append(number(25, 1))
    return b"".join(parts)


def in_batch(message: OutgoingMessage) -> bytes:
    """Return a message as part of the payload of a batch."""
    parts: list[bytes] = []
    for name, value in message.properties.items():
        parts += (b"\x0a", _pair(name, value))
    if message.key:
        parts.append(nested(2, message.key.encode()))
    content = message.value or b""
    parts += (b"\x18", varint(len(content)))
    if message.event_time:
        parts.append(number(5, message.event_time))
    if message.ordering_key:
        parts.append(nested(7, message.ordering_key.encode()))
    parts += (b"\x40", varint(message.sequence_id))
    if message.value is None:
        parts.append(number(9, 1))
    metadata = b"".join(parts)
    return b"%b%b%b" % (struct.pack(">I", len(metadata)), metadata, content)


def batch(last: int, count: int) -> bytes:
    """Return the metadata of a batch, but for what a producer adds.

    Args:
        last: the sequence id of its last message. A broker that deduplicates keeps it.
        count: how many messages there are.
    """
    return number(11, count) + number(24, last)


def compressed(content: bytes) -> tuple[bytes, bytes]:
    """Return *content* as small as it gets, and what the metadata says of that."""
    if len(content) >= COMPRESSED_FROM:
        smaller = _LZ4.compress(content, asbytes=True)
        if len(smaller) < len(content):
            return smaller, _COMPRESSION + number(9, len(content))
    return content, b""


@functools.lru_cache(1_024)
def _name(name: str) -> bytes:
    return nested(1, name.encode())


def _pair(name: str, value: str) -> bytes:
    """Return a property, its size first."""
    head, text = _name(name), value.encode()
    size = len(text)
    if size < ONE_BYTE:
        return b"%b%b\x12%c%b" % (varint(len(head) + size + 2), head, size, text)
    pair = head + nested(2, text)
    return varint(len(pair)) + pair
