"""Fields of a message, its schema, and errors of copying it.

The client decodes keys and properties as UTF-8, and raises an error for other bytes. Producers in
other languages may send such bytes, and no message may end a consumer or a replay. `partition_key`,
`read_properties` and others read a message safely.

`WriterSchemas` reads the schemas with which messages were written. A producer that is opened with
such a schema sends its version with each message, and adds the schema to its topic if it is
missing. So a consumer of any version decodes a copy as it decodes the message. Contents are not
decoded.

`encode` encodes the parts of a message that its copy cannot contain, as JSON in a property or
before the payload. Names, values and keys are base64 of the producer's bytes. `delivery` uses it
for dead letters; docs/reference/properties.md documents the form for users:

    {"properties": [[name, value], …], "key": …, "orderingKey": …, "null": true,
     "encryption": …}
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
    """A message has no receipt: whether it was stored is unknown."""

    reason = "NotSent"


class NotCopyableError(NotSentError):
    """A message can never be copied as it is; it was not stored."""

    reason = "NotCopyable"


class TooBigError(NotCopyableError):
    """A message, or its properties alone, exceeds the limit of the broker; it was not stored."""

    reason = "TooBig"


class SchemaError(NotCopyableError):
    """A message cannot be sent with its schema; it was not stored."""

    reason = "Schema"


UNDECRYPTABLE = "Undecryptable"
"""Reason of an entry that can't be decrypted, and takes the permits of each consumer."""


def partition_key(message: pulsar.Message) -> str:
    """Return the key of *message*, in base64 if it is not text; empty if it has none."""
    return _text(message.partition_key)


def ordering_key(message: pulsar.Message) -> str:
    """Return the ordering key of *message*, in base64 if it is not text; empty if it has none."""
    return _text(message.ordering_key)


def read_properties(message: pulsar.Message) -> dict[str, str] | None:
    """Return the properties of *message*; None if one is not text: the client then shows none."""
    try:
        properties: dict[str, str] = message.properties()
    except UnicodeDecodeError:
        return None
    return properties


NO_VERSION = 2**63 - 1
"""Version of a message whose metadata has a version that is invalid for a topic."""


def schema_version(message: pulsar.Message) -> int | None:
    """Return the version of its topic's schema that *message* was produced with; None if none.

    The producer writes it, in any number of bytes. A version that exceeds the 8 bytes of a broker's
    is `NO_VERSION`, which is never found, like a deleted version.
    """
    try:
        text = message.schema_version()
        if not text:
            return None
        written = text.encode()
    except UnicodeDecodeError as error:  # the client decodes the bytes of the number as text
        written = error.object
    return min(int.from_bytes(written, "big"), NO_VERSION)


def size(message: pulsar.Message) -> int:
    """Return the bytes of payload, properties and keys of *message*; the payload is not copied."""
    properties: Mapping[str, str] | Mapping[bytes, bytes] | None = read_properties(message)
    if properties is None:
        properties = raw_properties(message)
    texts = (*properties, *properties.values(), partition_key(message), ordering_key(message))
    return sum(map(_bytes_of, texts), int(message._message.length()))  # noqa: SLF001 - not available elsewhere


def _bytes_of(text: str | bytes) -> int:
    return len(text if isinstance(text, bytes) or text.isascii() else text.encode())


def id_text(message_id: pulsar.MessageId) -> str:
    """Format an id as the Java client does: ledger, entry, partition, and the index in a batch."""
    index = message_id.batch_index()
    entry = f"{message_id.ledger_id()}:{message_id.entry_id()}:{message_id.partition()}"
    return entry if index < 0 else f"{entry}:{index}"


def message_id_text(message: pulsar.Message) -> str:
    """Return the `id_text` of *message*, which is computed once and kept with it."""
    text: str | None = getattr(message, "redrive_id", None)
    if text is None:
        text = id_text(message.message_id())
        vars(message)["redrive_id"] = text  # a message in memory is a frozen object
    return text


def _text(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        return binascii.b2a_base64(error.object, newline=False).decode()


def sequence_key(message: pulsar.Message) -> str:
    """Return the key within which messages are ordered; empty if there is none."""
    return ordering_key(message) or partition_key(message)


_reading_raw = threading.Lock()


def raw_properties(message: pulsar.Message) -> dict[bytes, bytes]:
    """Return the properties of *message* as the bytes that its producer wrote.

    The client decodes them as UTF-8 with Python's error handler `strict`. During this call, and in
    this thread only, that handler keeps bytes that are not text.
    """
    lossless, here = codecs.lookup_error("surrogateescape"), threading.get_ident()

    def keep(error: UnicodeError) -> tuple[str | bytes, int]:
        return (lossless if threading.get_ident() == here else strict)(error)

    with _reading_raw:
        strict = codecs.lookup_error("strict")  # within the lock: else that of another thread
        codecs.register_error("strict", keep)
        try:
            texts: dict[str, str] = message.properties()
        finally:
            codecs.register_error("strict", strict)
    return {_raw(name): _raw(value) for name, value in texts.items()}


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


BYTES = pulsar.schema.BytesSchema()
"""Schema of messages that are not decoded."""
LATEST = -1
"""Stands for the current version of a topic's schema."""

_KEY_VALUE = 15
_Ask = Callable[[Callable[[], Any]], Any]  # the client has no types


class WriterSchema(pulsar.schema.Schema):  # type: ignore[misc]  # the client has no types
    """Schema of a topic, for contents that are encoded already.

    Equal to another of the same type and definition, regardless of version and topic.
    """

    def __init__(self, info: pulsar.schema.SchemaInfo) -> None:
        self._schema_info = info  # what Schema.schema_info() returns
        self._identity = (int(info.schema_type()), info.schema())

    def encode(self, content: bytes) -> bytes:
        """Return *content* unchanged."""
        return content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WriterSchema) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)


class WriterSchemas:
    """Finds the schema of each message, and reads each version once from the broker; thread-safe.

    Any role may read schemas.

    Args:
        client: reads from the broker.
        ask: performs such a read, and may raise TimeoutError; by default it waits as long as the
            client does.
    """

    def __init__(self, client: pulsar.Client, ask: _Ask = lambda read: read()) -> None:
        self._client = client
        self._ask = ask
        self._schemas: dict[tuple[TopicName, int], WriterSchema] = {}

    def get(self, topic: TopicName, version: int) -> WriterSchema:
        """Return one version of the schema of *topic*, such as its `LATEST`.

        Raises:
            SchemaError: the topic has no such version, because it was deleted; or it is a schema of
                keys and values.
            NotSentError: the broker did not answer.
        """
        schema = self._schemas.get((topic, version))
        if schema is None:
            schema = self._schemas[topic, version] = self._read(topic, version)
        return schema

    def _read(self, topic: TopicName, version: int) -> WriterSchema:
        try:
            # The client offers this call for consumers with an Avro schema only.
            read = functools.partial(self._client._client.get_schema_info, str(topic), version)  # noqa: SLF001
            info = self._ask(read)
        except pulsar.Interrupted:
            raise  # the client's form of KeyboardInterrupt
        except pulsar.TopicNotFound as error:
            raise SchemaError(
                "a message cannot be forwarded without the schema that it was written with",
                got=f"no version {version} of the schema of {topic}",
                remedy="restore the schema; without it no consumer can decode the message",
                reason="SchemaNotFound",
            ) from error
        except (TimeoutError, pulsar.exceptions.PulsarException) as error:
            raise NotSentError(
                f"version {version} of the schema of {topic} could not be read",
                got=str(error) or "no answer",
                remedy="check that the broker answers",
            ) from error
        if int(info.schema_type()) == _KEY_VALUE:
            # The client crashes the process at such a send, and cannot send a binary key.
            raise SchemaError(
                "the Python client cannot send messages with a KeyValue schema",
                got=f"version {version} of the schema of {topic}",
                remedy="consume this topic with Java, or handle these messages without failing",
                reason="SchemaUnsupported",
            )
        return WriterSchema(info)


MAX_PROPERTY = 16_384
"""Maximum characters of JSON in a property; longer JSON precedes the payload."""


class Encoded(NamedTuple):
    """Parts of a copy.

    Attributes:
        properties: all texts, with the JSON, or the length of the prefix.
        prefix: precedes the payload; mostly empty.
    """

    properties: dict[str, str]
    prefix: bytes


def encryption_of(message: pulsar.Message) -> dict[str, object]:
    """Return all that is needed to decrypt *message*, which was not decrypted."""
    context = message.encryption_context()
    keys = context.keys()
    return {
        "keys": [
            [_text(functools.partial(getattr, key, "key")), _base64(key.value)] for key in keys
        ],
        "algorithm": _text(context.algorithm),
        "param": _base64(context.param()),
        "compression": int(context.compression_type()),
        "uncompressedSize": context.uncompressed_message_size(),
        "batchSize": context.batch_size(),
    }


def encode(
    properties: Mapping[bytes, bytes],
    keys: Mapping[str, str],
    *,
    everything: bool,
    null: bool,
    encryption: Mapping[str, object],
) -> Encoded:
    """Encode parts that are not text.

    Args:
        properties: properties as the producer wrote them.
        keys: keys to encode, by `key` and `orderingKey`.
        everything: True encodes all properties, which are too large together.
        null: True if the message has no payload.
        encryption: as of `encryption_of`.
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
    if encryption:
        parts["encryption"] = encryption
    written = json.dumps(parts)
    if not parts or len(written) <= MAX_PROPERTY:
        return Encoded(texts | ({ENCODED: written} if parts else {}), b"")
    prefix = json.dumps(parts | ({"null": True} if null else {})).encode()
    return Encoded(texts | {PAYLOAD_PREFIX: str(len(prefix))}, prefix)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
