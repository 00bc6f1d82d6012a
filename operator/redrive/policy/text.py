"""What a message carries as text, whatever its producer wrote; used by `delivery` and `replay`.

The client takes every key and property for UTF-8 and raises where it is none. Producers in other
languages may send such bytes, and no message may end a consumer or a replay.
"""

from __future__ import annotations

import binascii
import contextlib
from collections.abc import Callable


def key(read: Callable[[], str]) -> str:
    """Return the key that *read* brings, in base64 if it is no text."""
    try:
        return read()
    except UnicodeDecodeError as error:
        return binascii.b2a_base64(error.object, newline=False).decode()


def properties(read: Callable[[], dict[str, str]]) -> dict[str, str] | None:
    """Return the properties that *read* brings; None if one is no text: then there are none."""
    found: dict[str, str] | None = None
    with contextlib.suppress(UnicodeDecodeError):
        found = read()
    return found
