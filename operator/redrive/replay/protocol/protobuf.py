"""The encoding of Protocol Buffers, as far as Pulsar's commands and ids need it. Pure.

A message is a sequence of fields. Each is a tag, of a number and a type, and a value: a number, or
bytes, which may be a text or another message.
"""

from __future__ import annotations

_VARINT, _BYTES = 0, 2
_READ = {_VARINT, _BYTES}
_FIXED = {1: 8, 5: 4}
"""Types of a fixed width, in bytes."""
ONE_BYTE = 128
"""Smaller numbers take one byte."""
_LOW_BITS, _MORE = ONE_BYTE - 1, ONE_BYTE
_MAX, _LAST_SHIFT = 2**64 - 1, 63
_SMALL = tuple(bytes([value]) for value in range(ONE_BYTE))


def varint(value: int) -> bytes:
    """Write a number from 0 to below 2**64."""
    if value < ONE_BYTE:
        return _SMALL[value]
    written = bytearray()
    while value >= _MORE:
        written.append(value & _LOW_BITS | _MORE)
        value >>= 7
    written.append(value)
    return bytes(written)


def number(field: int, value: int) -> bytes:
    """Write a field that is a number from 0, or true as 1."""
    return varint(field << 3 | _VARINT) + varint(value)


def nested(field: int, value: bytes) -> bytes:
    """Write a field that is bytes, a text in UTF-8, or a message."""
    return b"%b%b%b" % (varint(field << 3 | _BYTES), varint(len(value)), value)


def fields(message: bytes) -> tuple[dict[int, int], dict[int, bytes]]:
    """Read a message: its fields that are numbers, without sign, and its others, by their numbers.

    Of a repeated one it is the last.

    Raises:
        ValueError: it is none, or has a field of another type.
    """
    numbers: dict[int, int] = {}
    nested: dict[int, bytes] = {}
    at, end = 0, len(message)
    try:
        while at < end:
            tag, at = _varint(message, at)
            value, at = _varint(message, at)
            if tag & 7 == _VARINT:
                numbers[tag >> 3] = value
                continue
            at += value
            if tag & 7 != _BYTES or at > end:
                break
            nested[tag >> 3] = message[at - value : at]
        else:
            return numbers, nested
    except IndexError:  # it ends in the midst of a number, or of one without end
        pass
    msg = f"no message of Protocol Buffers: {message[:64].hex()}"
    raise ValueError(msg)


def with_repeated(
    message: bytes, repeated: int
) -> tuple[dict[int, int], dict[int, bytes], list[bytes]]:
    """Read a message that others wrote, as `fields`, with all values of one repeated field.

    Fields of fixed width, which Pulsar has none of, are passed over, as by each reader of the
    encoding.

    Args:
        message: the bytes.
        repeated: the number of a field that is bytes.

    Raises:
        ValueError: as for `fields`.
    """
    numbers: dict[int, int] = {}
    nested: dict[int, bytes] = {}
    values: list[bytes] = []
    at, end = 0, len(message)
    try:
        while at < end:
            tag = message[at]
            at += 1
            if tag >= _MORE:
                tag, at = _varint(message, at - 1)
            kind = tag & 7
            if kind not in _READ:
                at += _FIXED[kind]
                continue
            value = message[at]
            at += 1
            if value >= _MORE:
                value, at = _varint(message, at - 1)
            if kind == _VARINT:
                numbers[tag >> 3] = value
                continue
            begin, at = at, at + value
            if tag >> 3 == repeated:
                values.append(message[begin:at])
            else:
                nested[tag >> 3] = message[begin:at]
    except (IndexError, KeyError):  # it ends in the midst of a number, or has another type
        at = -1
    if at != end:
        msg = f"no message of Protocol Buffers: {message[:64].hex()}"
        raise ValueError(msg)
    return numbers, nested, values


def signed_32(value: int) -> int:
    """Return the number of 32 bits with a sign that was written as *value*."""
    value %= 2**32
    return value - 2**32 if value >= 2**31 else value


def signed(value: int) -> int:
    """Return the number with a sign that was written as *value*."""
    return value - 2**64 if value >= 2**63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < _MORE:  # as most
        return byte, at
    value, shift = byte & _LOW_BITS, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & _LOW_BITS) << shift
        if byte < _MORE:
            return value & _MAX, at
        shift += 7
        if shift > _LAST_SHIFT:
            raise IndexError("a number of more than 10 bytes")
