"""Messages of a dead-letter topic, or of a retry topic, at a broker of any kind.

A source plans a reading of a fixed extent. Reading is by position: it acknowledges nothing, and it
does not disturb consumers or Replays. Messages come in the order they were written, partition by
partition.

A topic of Pulsar has the messages that a subscription has not acknowledged; memory holds one at a
time. `inspection.rocketmq` reads topics of RocketMQ.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from redrive.admin.errors import AdminForbiddenError, AuthenticationFailedError
from redrive.auth.files import BrokerCredentials
from redrive.errors import RedriveError
from redrive.inspection.payloads import AvroSchema
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.broker import ReplayRoleRefusedError
from redrive.reading.positions import EntryId
from redrive.reading.ranges import Partition, Piece
from redrive.reading.reader import ReadableTopic, SourceSilentError
from redrive.reading.rows import DeadLetterRow
from redrive.reading.session import ProtocolError, Session
from redrive.replay.spec import Choice, Chooser, FailureCause

NEWEST = 10_000
"""Entries that are read unless all are asked for."""
MAX_BYTES = 256 * 2**20
"""About so many bytes are read then."""
OPEN_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""Time without a message after which a reading fails, such as of a topic that was deleted."""
MAX_SCHEMAS = 100
MAX_MALFORMED = 100


class MessageSource(Protocol):
    """Messages of one topic at a broker of any kind."""

    def plan(self, choice: Choice, newest: int | None, max_bytes: int | None) -> MessageReading:
        """Look at the topic, and decide what to read of it.

        Args:
            choice: the selection, but for its limit.
            newest: number of entries to read, the newest ones of each partition; None for all.
            max_bytes: about so many bytes are read, if the broker shows sizes; None for any.

        Raises:
            AdminError: the topic does not exist, or the broker does not answer.
            RedriveError: the broker refuses, or can't evaluate the selection.
        """


class ReadTopic(Protocol):
    """Topic of a reading."""

    @property
    def name(self) -> object:
        """Return its name, as text shows it."""


@dataclass
class MessageReading(ABC):
    """One reading of a topic, and its progress.

    Attributes:
        topic: the topic.
        total: entries that are kept for the subscription.
        planned: entries of these that are read.
        is_truncated: True if older ones are not read.
        entries: entries that were read so far.
        messages: messages that were read so far; an entry may hold several, or a part of one.
        matched: messages of these that are selected.
        malformed_entries: number of entries of these that no client can show.
    """

    topic: ReadTopic
    total: int
    planned: int
    is_truncated: bool = False
    entries: int = 0
    messages: int = 0
    matched: int = 0
    malformed_entries: int = 0

    @abstractmethod
    def schema(self, version: int | None) -> AvroSchema | None:
        """Return a version of the topic's schema, if it is Avro; asks once for each."""

    @abstractmethod
    def selected(self, on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        """Yield the selected messages, the oldest of each partition first. Iterate once.

        Args:
            on_read: called after each message, selected or not; its error ends the reading.

        Raises:
            RedriveError: the broker refuses, or stops delivering before the end, as behind an open
                transaction.
        """


@dataclass(frozen=True)
class InspectedTopic:
    """A topic, the subscription that keeps its messages, and the caller's access to the broker.

    Attributes:
        name: the topic, without a partition.
        service_url: address of the binary protocol.
        admin_url: address of the admin REST API.
    """

    name: TopicName
    subscription: str
    service_url: str
    admin_url: str
    credentials: BrokerCredentials = field(repr=False)

    def plan(
        self, choice: Choice, newest: int | None = NEWEST, max_bytes: int | None = MAX_BYTES
    ) -> TopicReading:
        """Plan a reading, see `MessageSource`.

        Entries that ids name are read wherever they lie. Bytes are estimated by the average size of
        entries.
        """
        try:
            partitions = broker.read_partitions(
                self.admin_url, self.name, self.subscription, self.credentials
            )
        except (AuthenticationFailedError, AdminForbiddenError) as error:
            raise _unreadable(self, str(error)) from error
        pieces = [list(ranges.cut(partition, partition.end)) for partition in partitions]
        total = sum(map(_entries_of, pieces))
        chooser = Chooser(choice)
        if choice.ids:
            newest = None
        planned = []
        for partition, own, most in zip(
            partitions, pieces, _shares(partitions, pieces, newest, max_bytes), strict=True
        ):
            for piece in _newest(partition, own, most):
                narrowed = ranges.narrowed(piece, partition, chooser.entries(piece.range))
                if narrowed is not None:
                    planned.append((partition, narrowed))
        count = _entries_of([piece for _, piece in planned])
        is_truncated = not choice.ids and count < total
        return TopicReading(self, total, count, is_truncated, pieces=planned, _chooser=chooser)

    def schema(self, version: int) -> AvroSchema | None:
        """Return a version of the topic's schema; None if it is not Avro, or does not exist."""
        try:
            with closing(Session[None](self.service_url, self.credentials.protocol())) as session:
                return AvroSchema.of_protocol(session.schema(str(self.name), version))
        except (ProtocolError, ValueError):
            return None


class MalformedEntry(NamedTuple):
    """An entry that no client can show.

    Attributes:
        partition: of the topic; -1 if it has none.
        cause: problem of the entry.
    """

    partition: int
    entry: EntryId
    cause: str


@dataclass
class TopicReading(MessageReading):
    """One reading of a topic of Pulsar.

    Attributes:
        topic: the topic.
        malformed: the first entries of those that no client can show.
        pieces: partitions, and ranges of them with the entries that are read.
    """

    topic: InspectedTopic
    malformed: list[MalformedEntry] = field(default_factory=list)
    pieces: Sequence[tuple[Partition, Piece]] = field(default=(), repr=False)
    _chooser: Chooser = field(default_factory=lambda: Chooser(Choice()), repr=False)
    _schemas: dict[int, AvroSchema | None] = field(default_factory=dict, repr=False)

    def schema(self, version: int | None) -> AvroSchema | None:
        """Return a version of the schema, see `MessageReading`."""
        # Any producer may write any version: beyond `MAX_SCHEMAS` of them none is asked for.
        if version is None:
            return None
        if version not in self._schemas:
            if len(self._schemas) >= MAX_SCHEMAS:
                return None
            self._schemas[version] = self.topic.schema(version)
        return self._schemas[version]

    def selected(self, on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        """Yield the selected messages, see `MessageReading`."""
        topic = self.topic
        with broker.connect(topic.service_url, topic.credentials) as client:
            readable = ReadableTopic(
                client,
                topic.admin_url,
                topic.name,
                functools.partial(broker.read_through, shown=topic.credentials),
                open_seconds=OPEN_SECONDS,
                silence_seconds=SILENCE_SECONDS,
            )
            for partition, piece in self.pieces:
                for row in self._of_piece(readable, partition, piece):
                    on_read()
                    if self._takes(row):
                        self.matched += 1
                        yield row

    def _of_piece(
        self, readable: ReadableTopic, partition: Partition, piece: Piece
    ) -> Iterator[DeadLetterRow]:
        malformed: dict[EntryId, str] = {}

        def take_in(place: tuple[int, int], _stored: bytes, cause: str) -> None:
            malformed[EntryId(*place)] = cause

        readable.client.on_malformed = take_in
        ahead = reader.prefetch(partition.entry_bytes)
        before = self.entries
        try:
            for message in reader.read_entries(
                readable, piece.range, piece.pending, piece.after, ahead
            ):
                row = DeadLetterRow.of(message, partition.index)
                del message
                self.messages += 1
                if row.position.batch_index == 0:
                    self.entries += len(row.chunks) or 1
                yield row
        except ReplayRoleRefusedError as error:
            raise _unreadable(self.topic, str(error.__cause__)) from error
        except SourceSilentError as error:
            raise RedriveError(
                f"the broker has stopped to deliver messages of {self.topic.name}",
                got=f"nothing for {SILENCE_SECONDS:g} s",
                remedy="check whether the topic still exists, and repeat the command",
                reason="TopicUnreadable",
            ) from error
        # Chunks of a message that was never finished came as nothing.
        self.entries = before + piece.pending.bit_count()
        for entry, cause in sorted(malformed.items()):
            offset = entry.entry - piece.range.first
            is_within = entry.ledger == piece.range.ledger and offset >= 0
            if is_within and bitmap.contains(piece.pending, offset):
                self.malformed_entries += 1
                if len(self.malformed) < MAX_MALFORMED:
                    self.malformed.append(MalformedEntry(partition.index, entry, cause))

    def _takes(self, row: DeadLetterRow) -> bool:
        cause = FailureCause.of(row.properties)
        return self._chooser.takes(row.position, row.keys, row.publish_time, cause)


def _entries_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.pending.bit_count() for piece in pieces)


def _shares(
    partitions: Sequence[Partition],
    pieces: Sequence[Sequence[Piece]],
    newest: int | None,
    max_bytes: int | None,
) -> list[int]:
    """Return the number of entries to read of each partition: equal ones, as much as they have."""
    sizes = list(map(_entries_of, pieces))
    if newest is None:
        return sizes
    total = sum(sizes)
    sizes_in_bytes = sum(
        size * partition.entry_bytes for size, partition in zip(sizes, partitions, strict=True)
    )
    if total and max_bytes is not None:
        newest = min(newest, int(max_bytes / max(1, sizes_in_bytes / total)))
    return even_shares(sizes, newest)


def even_shares(sizes: Sequence[int], most: int) -> list[int]:
    """Return shares of *most*: equal ones, but none above its size."""
    shares = [0] * len(sizes)
    for rank, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[index] = min(sizes[index], -(-most // (len(sizes) - rank)))
        most -= shares[index]
    return shares


def _newest(partition: Partition, pieces: Sequence[Piece], most: int) -> list[Piece]:
    """Return the newest entries of some pieces, in their order."""
    chosen: list[Piece] = []
    for piece in reversed(pieces):
        count = piece.pending.bit_count()
        if most <= 0:
            break
        if count > most:
            offsets = list(bitmap.members(piece.pending))[-most:]
            kept = ranges.narrowed(piece, partition, bitmap.of(offsets, piece.range.size))
        else:
            kept = piece
        if kept is not None:
            chosen.append(kept)
        most -= count
    return chosen[::-1]


def _unreadable(topic: InspectedTopic, got: str) -> RedriveError:
    return RedriveError(
        f"{topic.name} can't be read",
        got=got,
        remedy="check the service URL, and use a token whose role may consume the topic, such as "
        "one of deadLetter.readerRoles",
        reason="TopicUnreadable",
    )
