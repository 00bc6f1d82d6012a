"""A reader of one topic, entry by entry; for one thread. It connects again whenever it is cut off.

It reads what a broker stores without the client, whose process ends at an entry that lies about
what it holds, see `stored`. Such an entry is passed over, as one that can't be decompressed, and
parts of a message of which others are missing.
"""

from __future__ import annotations

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
"""A broker that is there asks after a client each 30 s."""
RETRY_SECONDS = 0.5
READ_BYTES = 16 * 2**20
"""Received at a time, about: permits count messages, and the next ones may be large."""
MAX_COUNTED = 1_000_000
"""Where a broker counts an entry as more messages than this, or as less than none, permits of this
consumer mean nothing any more: a new one takes its place."""
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
"""Numbers of the protocol's `ServerError`, as the client raises them."""

OnMalformed = Callable[[Place, bytes, str], None]

logger = logging.getLogger(__name__)


class EntryReader:
    """Reads messages behind an entry, in the order they were written.

    A message that was sent in chunks comes with its last one. After a loss of the connection some
    may come again.

    Args:
        connect: opens a session with the cluster.
        topic: without partitions, or a partition.
        partition: its index; -1 for a topic without.
        after: the entry behind which to begin; an entry of -1 is before the first of its ledger.
        name: of the subscription that the broker shows while the reader is open.
        on_malformed: called with an entry that is passed over as `stored` refuses it: its place,
            its bytes, and why.
        ahead: at most so many messages are sent before they are read, but for those of a batch.
        compacted: see `frames.subscribe`.
        max_content: see `StoredEntry.of`.

    Raises:
        pulsar.PulsarException: as the client, if the broker can't be reached, or refuses.
    """

    def __init__(  # noqa: PLR0913  one topic, and how to read it
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
    ) -> None:
        self._max_content = max_content
        self._connect, self._topic, self._partition = connect, topic, partition
        self._name, self._ahead, self._compacted = name, ahead, compacted
        self._on_malformed = on_malformed
        self._after = after
        """The last entry that was read."""
        self._received = after
        self._incoming: deque[Command] = deque()
        self._messages: deque[ReadMessage] = deque()
        self._chunks = ChunksRead()
        self._permits = 0
        with _as_of_client():
            self._open()

    def read_next(self, timeout_millis: int) -> ReadMessage:
        """Return the next message.

        Raises:
            pulsar.Timeout: none came in time, or the broker is away.
        """
        deadline = time.monotonic() + timeout_millis / 1_000
        while not self._messages:
            try:
                if not self._incoming:
                    self._receive(max(0.0, deadline - time.monotonic()))
                if self._incoming:
                    self._take(self._incoming.popleft())
                elif time.monotonic() >= deadline:
                    raise pulsar.Timeout("no message came in time")
            except ProtocolError as error:
                self._open_again(error, deadline)
        return self._messages.popleft()

    def has_message_available(self) -> bool:
        """Return True if the topic holds an entry that the broker has not sent yet.

        Raises:
            pulsar.PulsarException: the broker is away.
        """
        return bool(self._incoming or self._messages) or self.last_entry() > self._received

    def last_entry(self) -> Place:
        """Return the last entry that may be read: none of a transaction that is open.

        Raises:
            pulsar.PulsarException: the broker is away.
        """
        with _as_of_client():
            answer = self._connection.ask(
                lambda request: frames.last_message_id(request, _NUMBER),
                frames.LAST_MESSAGE_ID_RESPONSE,
            )
            return read_place(answer.nested.get(1, b""))

    def close(self) -> None:
        """Close it, and its connections."""
        self._session.close()

    def _open(self) -> None:
        session = self._connect()
        try:
            self._connection = session.connection_for(self._topic)
            self._connection.ask(
                lambda request: frames.subscribe(
                    self._topic,
                    request,
                    _NUMBER,
                    self._name,
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
        """Connect again, until *deadline*; what was read is kept, chunks too.

        Raises:
            pulsar.Timeout: the broker is away.
        """
        logger.info("reading %s again: %s", self._topic, trouble)
        self._session.close()
        self._incoming.clear()  # it comes again
        while True:
            try:
                self._open()
            except (ProtocolError, RedriveError) as error:  # credentials may not be renewed now
                left = deadline - time.monotonic()
                time.sleep(max(0.0, min(RETRY_SECONDS, left)))
                if left <= RETRY_SECONDS:
                    raise pulsar.Timeout(f"the broker is away: {error}") from error
            else:
                return

    def _receive(self, seconds: float) -> None:
        """Receive entries; wait for so many seconds where none is there yet."""
        connection = self._connection
        free = self._ahead - self._permits
        if free >= max(1, self._ahead // 2):
            connection.post(frames.flow(_NUMBER, free))
            self._permits += free
        for command in connection.read(seconds, READ_BYTES):
            if command.kind == frames.CLOSE_CONSUMER:
                raise ProtocolError("the broker has closed the reader")
            if command.kind == frames.MESSAGE:
                self._incoming.append(command)
        if time.monotonic() - connection.heard > SILENT_SECONDS:
            raise ProtocolError(f"nothing came from the broker for {SILENT_SECONDS:g} s")

    def _take(self, command: Command) -> None:
        """Read an entry, and take in the messages that are whole with it."""
        place = entry_place(command)
        self._received = place
        counted = 1
        try:
            entry = StoredEntry.read(command.entry)
            counted = entry.messages
            chunk = entry.chunk
            if chunk is None:
                self._messages += entry.of(
                    entry.content, (place,), self._partition, self._max_content
                )
            elif (whole := self._chunks.add(chunk, place, entry.content)) is not None:
                self._messages += entry.of(
                    whole.content, whole.entries, self._partition, self._max_content
                )
        except MalformedEntryError as error:
            logger.warning("passing over %s of %s: %s", place, self._topic, error)
            if self._on_malformed is not None:
                self._on_malformed(place, command.entry, str(error))
        self._permits -= counted
        self._after = place
        if not 0 <= counted <= MAX_COUNTED:
            raise ProtocolError(f"the broker counts an entry as {counted} messages")


class MissingChunkError(MalformedEntryError):
    """The chunks before this one did not come; nothing is wrong with the entry."""


class WholeMessage(NamedTuple):
    """The entries of all chunks of a message, and its content."""

    entries: tuple[Place, ...]
    content: bytes


class _Parts:
    """The first chunks of a message."""

    def __init__(self, first: Chunk) -> None:
        self.first = first
        self.entries: list[Place] = []
        self.contents: list[bytes] = []
        self.size = 0


class ChunksRead:
    """Puts messages together from their chunks; those of several may be mixed. Pure.

    Of those that are not whole it keeps `stored.MAX_CONTENT` bytes, the latest.
    """

    def __init__(self) -> None:
        self._parts: dict[bytes, _Parts] = {}
        self._size = 0

    def add(self, chunk: Chunk, entry: Place, content: bytes) -> WholeMessage | None:
        """Take in a chunk, and return the message that is whole with it.

        A chunk that came before is passed over: producers send again what has no receipt.

        Raises:
            MalformedEntryError: it does not follow on the one before it, or is too large.
        """
        if not chunk.part:
            self._drop(chunk.uuid)
            self._parts[chunk.uuid] = _Parts(chunk)
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
            raise MalformedEntryError(f"{size} bytes up to {chunk}, behind {part} chunks")
        parts.entries.append(entry)
        parts.contents.append(content)
        parts.size, self._size = size, self._size + len(content)
        if is_last:
            self._drop(chunk.uuid)
            return WholeMessage(tuple(parts.entries), b"".join(parts.contents))
        while self._size > MAX_CONTENT:
            self._drop(next(iter(self._parts)))
        return None

    def _drop(self, uuid: bytes) -> None:
        if (parts := self._parts.pop(uuid, None)) is not None:
            self._size -= parts.size


@contextmanager
def _as_of_client() -> Iterator[None]:
    """Raise what the client raises where the protocol refuses."""
    try:
        yield
    except ProtocolError as error:
        kind = pulsar.ConnectError if error.code is None else _REFUSALS.get(error.code)
        raise (kind or pulsar.UnknownError)(str(error)) from error


def entry_place(message: Command) -> Place:
    """Return where the entry of a MESSAGE lies.

    Raises:
        ProtocolError: it does not say.
    """
    return read_place(message.nested.get(2, b""))


def read_place(message_id: bytes) -> Place:
    """Read a MessageIdData.

    Raises:
        ProtocolError: it is something else.
    """
    try:
        numbers, _ = decode_fields(message_id)
    except ValueError as error:
        raise ProtocolError(f"no message id: {message_id.hex()}") from error
    return to_signed(numbers.get(1, 0)), to_signed(numbers.get(2, 0))
