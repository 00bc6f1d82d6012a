"""What a message id says about the entry it is in, beyond what Pulsar's Python client shows. Pure.

The client offers a message's index within its batch, but neither the size of the batch nor
whether the message was cut into chunks. Both stand in the id's serialized form, which is part of
Pulsar's protocol: a protobuf message of numbers, and one nested message.
"""

from __future__ import annotations

from typing import NamedTuple

_BATCH_SIZE = 6
_FIRST_CHUNK = 7
_VARINT, _BYTES = 0, 2


class Entry(NamedTuple):
    """The entry of a message.

    Attributes:
        size: how many messages it holds.
        chunked: whether it is only the last part of a message that was cut in several.
    """

    size: int
    chunked: bool


def entry_of(serialized: bytes) -> Entry:
    """Read what `MessageId.serialize` wrote.

    Raises:
        ValueError: it is something else.
    """
    fields: dict[int, int] = {}
    at = 0
    while at < len(serialized):
        tag, at = _varint(serialized, at)
        field, wire_type = tag >> 3, tag & 7
        if wire_type not in {_VARINT, _BYTES}:
            msg = f"a message id has no field of type {wire_type}: {serialized.hex()}"
            raise ValueError(msg)
        fields[field], at = _varint(serialized, at)
        if wire_type == _BYTES:
            at += fields[field]
    return Entry(max(1, fields.get(_BATCH_SIZE, 1)), _FIRST_CHUNK in fields)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            msg = f"a message id ends in the midst of a number: {data.hex()}"
            raise ValueError(msg)
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
