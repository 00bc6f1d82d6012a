"""Entries as written by producers in other languages, with the metadata of a test."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from redrive.auth.method import ShownCredentials
from redrive.reading import frames
from redrive.reading.frames import OutgoingMessage
from redrive.reading.positions import encode_nested, encode_number
from redrive.reading.session import ProtocolProducer, Session
from sandbox.pulsar import SUPERUSER, Broker

SCHEMA_VERSION, UUID, CHUNKS, TOTAL_SIZE, CHUNK = 16, 26, 27, 28, 29
"""Numbers of fields of `MessageMetadata` in `PulsarApi.proto`."""
_IS_CHUNK = 7  # of CommandSend
_SECONDS = 60.0


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
        (sent,) = self._session.receive(_SECONDS)
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
