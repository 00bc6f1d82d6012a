"""Entries that no client writes, or clients in other languages do, sent by the binary protocol."""

from __future__ import annotations

import itertools
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import NamedTuple

import pyarrow as pa
from google_crc32c import value as crc32c

from redrive.auth.method import ShownCredentials
from redrive.policy.naming import TopicName
from redrive.reading import frames
from redrive.reading.frames import OutgoingMessage
from redrive.reading.positions import encode_nested, encode_number
from redrive.reading.session import ProtocolProducer, Session
from redrive.reading.stored import ReadMessage, StoredEntry
from sandbox.pulsar import SUPERUSER, Broker

SECONDS = 60.0
FIELDS = {
    "in_batch": 11,
    "key_in_base64": 17,
    "compression": 8,
    "uncompressed": 9,
    "uuid": 26,
    "chunks": 27,
    "total": 28,
    "chunk": 29,
}
"""Names of fields of MessageMetadata."""


class RawEntry(NamedTuple):
    """Fields of MessageMetadata after those of each entry, and the content after them."""

    metadata: bytes
    content: bytes = b"raw"


def numbers(**fields: int) -> bytes:
    """Write fields of MessageMetadata."""
    return b"".join(encode_number(FIELDS[name], value % 2**64) for name, value in fields.items())


def chunk(uuid: str, part: int, parts: int, total: int, content: bytes) -> RawEntry:
    fields = numbers(chunks=parts, total=total, chunk=part)
    return RawEntry(fields + encode_nested(FIELDS["uuid"], uuid.encode()), content)


def in_batch(content: bytes, metadata: bytes = b"", size: int | None = None) -> bytes:
    """Write a message of a batch.

    Args:
        content: of the message.
        metadata: fields of SingleMessageMetadata besides its size.
        size: in its metadata; the real one by default.
    """
    metadata += encode_number(3, len(content) if size is None else size % 2**64)
    return len(metadata).to_bytes(4) + metadata + content


HARMFUL = {
    "a batch of 2 that holds 1": RawEntry(numbers(in_batch=2), in_batch(b"x")),
    "a batch of 2^31 - 1": RawEntry(numbers(in_batch=2**31 - 1), in_batch(b"x")),
    "a batch of -1": RawEntry(numbers(in_batch=-1), in_batch(b"x")),
    "a batch of none": RawEntry(numbers(in_batch=0)),
    "a batch without content": RawEntry(numbers(in_batch=1), b""),
    "more metadata in a batch than there is": RawEntry(
        numbers(in_batch=1), (2**31 - 1).to_bytes(4) + b"xyz"
    ),
    "more content in a batch than there is": RawEntry(
        numbers(in_batch=1), in_batch(b"x", size=2**24)
    ),
    "content of -8 bytes in a batch": RawEntry(numbers(in_batch=2), in_batch(b"x" * 20, size=-8)),
    "a compressed batch that is a chunk": RawEntry(
        numbers(in_batch=1, compression=2, uncompressed=7, chunks=2),
        zlib.compress(in_batch(b"x")),
    ),
    "an encrypted batch of 2^31 - 1": RawEntry(
        encode_nested(13, encode_nested(1, b"key") + encode_nested(2, b"value"))
        + numbers(in_batch=2**31 - 1),
        b"secret",
    ),
    "a batch of 2^31 - 1, zlib that is none": RawEntry(
        numbers(in_batch=2**31 - 1, compression=2, uncompressed=10), b"raw"
    ),
    "a chunk of 2^31 - 1": chunk("a", 0, 2**31 - 1, 3, b"raw"),
    "a chunk of more than it has bytes": chunk("g", 0, 5_000, 300, b"raw"),
    "a chunk longer than its total": chunk("b", 0, 2, 1, bytes(100_000)),
    "a chunk of a total of -1": chunk("c", 0, 2, -1, bytes(1_000)),
    "a chunk of a total of 2^31 - 1": chunk("d", 0, 2, 2**31 - 1, b"raw"),
    "a chunk of number -1": chunk("e", -1, 2, 10, b"raw"),
    "a chunk without its first": chunk("f", 1, 2, 10, b"raw"),
    "LZ4 of 4 GB": RawEntry(numbers(compression=1, uncompressed=2**32 - 1), b"\x1fx" * 40),
    "LZ4 of 1 GB that is none": RawEntry(numbers(compression=1, uncompressed=2**30), b"\xff" * 40),
    "LZ4 of more than it holds": RawEntry(numbers(compression=1, uncompressed=5_000), b"\x10x"),
    "zlib that is none": RawEntry(numbers(compression=2, uncompressed=10), b"raw"),
    "zstd that is none": RawEntry(numbers(compression=3, uncompressed=2**32 - 1), b"raw"),
    "snappy of more than it names": RawEntry(
        numbers(compression=4, uncompressed=1),
        pa.Codec("snappy").compress(bytes(100_000), asbytes=True),
    ),
    "a key in base64 that is none": RawEntry(encode_nested(6, b"a_key") + numbers(key_in_base64=1)),
    "a compression that is none": RawEntry(numbers(compression=99, uncompressed=3), b"raw"),
}
"""Entries with another content than in their metadata. The client for Python crashes at
many of them."""


def bytes_of(raw: RawEntry, *, with_checksum: bool = True) -> bytes:
    """Return an entry as sent by a broker, published 1.7 s after 1970."""
    metadata = (
        encode_nested(1, b"raw") + encode_number(2, 1) + encode_number(3, 1_700) + raw.metadata
    )
    written = len(metadata).to_bytes(4) + metadata + raw.content
    return b"\x0e\x01" + crc32c(written).to_bytes(4) + written if with_checksum else written


def read_alone(metadata: bytes = b"", content: bytes = b"x") -> ReadMessage:
    """Return the only message of an entry."""
    entry = StoredEntry.read(bytes_of(RawEntry(metadata, content)))
    (message,) = entry.of(entry.content, ((1, 2),), -1)
    return message


def store(broker: Broker, topic: TopicName, entries: Iterable[RawEntry]) -> None:
    """Store *entries* in their order."""
    shown = ShownCredentials("token", lambda: broker.token(SUPERUSER))
    with closing(Session[None](broker.service_url, shown)) as session:
        producer = session.open(str(topic), f"raw-{time.time_ns()}")
        connection = producer.connection
        always = encode_nested(1, b"raw") + encode_number(3, time.time_ns() // 1_000_000)
        for count, entry in enumerate(entries, 1):
            sequence_id = encode_number(2, count)
            command = encode_number(1, producer.number) + sequence_id
            metadata = always + sequence_id + entry.metadata
            connection.send(frames.payload(command, metadata, entry.content))
            connection.flush()
            answers = connection.read(SECONDS)
            assert [answer.kind for answer in answers] == [frames.SEND_RECEIPT], answers


SCHEMA_VERSION, UUID, CHUNKS, TOTAL_SIZE, CHUNK = 16, 26, 27, 28, 29
"""Numbers of fields of `MessageMetadata` in `PulsarApi.proto`."""
_IS_CHUNK = 7  # of CommandSend


class RawProducer:
    """A producer of one topic, or one partition."""

    def __init__(self, session: Session[int], producer: ProtocolProducer[int]) -> None:
        self._session = session
        self._producer = producer
        self._numbers = itertools.count(1)

    def send(
        self,
        content: bytes,
        metadata: bytes = b"",
        *,
        properties: Mapping[bytes, bytes] | None = None,
        key: str | None = None,
        command: bytes = b"",
    ) -> None:
        """Send an entry, and wait until it is stored.

        Args:
            metadata: encoded fields of `MessageMetadata` besides the usual ones.
            properties: of any bytes.
            command: encoded fields of `CommandSend`.
        """
        for name, value in (properties or {}).items():
            metadata += encode_nested(4, encode_nested(1, name) + encode_nested(2, value))
        sequence_id = next(self._numbers)
        usual = frames.alone(OutgoingMessage(sequence_id, content, {}, key, None, None))
        self._producer._store(sequence_id, (0,), command, usual + metadata, content)  # noqa: SLF001
        (sent,) = self._session.receive(SECONDS)
        assert sent.stored

    def send_chunk(self, uuid: str, part: bytes, index: int, count: int, size: int) -> None:
        """Send one of *count* chunks of a message of *size* bytes."""
        metadata = (
            encode_nested(UUID, uuid.encode())
            + encode_number(CHUNKS, count)
            + encode_number(TOTAL_SIZE, size)
        )
        self.send(part, metadata + encode_number(CHUNK, index), command=encode_number(_IS_CHUNK, 1))


@contextmanager
def raw_producer(broker: Broker, topic: object) -> Iterator[RawProducer]:
    """Open a producer of *topic* as the super-user."""
    shown = ShownCredentials("token", lambda: broker.token(SUPERUSER))
    with closing(Session[int](broker.service_url, shown)) as session:
        yield RawProducer(session, session.open(str(topic), f"raw-{secrets.token_hex(4)}"))
