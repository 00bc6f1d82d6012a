"""Reader of the entries of one topic, without the client; for one thread.

It reconnects after a loss of the connection. The client's process would end at a malformed entry,
whose content does not match its metadata; see `stored`. The reader skips malformed entries, entries
that cannot be decompressed, and incomplete chunked messages.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pulsar

from redrive.errors import RedriveError
from redrive.reading import frames
from redrive.reading.frames import Command
from redrive.reading.positions import decode_fields, to_signed
from redrive.reading.session import ProtocolError, Session
from redrive.reading.stored import (
    MAX_CONTENT,
    Chunk,
    MalformedEntryError,
    Place,
    ReadMessage,
    StoredEntry,
)

SILENT_SECONDS = 90.0
"""Time without data after which a connection is lost; a broker sends a ping every 30 s."""
RETRY_SECONDS = 0.5
READ_BYTES = 16 * 2**20
"""Approximate number of bytes received at a time: permits count messages, which may be large."""
MAX_COUNTED = 1_000_000
"""Highest plausible number of messages of an entry. If a broker counts more, or a negative number,
the permits of the consumer are wrong, so it is replaced."""
_NUMBER = 1
_REFUSALS = {
    3: pulsar.AuthenticationError,
    4: pulsar.AuthorizationError,
    5: pulsar.ConsumerBusy,
    6: pulsar.ServiceUnitNotReady,
    11: pulsar.TopicNotFound,
    15: pulsar.TopicTerminated,
    17: pulsar.InvalidTopicName,
    22: pulsar.NotAllowedError,
}
"""Exceptions of the client by the number of the protocol's `ServerError`."""

OnMalformed = Callable[[Place, bytes, str], None]
OnChunk = Callable[[Place], None]

logger = logging.getLogger(__name__)


class EntryReader:
    """Reads the messages after an entry, in the order in which they were written.

    A chunked message is returned with its last chunk. After a loss of the connection, messages may
    be returned again.

    Args:
        connect: opens a session with the cluster.
        topic: a partition, or an unpartitioned topic.
        partition: its index; -1 for an unpartitioned topic.
        after: entry after which to begin; an entry of -1 is before the first of its ledger.
        name: prefix of the subscription in the broker's statistics while the reader is open.
        on_malformed: called with each malformed entry that is skipped: its position, its bytes, and
            the error.
        ahead: highest number of messages that are sent before they are read, except in a batch.
        compacted: see `frames.subscribe`.
        max_content: see `StoredEntry.of`.
        on_chunk: called with each entry that is a chunk, also of an incomplete message.

    Raises:
        pulsar.PulsarException: as by the client, if the broker is unreachable or refuses.
    """

    def __init__(  # noqa: PLR0913  options of one reader
        self,
        connect: Callable[[], Session[None]],
        topic: str,
        partition: int,
        after: Place,
        *,
        name: str,
        ahead: int,
        on_malformed: OnMalformed | None = None,
        compacted: bool = False,
        max_content: int = MAX_CONTENT,
        on_chunk: OnChunk | None = None,
    ) -> None:
        self._max_content, self._on_chunk = max_content, on_chunk
        self._connect, self._topic, self._partition = connect, topic, partition
        self._name, self._ahead, self._compacted = name, ahead, compacted
        self._numbers = itertools.count()
        self._on_malformed = on_malformed
        self._after = after
        """Last entry that was read."""
        self._received = after
        self._incoming: deque[Command] = deque()
        self._messages: deque[ReadMessage] = deque()
        self._chunks = ChunksRead(max_content)
        self._permits = 0
        with _as_of_client():
            self._open()

    def read_next(self, timeout_millis: int) -> ReadMessage:
        """Return the next message.

        Raises:
            pulsar.Timeout: none arrived in time, or the broker is unreachable.
        """
        deadline = time.monotonic() + timeout_millis / 1_000
        while not self._messages:
            self._advance(deadline)
        return self._messages.popleft()

    def next_stored(self, timeout_millis: int) -> ReadMessage | None:
        """Return the next message; None after the last entry, even if that one is skipped.

        Raises:
            pulsar.Timeout: an entry did not arrive in time.
            pulsar.PulsarException: the broker is unreachable.
        """
        deadline = time.monotonic() + timeout_millis / 1_000
        while not self._messages and self.has_message_available():
            self._advance(deadline)
        return self._messages.popleft() if self._messages else None

    def _advance(self, deadline: float) -> None:
        """Receive entries, or decode the first received one."""
        try:
            if not self._incoming:
                self._receive(max(0.0, deadline - time.monotonic()))
            if self._incoming:
                self._take(self._incoming.popleft())
            elif time.monotonic() >= deadline:
                raise pulsar.Timeout("no message arrived in time")
        except ProtocolError as error:
            self._open_again(error, deadline)

    def has_message_available(self) -> bool:
        """Return True if the topic has an entry that the broker has not sent yet.

        Raises:
            pulsar.PulsarException: the broker is unreachable.
        """
        return bool(self._incoming or self._messages) or self.last_entry() > self._received

    def last_entry(self) -> Place:
        """Return the last entry that may be read, before any open transaction.

        Raises:
            pulsar.PulsarException: the broker is unreachable.
        """
        with _as_of_client():
            answer = self._connection.ask(
                lambda request: frames.last_message_id(request, _NUMBER),
                frames.LAST_MESSAGE_ID_RESPONSE,
            )
            return read_place(answer.nested.get(1, b""))

    def renew(self) -> None:
        """Connect again, and continue after the last entry that was read.

        Raises:
            pulsar.Timeout: the broker is unreachable.
        """
        self._open_again(ProtocolError("it delivers nothing"), time.monotonic() + RETRY_SECONDS)

    def close(self) -> None:
        """Close the reader and its connections."""
        self._session.close()

    def _open(self) -> None:
        # A broker deletes the subscription of a lost connection some time later, whoever uses it.
        name = f"{self._name}-{next(self._numbers)}"
        session = self._connect()
        try:
            self._connection = session.connection_for(self._topic)
            self._connection.ask(
                lambda request: frames.subscribe(
                    self._topic,
                    request,
                    _NUMBER,
                    name,
                    self._after,
                    compacted=self._compacted,
                ),
                frames.SUCCESS,
            )
        except BaseException:
            session.close()
            raise
        self._session = session
        self._received = self._after
        self._permits = 0

    def _open_again(self, trouble: ProtocolError, deadline: float) -> None:
        """Reconnect until *deadline*; messages and chunks that were read are kept.

        Raises:
            pulsar.Timeout: the broker is unreachable.
        """
        logger.info("reconnecting to %s: %s", self._topic, trouble)
        self._session.close()
        self._incoming.clear()  # the broker sends them again
        while True:
            try:
                self._open()
            except (ProtocolError, RedriveError) as error:  # credentials may fail to renew
                remaining = deadline - time.monotonic()
                time.sleep(max(0.0, min(RETRY_SECONDS, remaining)))
                if remaining <= RETRY_SECONDS:
                    raise pulsar.Timeout(f"the broker is unreachable: {error}") from error
            else:
                return

    def _receive(self, seconds: float) -> None:
        """Receive entries; wait at most so many seconds for the first."""
        connection = self._connection
        free = self._ahead - self._permits
        if free >= max(1, self._ahead // 2):
            connection.write(frames.flow(_NUMBER, free))
            self._permits += free
        for command in connection.read(seconds, READ_BYTES):
            if command.kind == frames.CLOSE_CONSUMER:
                raise ProtocolError("the broker has closed the reader")
            if command.kind == frames.MESSAGE:
                self._incoming.append(command)
        if time.monotonic() - connection.heard > SILENT_SECONDS:
            raise ProtocolError(f"the broker sent no data for {SILENT_SECONDS:g} s")

    def _take(self, command: Command) -> None:
        """Decode an entry, and keep the messages that it completes."""
        place = command.place
        self._received = place
        counted = 1
        try:
            entry = StoredEntry.read(command.entry)
            counted = entry.messages
            chunk = entry.chunk
            if chunk is not None and self._on_chunk is not None:
                self._on_chunk(place)
            if chunk is None:
                self._messages += entry.of(
                    entry.content, (place,), self._partition, self._max_content
                )
            elif (whole := self._chunks.add(chunk, place, entry.content)) is not None:
                if whole.content is None:
                    self._messages.append(entry.oversized(whole.entries, self._partition))
                else:
                    self._messages += entry.of(
                        whole.content, whole.entries, self._partition, self._max_content
                    )
        except MalformedEntryError as error:
            logger.warning("skipped malformed entry %s of %s: %s", place, self._topic, error)
            if self._on_malformed is not None:
                self._on_malformed(place, command.entry, str(error))
        self._permits -= counted
        self._after = place
        if not 0 <= counted <= MAX_COUNTED:
            raise ProtocolError(f"the broker counts an entry as {counted} messages")


class MissingChunkError(MalformedEntryError):
    """Earlier chunks are missing; the entry itself is valid."""


class WholeMessage(NamedTuple):
    """A message with all its chunks.

    Attributes:
        entries: entries of the chunks.
        content: the content; None if it is larger than the limit.
    """

    entries: tuple[Place, ...]
    content: bytes | None


_CHUNK_BYTES = 1_024
"""Upper bound of the memory of a chunk without its content and uuid. A chunk may have no content,
so that without it any number of them would count as nothing."""


class _Parts:
    """The first chunks of a message.

    Attributes:
        size: bytes of their contents.
        kept: bytes of memory that they count as.
    """

    def __init__(self, first: Chunk) -> None:
        self.first = first
        self.entries: list[Place] = []
        self.contents: list[bytes] = []
        self.size = self.kept = 0


class ChunksRead:
    """Assembles messages from chunks, which may be interleaved. Pure.

    It keeps at most `stored.MAX_CONTENT` bytes of incomplete messages, the latest, with their uuids
    and `_CHUNK_BYTES` for each chunk. A single incomplete message is always kept.

    Args:
        max_content: limit of the content of a message in bytes. Content above it is not kept.
    """

    def __init__(self, max_content: int = MAX_CONTENT) -> None:
        self._max_content = max_content
        self._parts: dict[bytes, _Parts] = {}
        self._size = 0

    def add(self, chunk: Chunk, entry: Place, content: bytes) -> WholeMessage | None:
        """Add a chunk, and return the message that it completes.

        Repeated chunks are skipped: producers repeat sends without a receipt.

        Raises:
            MalformedEntryError: it does not follow the chunk before it, or is too large.
        """
        if not chunk.part:
            self._drop(chunk.uuid)
            self._parts[chunk.uuid] = _Parts(chunk)
            self._count(self._parts[chunk.uuid], len(chunk.uuid))
        parts = self._parts.get(chunk.uuid)
        if parts is None:
            raise MissingChunkError(f"chunk {chunk.part} without the one before it")
        part, size = len(parts.entries), parts.size + len(content)
        if chunk.part < part:
            return None
        is_last = part + 1 == chunk.parts
        fits = chunk.size is None or (size == chunk.size if is_last else size <= chunk.size)
        if not fits or chunk != parts.first._replace(part=part):
            self._drop(chunk.uuid)
            raise MalformedEntryError(f"{size} bytes up to {chunk}, after {part} chunks")
        parts.entries.append(entry)
        parts.contents.append(content)
        parts.size = size
        self._count(parts, len(content) + _CHUNK_BYTES)
        is_oversized = size > self._max_content
        if is_oversized:
            self._count(parts, -sum(map(len, parts.contents)))
            parts.contents = []
        if is_last:
            self._drop(chunk.uuid)
            whole = None if is_oversized else b"".join(parts.contents)
            return WholeMessage(tuple(parts.entries), whole)
        while self._size > MAX_CONTENT and len(self._parts) > 1:
            self._drop(next(iter(self._parts)))
        return None

    def _count(self, parts: _Parts, added: int) -> None:
        parts.kept += added
        self._size += added

    def _drop(self, uuid: bytes) -> None:
        if (parts := self._parts.pop(uuid, None)) is not None:
            self._size -= parts.kept


@contextmanager
def _as_of_client() -> Iterator[None]:
    """Raise the exceptions of the client for errors of the protocol."""
    try:
        yield
    except ProtocolError as error:
        kind = pulsar.ConnectError if error.code is None else _REFUSALS.get(error.code)
        raise (kind or pulsar.UnknownError)(str(error)) from error


def read_place(message_id: bytes) -> Place:
    """Decode a MessageIdData.

    Raises:
        ProtocolError: it is something else.
    """
    try:
        numbers, _ = decode_fields(message_id)
    except ValueError as error:
        raise ProtocolError(f"no message id: {message_id.hex()}") from error
    return to_signed(numbers.get(1, 0)), to_signed(numbers.get(2, 0))
