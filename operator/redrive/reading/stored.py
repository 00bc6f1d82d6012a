"""Entries as a broker stores them → their messages. Pure.

Nothing in an entry is trusted: any producer of a topic writes what it likes. The client for Python
takes counts and sizes as they are written, and one that is wrong ends its process, or overwrites
the memory of other messages. Here each is compared with the bytes, before any memory is reserved.
Messages answer to the same calls as those of the client.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import pulsar
import pyarrow as pa
from google_crc32c import value as crc32c

from redrive.reading.metadata import (
    EntryMetadata,
    MessageFields,
    SingleMetadata,
    decode_entry,
    decode_pair,
    decode_single,
)
from redrive.reading.positions import (
    ONE_BYTE,
    encode_nested,
    encode_number,
    signed_32,
)

MAX_CONTENT = 512 * 2**20
"""The most bytes of one message, decompressed or put together from chunks."""
MAX_READ_CONTENT = 128 * 2**20
"""Largest content of an entry that jobs, commands and tasks of Spark read, likewise. It bounds
their memory: 5 MiB in a topic may be 1 GiB when it is decompressed."""
MAX_CHUNKS = 100_000
_MESSAGE_BYTES, _FIELD_BYTES = 1_024, 64
"""Upper bounds of the memory of a message in a batch, and of a field of its metadata, both without
their contents. Either may take few bytes of the batch."""
_BROKER_METADATA, _CHECKSUM = b"\x0e\x02", b"\x0e\x01"
_SIZE = 4
_BASE64 = re.compile(rb"(?:[a-zA-Z\d+/]{4})*(?:[a-zA-Z\d+/]{2}(?:==)?|[a-zA-Z\d+/]{3}=?)?")
"""As a broker decodes it."""
_LZ4, _ZLIB, _ZSTD, _SNAPPY = 1, 2, 3, 4
_CODECS = {_LZ4: "lz4_raw", _ZSTD: "zstd", _SNAPPY: "snappy"}

_NAME_TAG, _VALUE_TAG = 0x0A, 0x12

_SHORT, _KEPT = 256, 1_024
"""Maximum bytes of a property that is kept when it is read, and number of these: most dead letters
have the same topic, cause and reason."""

Place = tuple[int, int]
"""Ledger and entry."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NoText:
    """Name and value of a property of which one is not UTF-8."""

    name: bytes
    value: bytes


Property = tuple[str, str] | NoText
"""Name and value."""


class MalformedEntryError(ValueError):
    """An entry does not hold the messages that its metadata names; no client can show them."""


class Chunk(NamedTuple):
    """A part of a message.

    Attributes:
        uuid: the same for all its parts.
        part: its number, from 0.
        parts: how many there are.
        size: of all of them, in bytes; None if they are encrypted, which adds to it.
    """

    uuid: bytes
    part: int
    parts: int
    size: int | None


class StoredEntry(NamedTuple):
    """An entry, of which the metadata is read.

    Attributes:
        metadata: its metadata.
        properties: names and values.
        content: behind the metadata, as it was sent.
    """

    metadata: EntryMetadata
    properties: Sequence[Property]
    content: bytes

    @classmethod
    def read(cls, entry: bytes) -> StoredEntry:
        """Read what follows a MESSAGE in its frame.

        Raises:
            MalformedEntryError: it has another checksum, or is no entry.
        """
        at = 0
        if entry.startswith(_BROKER_METADATA):
            at = 2 + _SIZE + int.from_bytes(entry[2 : 2 + _SIZE])
        if entry.startswith(_CHECKSUM, at):
            begin = at + 2 + _SIZE
            if crc32c(entry[begin:]) != int.from_bytes(entry[at + 2 : begin]):
                raise MalformedEntryError("the checksum is that of other bytes")
            at = begin
        size, at = int.from_bytes(entry[at : at + _SIZE]), at + _SIZE
        if at + size > len(entry):
            raise MalformedEntryError(f"{size} bytes of metadata in {len(entry)} bytes")
        metadata = _decoded(decode_entry, entry[at : at + size])
        return cls(metadata, _properties(metadata), entry[at + size :])

    @property
    def messages(self) -> int:
        """Return the number of messages that the broker counts it as, true or not."""
        metadata = self.metadata
        return signed_32(metadata.in_batch) if metadata.HasField("in_batch") else 1

    @property
    def is_encrypted(self) -> bool:
        """Return True if only its readers can decrypt the content."""
        return self.metadata.HasField("encryption_keys")

    @property
    def chunk(self) -> Chunk | None:
        """Return the part of a message that it is; None if it holds whole ones.

        Raises:
            MalformedEntryError: it is a part that can't be one.
        """
        metadata = self.metadata
        parts = signed_32(metadata.chunks)
        if parts <= 1:  # as mostly
            return None
        if metadata.HasField("in_batch"):
            if metadata.compression:  # clients decompress no chunk, nor this batch
                raise MalformedEntryError(f"a compressed batch that is one of {parts} chunks")
            return None
        part, size = signed_32(metadata.chunk), signed_32(metadata.total_size)
        if not 0 <= part < parts <= min(size, MAX_CHUNKS) or size > MAX_CONTENT:
            raise MalformedEntryError(f"chunk {part} of {parts}, of {size} bytes together")
        return Chunk(metadata.uuid, part, parts, None if self.is_encrypted else size)

    def of(
        self,
        content: bytes,
        chunks: Sequence[Place],
        partition: int,
        max_content: int = MAX_CONTENT,
    ) -> list[ReadMessage]:
        """Return its messages.

        Args:
            content: of the entry, or of the message that it is the last part of.
            chunks: the entries of that; the entry alone where it is no part.
            partition: of the topic it lies in; -1 if that has none.
            max_content: limit of the memory of the messages in bytes. Decompressed content above
                it, or a batch of more messages or fields, becomes one message that is oversized.

        Raises:
            MalformedEntryError: it holds others than its metadata names.
        """
        metadata = self.metadata
        if metadata.key_in_base64 and not _BASE64.fullmatch(metadata.key):
            raise MalformedEntryError("a key in base64 that is none")
        is_batch, compression = metadata.HasField("in_batch"), metadata.compression
        if not metadata.HasField("encryption_keys"):
            if compression:
                if max_content < metadata.uncompressed_size <= MAX_CONTENT:
                    return [self.oversized(chunks, partition)]
                content = self._decompressed(compression, content)
            if is_batch:
                return self._of_batch(content, chunks[-1], partition, max_content)
        elif is_batch:
            self._check_count(self._uncompressed_size() if compression else len(content))
        return [self._message(chunks, partition, content)]

    def oversized(self, chunks: Sequence[Place], partition: int) -> ReadMessage:
        """Return the message that stands for content above a limit; see `of`."""
        message = self._message(chunks, partition, b"")
        message.is_oversized = True
        return message

    def _message(self, chunks: Sequence[Place], partition: int, content: bytes) -> ReadMessage:
        place = MessagePlace(partition, chunks)
        return ReadMessage(place, self.metadata, self.properties, content)

    def _of_batch(
        self, batch: bytes, entry: Place, partition: int, max_content: int
    ) -> list[ReadMessage]:
        self._check_count(len(batch))
        count, at = self.messages, 0
        room = max_content - len(batch)
        messages = []
        for index in range(count):
            begin = at + _SIZE
            behind = begin + int.from_bytes(batch[at:begin])
            # A field takes two bytes at least.
            if room < _MESSAGE_BYTES + (min(behind, len(batch)) - begin) // 2 * _FIELD_BYTES:
                return [self.oversized((entry,), partition)]
            metadata = _decoded(decode_single, batch[begin:behind])
            properties = _properties(metadata)
            room -= _MESSAGE_BYTES + _FIELD_BYTES * len(properties)
            size = signed_32(metadata.payload_size)
            at = behind + size
            if begin > len(batch) or size < 0 or at > len(batch):
                raise MalformedEntryError(f"{count} messages in a batch that ends in {index}")
            place = MessagePlace(partition, (entry,), index, count)
            content = batch[behind:at]
            own = OwnFields.of(metadata)
            messages.append(ReadMessage(place, self.metadata, properties, content, own))
        return messages

    def _check_count(self, size: int) -> None:
        """Compare the number of messages with the size of the batch."""
        if not 0 < self.messages <= size // _SIZE:
            raise MalformedEntryError(f"a batch of {self.messages} messages in {size} bytes")

    def _decompressed(self, kind: int, content: bytes) -> bytes:
        size = self._uncompressed_size()
        try:
            return _decompressed(kind, content, size)
        except (KeyError, OSError, ValueError, zlib.error) as error:
            raise MalformedEntryError(f"not {size} bytes of compression {kind}") from error

    def _uncompressed_size(self) -> int:
        """Return the size that the producer stated, which is within the limit."""
        size = self.metadata.uncompressed_size
        if size > MAX_CONTENT:
            raise MalformedEntryError(f"{size} bytes, more than {MAX_CONTENT}")
        return size


class MessagePlace(NamedTuple):
    """Where a message lies.

    Attributes:
        partition: of the topic; -1 if that has none.
        entries: of its chunks, in order; one if it is whole.
        batch_index: within its batch; -1 if it is in none.
        batch_size: the number of messages in its entry.
    """

    partition: int
    entries: Sequence[Place]
    batch_index: int = -1
    batch_size: int = 1

    def message_id(self) -> pulsar.MessageId:
        """Return it as the client names it."""
        written = [_id(self.entries[-1])]
        if self.partition >= 0:
            written.append(encode_number(3, self.partition))
        if self.batch_index >= 0:
            written += (encode_number(4, self.batch_index), encode_number(6, self.batch_size))
        if len(self.entries) > 1:
            written.append(encode_nested(7, _id(self.entries[0])))
        return pulsar.MessageId.deserialize(b"".join(written))


class OwnFields(NamedTuple):
    """Fields that each message of a batch has for itself.

    The library keeps all that it has decoded, also fields that are never read, as long as a
    message of it is in use. Its memory is known for one message at a time only.
    """

    key: bytes
    key_in_base64: int
    ordering_key: bytes
    event_time: int
    null_value: int

    @classmethod
    def of(cls, metadata: SingleMetadata) -> OwnFields:
        """Return the fields of a message."""
        return cls(
            metadata.key,
            metadata.key_in_base64,
            metadata.ordering_key,
            metadata.event_time,
            metadata.null_value,
        )


class ReadMessage:
    """A message, as `pulsar.Message` shows it; from an entry that holds what its metadata names.

    Attributes:
        place: where it lies.
        entry: metadata of its entry.
        fields: its own metadata, which is that of its entry if it is in no batch.
        is_oversized: True if its content was above the limit of the reader and is left out. If its
            entry is a batch, the message stands for all messages of it.

    Raises:
        UnicodeDecodeError: from each method that returns text, if its producer wrote none.
    """

    __slots__ = ("_content", "_properties", "entry", "fields", "is_oversized", "place")

    def __init__(
        self,
        place: MessagePlace,
        entry: EntryMetadata,
        properties: Sequence[Property],
        content: bytes,
        own: OwnFields | None = None,
    ) -> None:
        self.place, self.is_oversized = place, False
        self.entry = entry
        self.fields: EntryMetadata | OwnFields = entry if own is None else own
        self._properties, self._content = properties, content

    def message_id(self) -> pulsar.MessageId:
        """Return its id; of one that was sent in chunks, that of the last."""
        return self.place.message_id()

    def data(self) -> bytes:
        """Return its content; as it is stored where it is encrypted."""
        return self._content

    def has_null_value(self) -> bool:
        """Return True if it carries a null instead of bytes."""
        return bool(self.fields.null_value)

    def properties(self) -> dict[str, str]:
        """Return its properties; of those with the same name the last."""
        try:
            return dict(self._properties)  # type: ignore[arg-type]  # a `NoText` raises an error
        except TypeError:
            invalid = next(p for p in self._properties if isinstance(p, NoText))
            return {invalid.name.decode(): invalid.value.decode()}  # raises an error

    def partition_key(self) -> str:
        """Return its key; empty if it has none."""
        return self.fields.key.decode()

    def has_binary_key(self) -> bool:
        """Return True if its key is no text: `messages.partition_key` returns it in base64."""
        try:
            self.fields.key.decode()
        except UnicodeDecodeError:
            return True
        return bool(self.fields.key_in_base64)

    def ordering_key(self) -> str:
        """Return its ordering key; empty if it has none."""
        return self.fields.ordering_key.decode()

    def schema_version(self) -> str:
        """Return the bytes of its schema's version, as text."""
        return self.entry.schema_version.decode()

    def encryption_context(self) -> object | None:
        """Return None if its content is not encrypted."""
        return self.entry.encryption_keys if self.entry.HasField("encryption_keys") else None

    def publish_timestamp(self) -> int:
        """Return when it was sent, in milliseconds since 1970."""
        return self.entry.publish_time

    def event_timestamp(self) -> int:
        """Return the time that its producer gave it, likewise; 0 for none."""
        return self.fields.event_time


def _decoded(decode: Callable[[bytes], _T], metadata: bytes) -> _T:
    try:
        return decode(metadata)
    except ValueError as error:
        raise MalformedEntryError(str(error)) from error


def _properties(metadata: MessageFields) -> list[Property]:
    return list(map(_KEPT_PROPERTIES.__getitem__, metadata.properties))


class KeptProperties(dict[bytes, Property]):
    """Decoded properties, of which the short ones are kept."""

    def __missing__(self, pair: bytes) -> Property:
        decoded = _property(pair)
        if len(pair) <= _SHORT:
            if len(self) >= _KEPT:
                self.clear()
            self[pair] = decoded
        return decoded


_KEPT_PROPERTIES = KeptProperties()


def _property(pair: bytes) -> Property:
    name, value = _pair(pair)
    try:
        return name.decode(), value.decode()
    except UnicodeDecodeError:
        return NoText(name, value)


def _pair(pair: bytes) -> tuple[bytes, bytes]:
    if len(pair) > 3 and pair[0] == _NAME_TAG and (name := pair[1]) < ONE_BYTE:  # noqa: PLR2004
        # As clients write a short name and a short value.
        at = name + 4
        size = len(pair) - at
        if 0 <= size < ONE_BYTE and pair[at - 2] == _VALUE_TAG and pair[at - 1] == size:
            return pair[2 : at - 2], pair[at:]
    decoded = _decoded(decode_pair, pair)
    return decoded.name, decoded.value


def _id(place: Place) -> bytes:
    ledger, entry = place
    return encode_number(1, ledger) + encode_number(2, entry)


def _decompressed(kind: int, content: bytes, size: int) -> bytes:
    """Return *content* decompressed.

    Raises:
        KeyError: there is no such kind of compression.
        OSError, ValueError, zlib.error: it is compressed in no such way, or of another size.
    """
    if kind == _ZLIB:
        whole = zlib.decompressobj().decompress(content, size + 1)
    else:
        codec = pa.Codec(_CODECS[kind])
        if not size and content in {b"", codec.compress(b"", asbytes=True)}:
            return b""
        # Of the two formats that don't have the size, the codec fills up with what is in memory.
        if kind == _SNAPPY and _snappy_size(content) != size:
            raise ValueError("another size")
        if kind == _LZ4 and _fits(codec, content, size - 1):
            raise ValueError("a smaller size")
        whole = codec.decompress(content, size, asbytes=True)
    if len(whole) != size:
        raise ValueError("another size")
    return whole


def _fits(codec: pa.Codec, content: bytes, size: int) -> bool:
    """Return True if *content* is of so many bytes at most."""
    try:
        # As bytes: a pool of Arrow would keep the memory of a buffer.
        codec.decompress(content, max(0, size), asbytes=True)
    except OSError:
        return False
    return True


def _snappy_size(content: bytes) -> int:
    """Return the size that begins *content*, a number of up to five bytes."""
    size = 0
    for index, byte in enumerate(content[:5]):
        size |= (byte & 0x7F) << 7 * index
        if byte < 0x80:  # noqa: PLR2004
            break
    return size
