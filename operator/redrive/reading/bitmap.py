"""Sets of small numbers as one integer, a bit for each; and as text. Pure.

Python's own operators are the algebra: `|` unites, `&` intersects, `& ~` subtracts, and `bit_count`
counts.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator

EMPTY = 0


def of(numbers: Iterable[int], size: int) -> int:
    """Return the set of *numbers*, each from 0 to below *size*."""
    bits = bytearray(size // 8 + 1)
    for number in numbers:
        bits[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(bits, "little")


def span(first: int, last: int) -> int:
    """Return the set of the numbers from *first* to *last*, both included; it may be empty."""
    return ((1 << (last - first + 1)) - 1) << first if last >= first else EMPTY


def members(bitmap: int) -> Iterator[int]:
    """Yield the numbers of a set, in order."""
    for at, byte in enumerate(_bytes(bitmap)):
        if byte:
            yield from (at * 8 + bit for bit in range(8) if byte >> bit & 1)


def lowest(bitmap: int) -> int:
    """Return the first number of a set, -1 if it is empty."""
    return (bitmap & -bitmap).bit_length() - 1


def highest(bitmap: int) -> int:
    """Return the last number of a set, -1 if it is empty."""
    return bitmap.bit_length() - 1


def contains(bitmap: int, number: int) -> bool:
    """Return True if *number* is in a set."""
    return bool(bitmap >> number & 1)


def encode(bitmap: int) -> str:
    """Write a set as short text."""
    return base64.b64encode(zlib.compress(_bytes(bitmap))).decode()


MAX_BYTES = 2**14 // 8
"""Largest set that `decode` reads: 2¹⁴ numbers, more than a range has entries."""


def decode(text: str) -> int:
    """Return the set that `encode` wrote.

    Raises:
        ValueError: *text* is something else, or a larger set than `MAX_BYTES`.
    """
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof:
        msg = f"no set of at most {8 * MAX_BYTES} numbers"
        raise ValueError(msg)
    return int.from_bytes(content, "little")


def _bytes(bitmap: int) -> bytes:
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")
