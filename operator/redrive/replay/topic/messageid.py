"""What a message id says about the entry it is in, beyond what Pulsar's Python client shows. Pure.

The client offers a message's index within its batch, but neither the size of the batch nor
whether the message was cut into chunks. Both stand in the id's serialized form, which is part of
Pulsar's protocol: a protobuf message of numbers, and one nested message.
"""

from __future__ import annotations

from typing import NamedTuple

from redrive.replay.topic.position import EntryId

_BATCH_INDEX = 4
_BATCH_SIZE = 6
_FIRST_CHUNK = 7
_LEDGER, _ENTRY = 1, 2
_VARINT, _BYTES = 0, 2


class Entry(NamedTuple):
    """The entry of a message.

    Attributes:
        size: how many messages it holds.
        first: of a message that was sent in chunks, the entry of the first one. The message has
            the id of the last one.
    """

    size: int
    first: EntryId | None = None


_UNBATCHED = Entry(1)
_BATCH_TAG = bytes([_BATCH_SIZE << 3 | _VARINT])
_CHUNK_TAG = bytes([_FIRST_CHUNK << 3 | _BYTES])


def entry_of(serialized: bytes) -> Entry:
    """Read what `MessageId.serialize` wrote.

    Raises:
        ValueError: it says something of a batch, or of chunks, and can't be read.
    """
    if _BATCH_TAG not in serialized and _CHUNK_TAG not in serialized:  # as with most
        return _UNBATCHED
    fields, chunk = _fields(serialized)
    first = _fields(chunk)[0] if chunk else None
    return Entry(
        max(1, fields.get(_BATCH_SIZE, 1)),
        None if first is None else EntryId(first[_LEDGER], first[_ENTRY]),
    )


def place_of(serialized: bytes) -> tuple[EntryId, int]:
    """Return the entry that `MessageId.serialize` names, and the index in it; -1 without one.

    Raises:
        ValueError: it is something else.
    """
    fields, _ = _fields(serialized)
    if not {_LEDGER, _ENTRY} <= fields.keys():
        msg = f"no message id: {serialized.hex()}"
        raise ValueError(msg)
    index = _signed(fields.get(_BATCH_INDEX, -1))
    return EntryId(_signed(fields[_LEDGER]), _signed(fields[_ENTRY])), index


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _fields(serialized: bytes) -> tuple[dict[int, int], bytes]:
    """Return the numbers by their field, and what is nested as the id of the first chunk."""
    fields: dict[int, int] = {}
    chunk = b""
    at = 0
    while at < len(serialized):
        tag, at = _varint(serialized, at)
        field, wire_type = tag >> 3, tag & 7
        if wire_type not in {_VARINT, _BYTES}:
            msg = f"a message id has no field of type {wire_type}: {serialized.hex()}"
            raise ValueError(msg)
        fields[field], at = _varint(serialized, at)
        if wire_type == _BYTES:
            if field == _FIRST_CHUNK:
                chunk = serialized[at : at + fields[field]]
            at += fields[field]
    return fields, chunk


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
