"""Payloads of messages → values, and values → text in which no value can be read. Pure.

A masked text has the structure of a payload: names of fields, and the type and length of each
value. A payload that is neither JSON nor Avro has its size alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from redrive.policy.envelope import PAYLOAD_PREFIX, VARIABLE
from redrive.reading.positions import decode_fields

MAX_DEPTH = 32
"""Levels of a value that a masked text shows; Avro that is nested more deeply is not decoded."""
MAX_PAYLOAD = 64 * 2**10
"""Characters of a payload that is shown in clear text."""
NONE_RECORDED = "none recorded"
"""Name of the group without a cause, as dead letters of Java and Go consumers."""
OTHERS = "(others)"
"""Name of the group of all causes beyond those that are counted."""
MAX_DECODED = 4 * 2**20
"""Bytes of a payload that is decoded; a larger one has its size alone when it is masked."""
MAX_MASKED = 4_096
"""Characters of a masked payload."""
MAX_ITEMS = 100_000
"""Items and fields of an Avro payload together: those of type null have no bytes."""
_MAX_VARIETY = 4
"""Different elements of an array that a masked text shows."""
_SHORTEST, _LONGEST_WORD = 3, 48
"""Characters of a word that is compared; shorter ones are words of any language."""
_EACH = "[*]"
"""Step of a path to each item of a list, which is None in `ShownFields`."""
_STEP = re.compile(r"\[\*\]|[^.\[]+")
_NAME_OF_FIELD = re.compile(r"(?!.*\d{4})[A-Za-z_$][\w$.-]{0,63}", re.ASCII)
_CODE = re.compile(r"at (\w+(?:\.[\w<>]+)+:\d+)")
_CAUSED_BY = re.compile(r"caused by ([\w.]+):?.*")
_PREFIX_DIGITS = 9
_EMAIL = re.compile(r"\S+@\S+")
_WORD = re.compile(r"\w+")
_LAST_WORD = re.compile(r"\w{3,}\Z")
HIDDEN = "?"
"""Stands for data in a masked text."""
_PLACEHOLDERS = {"null": "null", "oversized": "too large to be shown"}
"""Texts of payloads without content, by their form."""
_AVRO_SCHEMA = 4
"""Number of the type in a `Schema` of Pulsar's protocol."""


Form = Literal["JSON", "Avro", "text", "bytes", "encrypted", "oversized", "null"]


class NamedText(TypedDict):
    """A property of a message; its value is masked unless the caller asks for clear text."""

    name: str
    value: str


class ShownPayload(TypedDict):
    """A payload: masked, text, or base64."""

    payloadEncoding: Literal["masked", "text", "base64"]
    payload: str


class MessageRecord(ShownPayload):
    """A message for people and programs.

    `key` is the ordering key, else the key, if keys are shown. Otherwise there is `keyHash`: equal
    keys have equal hashes within one output. `payload` is masked, text, or base64, as
    `payloadEncoding` says; `payloadSize` counts bytes. Content of more than 128 MiB is `oversized`,
    with the size 0; a batch of that size is one message. `dueTime` is that of a message that waits
    for a retry.
    """

    id: str
    time: str | None
    dueTime: str | None
    key: str | None
    keyHash: str | None
    attempts: int
    replays: int
    deadReason: str
    cause: str
    fingerprint: str
    causeMessage: str
    trace: list[str]
    consumer: str
    origin: str
    properties: list[NamedText]
    payloadForm: Form
    payloadSize: int


class CauseCount(TypedDict):
    """Messages with one cause; `following` of them follow a dead letter of their key."""

    cause: str
    fingerprint: str
    messages: int
    following: int
    replayed: int
    firstTime: str | None
    lastTime: str | None
    consumers: list[str]
    example: str


class DataMap(dict[str, Any]):
    """A map whose keys are data, as those of Avro; names of fields are not."""


@dataclass
class ShownFields:
    """Fields whose values masked texts show, as a tree.

    Attributes:
        is_shown: True if the value at this place is shown, unless it has fields or items.
        below: places below, by the name of the field; None for each item of a list.
    """

    is_shown: bool = False
    below: dict[str | None, ShownFields] = field(default_factory=dict)

    @classmethod
    def of(cls, paths: Iterable[str]) -> ShownFields:
        """Return the fields of paths such as `$.items[*].sku`."""
        root = cls()
        for path in paths:
            place = root
            for step in _STEP.findall(path.removeprefix("$")):
                place = place.below.setdefault(None if step == _EACH else step, cls())
            place.is_shown = True
        return root


@dataclass(frozen=True)
class Payload:
    """A decoded payload.

    Attributes:
        form: `null` where a message has none; `oversized` where its content is not read.
        content: the stored bytes; none if they are not read.
        value: decoded, for JSON and Avro.
    """

    form: Form
    content: bytes
    value: Any = None

    @property
    def is_text(self) -> bool:
        """Return True if `clear` is a text, and not base64."""
        return self.form not in {"bytes", "encrypted"}

    def masked(self, shown: ShownFields | None = None) -> str:
        """Return the structure of the payload, without any value but those of *shown*."""
        if self.form in _PLACEHOLDERS:
            return _PLACEHOLDERS[self.form]
        if self.form not in {"JSON", "Avro"}:
            return f"bytes({len(self.content)})"
        return _shortened(mask(self.value, shown=shown))

    @property
    def clear(self) -> str:
        """Return the payload as text: JSON, a text as it is, other bytes in base64."""
        if self.form in _PLACEHOLDERS:
            return _PLACEHOLDERS[self.form]
        if self.form in {"JSON", "text"}:
            return self.content.decode()
        if self.form == "Avro":
            return json.dumps(self.value, ensure_ascii=False, default=_as_text)
        return base64.b64encode(self.content).decode()

    @property
    def secrets(self) -> Iterator[str]:
        """Yield all texts of the payload that a masked text must not contain."""
        if self.form in {"JSON", "Avro"}:
            yield from _texts(self.value)
        else:
            yield self.content.decode(errors="replace")


def decode_payload(
    content: bytes | None,
    properties: Mapping[str, str],
    schema: AvroSchema | None = None,
    *,
    encrypted: bool = False,
    oversized: bool = False,
) -> Payload:
    """Decode the payload of a message.

    Args:
        content: None for a null.
        properties: of the message; those of one that can't be copied name the length of a prefix.
        schema: the writer's schema, where it is Avro.
        encrypted: True if only its readers can decrypt it.
        oversized: True if it was not read for its size.
    """
    if oversized or content is None:
        return Payload("oversized" if oversized else "null", b"")
    if encrypted:
        return Payload("encrypted", content)
    prefix = properties.get(PAYLOAD_PREFIX, "")
    if prefix.isdecimal() and len(prefix) <= _PREFIX_DIGITS:
        content = content[int(prefix) :]
    if len(content) > MAX_DECODED:
        return Payload("bytes", content)
    if schema is not None:
        try:
            return Payload("Avro", content, schema.decode(content))
        except (ValueError, KeyError, TypeError, RecursionError):  # the schema may be invalid
            return Payload("bytes", content)
    return _json_or_text(content)


def _json_or_text(content: bytes) -> Payload:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return Payload("bytes", content)
    try:
        return Payload("JSON", content, json.loads(text, object_pairs_hook=_object))
    except (ValueError, RecursionError):
        return Payload("text", content)


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; one that repeats a name would lose values, and is no JSON here."""
    value = dict(fields)
    if len(value) < len(fields):
        raise ValueError("a name is repeated")
    return value


def mask(value: object, depth: int = 0, shown: ShownFields | None = None) -> str:  # noqa: PLR0911  one for each type
    """Return the structure of a decoded value: names of fields, and types and lengths of values.

    A name that does not look like that of a field, such as an address, is masked as well. Values of
    fields in *shown* are not masked.
    """
    if depth > MAX_DEPTH:
        return "..."
    if shown is not None and shown.is_shown and isinstance(value, bool | int | float | str):
        # Half of a surrogate pair is no text.
        text = json.dumps(value, ensure_ascii=False)
        return text.encode(errors="backslashreplace").decode()
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return f"string({len(value)})"
        case bytes():
            return f"bytes({len(value)})"
        case Mapping():
            named = not isinstance(value, DataMap)
            below = shown.below if shown is not None and named else {}
            names = (
                json.dumps(name) if name in below or (named and is_name(name)) else mask(name)
                for name in value
            )
            items = (mask(item, depth + 1, below.get(name)) for name, item in value.items())
            fields = map(": ".join, zip(names, items, strict=True))
            return f"{{{', '.join(fields)}}}"
        case Sequence():
            return f"[{_mask_items(value, depth, shown and shown.below.get(None))}]"
    return type(value).__name__


def is_name(text: str) -> bool:
    """Return True for a text that looks like the name of a field, and unlike data."""
    return _NAME_OF_FIELD.fullmatch(text) is not None


def _mask_items(items: Sequence[object], depth: int, fields: ShownFields | None) -> str:
    runs = [
        (text, len(list(run)))
        for text, run in itertools.groupby(mask(item, depth + 1, fields) for item in items)
    ]
    shown = [f"{text} x{count}" if count > 1 else text for text, count in runs[:_MAX_VARIETY]]
    hidden = sum(count for _, count in runs[_MAX_VARIETY:])
    return ", ".join([*shown, f"... x{hidden}"] if hidden else shown)


def mask_text(text: str, secrets: Iterable[str]) -> str:
    """Hide in the text of a cause all that may be data.

    These are quoted values, addresses, words with digits, and words of *secrets*. A text that was
    cut may end within such a word.
    """
    folded, words, phrases = text.casefold(), set[str](), set[str]()
    last, is_cut = _LAST_WORD.search(text), False
    for secret in map(str.casefold, secrets):
        if len(secret.strip()) >= _SHORTEST and secret.strip() in folded:
            phrases.add(secret.strip())
        # A payload may have a million words: only those of the text are kept.
        for match in _WORD.finditer(secret):
            word = match[0]
            is_cut = is_cut or (last is not None and word.startswith(last[0].casefold()))
            if len(word) >= _SHORTEST and word in folded:
                words.add(word)
    if last is not None and is_cut:
        text = f"{text[: last.start()]}{HIDDEN}"
    text = _without(text, phrases)
    text = VARIABLE.sub(HIDDEN, _EMAIL.sub(HIDDEN, text))
    return _WORD.sub(lambda word: HIDDEN if _holds(word[0].casefold(), words) else word[0], text)


def _without(text: str, phrases: Iterable[str]) -> str:
    """Replace the parts of a text that *phrases*, which are folded, cover."""
    folded = "".join(map(str.casefold, text))
    # A folded character may be longer than the character.
    origins = [index for index, char in enumerate(text) for _ in char.casefold()]
    covered = bytearray(len(text))
    for phrase in phrases:
        begin = folded.find(phrase)
        while begin >= 0:
            first, last = origins[begin], origins[begin + len(phrase) - 1]
            covered[first : last + 1] = b"\1" * (last + 1 - first)
            begin = folded.find(phrase, begin + 1)
    runs = itertools.groupby(zip(text, covered, strict=True), key=lambda pair: pair[1])
    return "".join(
        HIDDEN if is_covered else "".join(char for char, _ in run) for is_covered, run in runs
    )


def _holds(word: str, secrets: set[str]) -> bool:
    """Return True if a part of *word* is among *secrets*, or it is longer than words are."""
    if len(word) > _LONGEST_WORD:
        return True
    ends = range(_SHORTEST, len(word) + 1)
    return any(word[begin:end] in secrets for end in ends for begin in range(end - _SHORTEST + 1))


def mask_trace(trace: str) -> list[str]:
    """Return the lines of a trace without texts of exceptions: places in code, and classes."""
    lines = []
    for line in trace.splitlines():
        if code := _CODE.fullmatch(line):
            lines.append(f"at {code[1]}")
        elif caused := _CAUSED_BY.fullmatch(line):
            lines.append(f"caused by {caused[1]}")
    return lines


class KeyHasher:
    """Hashes of message keys, by a secret of one call: equal keys have equal hashes in its output.

    A hash without a secret could be found by trying keys.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __call__(self, key: str) -> str:
        """Return 12 hexadecimal digits."""
        return hmac.digest(self._secret, key.encode(errors="replace"), hashlib.sha256).hex()[:12]


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MASKED else f"{text[: MAX_MASKED - 3]}..."


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of a value, which may be nested as deeply as JSON can be read."""
    values = [value]
    while values:
        match values.pop():
            case str() as text:
                yield text
            case bytes() as content:
                yield content.decode(errors="replace")
            case Mapping() as fields:
                for name, item in fields.items():
                    if isinstance(fields, DataMap) or not is_name(name):
                        yield name
                    values.append(item)
            case list() as items:
                values += items


def _as_text(value: object) -> str:
    """Write bytes of a decoded value as JSON of Avro does."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _AvroInput:
    """Bytes of a payload that are read one after the other."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at, self._items = content, 0, 0

    @property
    def is_read(self) -> bool:
        return self._at == len(self._content)

    def take(self, size: int) -> bytes:
        at = self._at
        if not 0 <= size <= len(self._content) - at:
            raise ValueError("the payload ends too early")
        self._at += size
        return self._content[at : at + size]

    def number(self) -> int:
        value, shift = 0, 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  the last of a number
                return (value >> 1) ^ -(value & 1)
            shift += 7
            if shift > 63:  # noqa: PLR2004  bits of a number
                raise ValueError("a number of more than 64 bits")

    def text(self) -> str:
        return self.take(self.number()).decode()

    def count(self, items: int) -> None:
        """Count items and fields, which may have no bytes."""
        self._items += items
        if self._items > MAX_ITEMS:
            raise ValueError("too many items")

    def blocks(self) -> Iterator[None]:
        """Yield once for each item of an array or a map."""
        while count := self.number():
            if count < 0:
                self.number()  # the size of the block
                count = -count
            self.count(count)
            yield from itertools.repeat(None, count)


_SIMPLE: Mapping[str, Callable[[_AvroInput], Any]] = {
    "null": lambda _: None,
    "boolean": lambda source: source.take(1) != b"\0",
    "int": _AvroInput.number,
    "long": _AvroInput.number,
    "float": lambda source: struct.unpack("<f", source.take(4))[0],
    "double": lambda source: struct.unpack("<d", source.take(8))[0],
    "bytes": lambda source: source.take(source.number()),
    "string": _AvroInput.text,
}


class AvroSchema:
    """A writer's schema, by which payloads are decoded.

    Args:
        definition: the JSON of the schema.

    Raises:
        ValueError: it is no schema.
    """

    def __init__(self, definition: bytes) -> None:
        self._root = json.loads(definition)
        self._named: dict[str, Any] = {}
        self._collect(self._root)

    @classmethod
    def of_protocol(cls, schema: bytes) -> AvroSchema | None:
        """Read a `Schema` of Pulsar's protocol; None for one that is not Avro."""
        numbers, nested = decode_fields(schema)
        try:
            return cls(nested.get(3, b"")) if numbers.get(4) == _AVRO_SCHEMA else None
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def decode(self, content: bytes) -> Any:  # noqa: ANN401  a value of any type
        """Return the value of a payload.

        Raises:
            ValueError: the payload was not written by this schema.
        """
        source = _AvroInput(content)
        value = self._read(self._root, source, 0)
        if not source.is_read:
            raise ValueError("the payload is longer than its schema")
        return value

    def _collect(self, schema: object) -> None:
        """Take in the named types, which may be used before and within themselves."""
        if isinstance(schema, list):
            for branch in schema:
                self._collect(branch)
        elif isinstance(schema, dict):
            if name := schema.get("name"):
                self._named[str(name)] = schema
                self._named[f"{schema.get('namespace', '')}.{name}"] = schema
            for part in ("type", "items", "values"):
                self._collect(schema.get(part))
            for field in schema.get("fields") or ():
                self._collect(field.get("type"))

    def _read(self, schema: Any, source: _AvroInput, depth: int) -> Any:  # noqa: ANN401
        if depth > MAX_DEPTH:
            raise ValueError("the payload is nested too deeply")
        if isinstance(schema, list):
            return self._read(_branch(schema, source), source, depth + 1)
        kind = schema["type"] if isinstance(schema, dict) else schema
        if not isinstance(kind, str):
            return self._read(kind, source, depth + 1)
        if kind in _SIMPLE:
            return _SIMPLE[kind](source)
        if kind in self._named:
            return self._read(self._named[kind], source, depth + 1)
        return self._read_complex(kind, schema, source, depth + 1)

    def _read_complex(self, kind: str, schema: Any, source: _AvroInput, depth: int) -> Any:  # noqa: ANN401
        match kind:
            case "record" | "error":
                source.count(1 + len(schema["fields"]))
                return {
                    field["name"]: self._read(field["type"], source, depth)
                    for field in schema["fields"]
                }
            case "enum":
                return _branch(schema["symbols"], source)
            case "fixed":
                return source.take(schema["size"])
            case "array":
                return [self._read(schema["items"], source, depth) for _ in source.blocks()]
            case "map":
                return DataMap(
                    (source.text(), self._read(schema["values"], source, depth))
                    for _ in source.blocks()
                )
        msg = f"no type {kind}"
        raise ValueError(msg)


def _branch(branches: Sequence[Any], source: _AvroInput) -> Any:  # noqa: ANN401  a schema, or a symbol
    index = source.number()
    if not 0 <= index < len(branches):
        raise ValueError("no such branch")
    return branches[index]
