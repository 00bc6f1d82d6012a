"""Fields of a message, its schema, and errors of copying it.

Why a message was not sent on; raised by `writer_schemas` and by whatever sends copies.

What a message carries, whatever its producer wrote; called wherever a message is looked at.

The client takes every key and property for UTF-8 and raises where it is none. Producers in other
languages may send such bytes, and no message may end a consumer or a replay.

The schemas that messages were written with; called by whatever sends copies.

A producer that is opened with such a schema stamps its messages with the version that the schema
has on its topic, and adds the schema there where it is missing. So a consumer of any version
decodes a copy as it decodes the message. Contents pass as the bytes they are.

Encode the parts of a message that its copy can't carry: JSON beside it, or before its payload.

    {"properties": [[name, value], …], "key": …, "orderingKey": …, "null": true}

Names, values and keys are base64 of the bytes that the producer wrote. Called by `delivery` for
dead letters; docs/reference/properties.md tells users how to read one.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import functools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pulsar
import pulsar.schema

from redrive.errors import RedriveError
from redrive.policy.envelope import ENCODED, PAYLOAD_PREFIX
from redrive.policy.naming import TopicName


class NotSentError(RedriveError):
    """There is no receipt for a message: whether it was stored is not known."""

    reason = "NotSent"


class NotCopyableError(NotSentError):
    """A message can't be copied as it is, however often that is tried; none was stored."""

    reason = "NotCopyable"


class TooBigError(NotCopyableError):
    """A message, or its properties alone, is bigger than the broker takes; it was not stored."""

    reason = "TooBig"


class UnreadableError(NotCopyableError):
    """A message carries what the client can't read, so there is no copy of it; none was stored."""

    reason = "Unreadable"


class SchemaError(NotSentError):
    """A message can't be sent with the schema that it was written with; none was stored."""

    reason = "Schema"


class SchemaNotFoundError(SchemaError, NotCopyableError):
    """The broker does not have the schema that a message was written with; none was stored."""

    reason = "SchemaNotFound"


class SchemaUnsupportedError(SchemaError, NotCopyableError):
    """The client can't send messages with the schema that one has; none was stored."""

    reason = "SchemaUnsupported"


class SchemaRefusedError(SchemaError):
    """The topic that a message goes to does not take the schema that it was written with."""

    reason = "SchemaRefused"


def partition_key(message: pulsar.Message) -> str:
    """Return the key of *message*, in base64 if it is no text; empty if it has none."""
    return _text(message.partition_key)


def ordering_key(message: pulsar.Message) -> str:
    """Return the ordering key of *message*, in base64 if it is no text; empty if it has none."""
    return _text(message.ordering_key)


def read_properties(message: pulsar.Message) -> dict[str, str] | None:
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
    index = message_id.batch_index()
    entry = f"{message_id.ledger_id()}:{message_id.entry_id()}:{message_id.partition()}"
    return entry if index < 0 else f"{entry}:{index}"


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


BYTES = pulsar.schema.BytesSchema()
"""The schema of messages that are not decoded."""
LATEST = -1
"""Stands for the version that a topic's schema has now."""

_KEY_VALUE = 15
_Ask = Callable[[Callable[[], Any]], Any]  # the client has no types


class WriterSchema(pulsar.schema.Schema):  # type: ignore[misc]  # the client has no types
    """A schema as its topic has it, for contents that are encoded already.

    Equal to another of the same type and definition, whatever their versions and topics.
    """

    def __init__(self, info: pulsar.schema.SchemaInfo) -> None:
        self._schema_info = info  # what Schema.schema_info() returns
        self._identity = (int(info.schema_type()), info.schema())

    def encode(self, content: bytes) -> bytes:
        """Return *content*."""
        return content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WriterSchema) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


class WriterSchemas:
    """Finds the schema of each message, and asks the broker once for each version.

    May be used by several threads. Any role may read schemas.

    Args:
        client: asks the broker.
        ask: makes such a call, and may raise TimeoutError; by default it is waited for as long as
            the client does.
    """

    def __init__(self, client: pulsar.Client, ask: _Ask = lambda read: read()) -> None:
        self._client = client
        self._ask = ask
        self._found: dict[tuple[TopicName, int], WriterSchema] = {}

    def get(self, topic: TopicName, version: int) -> WriterSchema:
        """Return one version of the schema of *topic*, such as its `LATEST`.

        Raises:
            SchemaNotFoundError: the topic has no such version: it was deleted.
            SchemaUnsupportedError: it is one of keys and values.
            NotSentError: the broker did not answer.
        """
        found = self._found.get((topic, version))
        if found is None:
            found = self._found[topic, version] = self._read(topic, version)
        return found

    def _read(self, topic: TopicName, version: int) -> WriterSchema:
        try:
            # The client has it for consumers with an Avro schema, and nowhere else.
            read = functools.partial(self._client._client.get_schema_info, str(topic), version)  # noqa: SLF001
            info = self._ask(read)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.TopicNotFound as error:
            raise SchemaNotFoundError(
                "a message can't be sent on without the schema it was written with",
                got=f"no version {version} of the schema of {topic}",
                remedy="restore the schema; without it no consumer can decode the message",
            ) from error
        except (TimeoutError, pulsar.exceptions.PulsarException) as error:
            raise NotSentError(
                f"version {version} of the schema of {topic} could not be read",
                got=str(error) or "no answer",
                remedy="check that the broker answers",
            ) from error
        if int(info.schema_type()) == _KEY_VALUE:
            # The client crashes the process at such a send, and has no way to send a binary key.
            raise SchemaUnsupportedError(
                "the Python client can't send messages with a KeyValue schema",
                got=f"version {version} of the schema of {topic}",
                remedy="consume this topic with Java, or handle these messages without failing",
            )
        return WriterSchema(info)


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
