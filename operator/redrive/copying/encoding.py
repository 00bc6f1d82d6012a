"""Encode the parts of a message that its copy can't carry: JSON beside it, or before its payload.

    {"properties": [[name, value], …], "key": …, "orderingKey": …, "null": true}

Names, values and keys are base64 of the bytes that the producer wrote. Called by `delivery` for
dead letters; docs/reference/properties.md tells users how to read one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import NamedTuple

from redrive.policy.properties import ENCODED, PAYLOAD_PREFIX

MAX_PROPERTY = 16_384
"""So many characters of JSON are a property; more precede the payload."""


class Encoded(NamedTuple):
    """The parts of a copy.

    Attributes:
        properties: all texts, with the JSON, or the length of the prefix.
        prefix: precedes the payload; mostly empty.
    """

    properties: dict[str, str]
    prefix: bytes


def encode(
    properties: Mapping[bytes, bytes], keys: Mapping[str, str], *, everything: bool, null: bool
) -> Encoded:
    """Encode what is no text.

    Args:
        properties: as the producer wrote them.
        keys: those to encode, by `key` and `orderingKey`.
        everything: encode all properties, which are too big together.
        null: whether the message has no payload.
    """
    texts: dict[str, str] = {}
    parts: dict[str, object] = {}
    encoded = []
    for name, value in sorted(properties.items()):
        try:
            text = name.decode(), value.decode()
        except UnicodeDecodeError:
            text = None
        if text is None or everything:
            encoded.append((_base64(name), _base64(value)))
        else:
            texts[text[0]] = text[1]
    if encoded:
        parts["properties"] = encoded
    parts |= {name: _base64(key.encode()) for name, key in keys.items()}
    written = json.dumps(parts)
    if not parts or len(written) <= MAX_PROPERTY:
        return Encoded(texts | ({ENCODED: written} if parts else {}), b"")
    prefix = json.dumps(parts | ({"null": True} if null else {})).encode()
    return Encoded(texts | {PAYLOAD_PREFIX: str(len(prefix))}, prefix)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
