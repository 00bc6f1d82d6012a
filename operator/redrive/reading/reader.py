"""Messages of a topic between two entries, in the order in which they were written.

Reading does not use the subscription, so it acknowledges no messages. A chunked message is returned
with its last chunk, if reading began before its first. Unreadable entries, such as chunks of an
incomplete message, are not returned.

Entries without a message are read a second time, from before their chunks. Messages of the second
reading are returned at the end.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import pulsar

from redrive.admin.errors import AdminError
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges
from redrive.reading.entries import EntryReader, OnChunk
from redrive.reading.positions import EntryId
from redrive.reading.stored import MAX_READ_CONTENT, ReadMessage

POLL_MILLISECONDS = 2_000
SILENCE_SECONDS = 300.0
"""Longest time without a message, for example during a restart of the broker."""
RENEW_SECONDS = 30.0
"""Time without a message after which the reader connects again: its permits may be lost, or its
subscription deleted by the broker together with that of an earlier connection."""
HELD_BACK_POLLS = 4
"""Number of polls in a row without readable entries, after which a transaction is open."""
PREFETCH_BYTES = 16 * 2**20
FAR = 10_000
"""Entries before and after a chunk in which the others of its message are searched."""
MIN_PREFETCH = 10
"""Smallest prefetch: a client with room for one message cannot assemble chunks."""
MAX_PREFETCH = 1_000


class ReadableTopic(NamedTuple):
    """A topic, and the connections to read it.

    Attributes:
        client: open during the reading.
        topic: a partitioned or an unpartitioned topic.
        read_through: as `broker.read_through`, which uses the credentials of a job; None to use
            only the binary protocol.
        open_seconds: time for which opening a reader is repeated, see `broker.waited`.
        silence_seconds: time without a message after which a reading ends.
        max_content: see `StoredEntry.of`.
    """

    client: broker.ReadingClient
    admin_url: str
    topic: TopicName
    read_through: Callable[[str, TopicName, str], EntryId | None] | None = broker.read_through
    open_seconds: float = broker.WAIT_SECONDS
    silence_seconds: float = SILENCE_SECONDS
    max_content: int = MAX_READ_CONTENT


class SourceSilentError(RedriveError):
    """The broker has messages of the run, but does not deliver them."""

    reason = "SourceSilent"


def transaction_open(topic: TopicName) -> RedriveError:
    """Return the error of *topic*, or one partition, in which a transaction blocks the delivery."""
    return RedriveError(
        f"a transaction is open in {topic}, and until it ends the broker delivers no message "
        "after its first one",
        remedy="commit or abort it, or wait for its time-out, and start again; another Replay "
        "continues after the moved messages",
        reason="TransactionOpen",
    )


def prefetch(average_bytes: float) -> int:
    """Return the number of messages of this size to prefetch."""
    return max(MIN_PREFETCH, min(MAX_PREFETCH, int(PREFETCH_BYTES / max(1.0, average_bytes))))


def read_messages(  # noqa: PLR0913, PLR0917  one each
    source: ReadableTopic,
    partition: int,
    after: EntryId,
    wanted: Sequence[ranges.Span],
    ahead: int,
    lost: list[ranges.Span] | None = None,
) -> Iterator[ReadMessage]:
    """Read messages of one partition, each once.

    Args:
        source: the topic.
        partition: its index; `broker.UNPARTITIONED` for an unpartitioned topic.
        after: entry after which reading begins.
        wanted: spans in order; reading ends with the last. Entries of them without a message are
            read again. Other messages in between are returned too.
        ahead: number of messages to prefetch, see `prefetch`.
        lost: is extended by the entries of *wanted* without a message in the first reading.

    Raises:
        ReplayRoleRefusedError: the role may not read.
        SourceSilentError: the broker stops delivering before the end.
        RedriveError: a transaction blocks the delivery.
    """
    if not wanted:
        return
    seen = _Seen()
    yield from _read(source, partition, (after, wanted[-1].end), ahead, seen)
    missing = ranges.spans_without(wanted, seen.spans)
    if lost is not None:
        lost += missing
    if missing:
        first = missing[0]
        if first.first > ranges.LOOK_BACK:
            after = max(after, EntryId(first.ledger, first.first - ranges.LOOK_BACK - 1))
        for message in _read(source, partition, (after, missing[-1].end), ahead, _Seen()):
            if ranges.spans_hold(missing, EntryId(*message.place.entries[-1])):
                yield message
            del message  # before the next one is decompressed


class _Seen:
    """Entries that a reader has delivered, in order.

    Chunks in the middle of a message are not included, because others may be between them.
    """

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        self._run = [-1, 0, -1]

    @property
    def spans(self) -> list[ranges.Span]:
        return [ranges.Span(*run) for run in self._runs]

    def add(self, entries: Sequence[tuple[int, int]]) -> None:
        """Add the last entry of a message, and the first chunk if it is directly before it."""
        ledger, entry = entries[-1]
        current, _, last = self._run
        if ledger != current or entry > last + 1:
            alone = entries[0] != (ledger, entry - 1)
            first = entry if alone else entry - 1
            if ledger != current or first > last + 1:
                self._run = [ledger, first, entry]
                self._runs.append(self._run)
        self._run[2] = entry


def _read(  # noqa: PLR0913, PLR0917  one each
    source: ReadableTopic,
    partition: int,
    bounds: tuple[EntryId, EntryId],
    ahead: int,
    seen: _Seen,
    on_chunk: OnChunk | None = None,
) -> Iterator[ReadMessage]:
    """Read the messages after an entry up to another with one reader, and add them to *seen*."""
    after, last = bounds
    topic = broker.partition_of(source.topic, partition)
    name = f"redrive-{secrets.token_hex(8)}"

    def open_reader() -> EntryReader:
        return source.client.open_entry_reader(
            source.topic,
            partition,
            after,
            name=name,
            ahead=ahead,
            max_content=source.max_content,
            on_chunk=on_chunk,
        )

    doing = f"open a reader on {topic}"
    reader = broker.opened(doing, "consume", open_reader, source.open_seconds)

    def is_through() -> bool:
        """Return True if the broker has sent all entries to read, even unreadable ones.

        A client also reports no available message while an earlier transaction is open.
        """
        if source.read_through is None:
            return not reader.has_message_available()
        sent = source.read_through(source.admin_url, topic, name)
        return sent is not None and sent >= last

    newest = *after, math.inf
    try:
        while (
            message := _next(reader, topic, last, is_through, source.silence_seconds)
        ) is not None:
            place = message.place
            at = place.entries[-1]
            if at > last:
                return
            # After a reconnect, or within a batch, messages may be repeated.
            position = *at, place.batch_index
            if position > newest:
                newest = position
                seen.add(place.entries)
                yield message
            if at == last and place.batch_index + 1 in {0, place.batch_size}:
                return
            del message  # before the next one is decompressed
    finally:
        broker.close(reader)


def read_entries(
    topic: ReadableTopic, piece: ranges.Range, entries: int, after: EntryId, ahead: int
) -> Iterator[ReadMessage]:
    """Read all messages of some entries of a range, like `read_messages`.

    Args:
        topic: topic of the range.
        piece: the range.
        entries: a bitmap.
        after: entry after which to begin, see `first_entry`.
        ahead: see `prefetch`.
    """
    return read_ranges(topic, {piece: entries}, after, ahead)


def read_ranges(
    topic: ReadableTopic, pieces: Mapping[ranges.Range, int], after: EntryId, ahead: int
) -> Iterator[ReadMessage]:
    """Read all messages of some entries of ranges of one partition; see `read_entries`.

    Args:
        topic: topic of the ranges.
        pieces: bitmap of entries for each range, in order.
        after: entry after which to begin.
        ahead: see `prefetch`.
    """
    spans: list[ranges.Span] = []
    wanted: dict[int, set[int]] = {}
    for piece, entries in pieces.items():
        numbers = [piece.first + offset for offset in bitmap.members(entries)]
        spans += ranges.spans_of_entries(piece.ledger, numbers)
        wanted.setdefault(piece.ledger, set()).update(numbers)
    index = next(iter(pieces)).partition
    for message in read_messages(topic, index, after, spans, ahead):
        ledger, entry = message.place.entries[-1]
        if entry in wanted.get(ledger, ()):
            yield message
        del message  # before the next one is decompressed


class MessagesByRange:
    """Messages of several ranges that are read together, by range.

    Args:
        messages: messages as by `read_ranges`.
    """

    def __init__(self, messages: Generator[ReadMessage]) -> None:
        self._messages = messages
        self._next: ReadMessage | None = None

    def of(self, piece: ranges.Range) -> Iterator[ReadMessage]:
        """Yield the messages of a range; call it once for each range, in order.

        Some may be missing, for example those of a second reading.
        """
        message, self._next = self._next, None
        while (message := message or next(self._messages, None)) is not None:
            place = message.place.entries[-1]
            if place > (piece.ledger, piece.last):
                self._next = message
                return
            if place >= (piece.ledger, piece.first):
                yield message
            message = None  # before the next one is decompressed

    def close(self) -> None:
        """Close the reader."""
        self._messages.close()


def chunks_of_whole(
    topic: ReadableTopic,
    partition: ranges.Partition,
    piece: ranges.Range,
    entries: int,
    on_read: Callable[[], object] | None = None,
) -> Iterator[Sequence[EntryId]]:
    """Yield the entries of each readable chunked message that has chunks among *entries*, a bitmap.

    It reads `LOOK_BACK` entries before and after them. If some of them are other chunks, it reads
    `FAR` entries before and after these. With *on_read* it then reads the whole partition.

    Args:
        topic: topic of the range.
        partition: current state of the partition.
        piece: the range.
        entries: a bitmap that is not empty.
        on_read: called with each message that is read.
    """
    positions, ahead = topic._replace(max_content=0), prefetch(partition.entry_bytes)
    everything = sum(size for _, size in partition.ledgers)
    for reach in (ranges.LOOK_BACK, FAR) if on_read is None else (FAR, everything):
        after = ranges.look_back(partition, piece.entry_id(bitmap.lowest(entries)), reach)
        last = ranges.look_ahead(partition, piece.entry_id(bitmap.highest(entries)), reach)
        chunks = list[tuple[int, int]]()
        for message in _read(
            positions, piece.partition, (after, last), ahead, _Seen(), chunks.append
        ):
            if on_read is not None:
                on_read()
            whole = [EntryId(*entry) for entry in message.place.entries]
            held = piece.offsets(whole)
            is_new = len(whole) > 1 and bool(held & entries)
            if is_new and _is_readable(topic, piece.partition, whole, ahead):
                entries &= ~held
                yield whole
        entries &= piece.offsets(chunks)
        if not entries or reach >= everything:
            return


def _is_readable(
    topic: ReadableTopic, partition: int, chunks: Sequence[EntryId], ahead: int
) -> bool:
    """Return True if a reader that begins before the first of *chunks* yields their message."""
    first, last = chunks[0], chunks[-1]
    after = EntryId(first.ledger, first.entry - 1)
    messages = _read(topic, partition, (after, last), ahead, _Seen())
    return any(message.place.entries[-1] == last for message in messages)


def first_entry(piece: ranges.Range, entries: int, chunks: Mapping[int, EntryId]) -> EntryId:
    """Return the entry before all of some entries of a range, a bitmap, and their first chunks.

    Args:
        piece: the range.
        entries: a bitmap that is not empty.
        chunks: first chunk of the message that ends at an offset.
    """
    first = piece.entry_id(bitmap.lowest(entries))
    firsts = (chunk for offset, chunk in chunks.items() if bitmap.contains(entries, offset))
    ledger, entry = min([first, *firsts])
    return EntryId(ledger, entry - 1)


def _next(
    reader: EntryReader,
    topic: TopicName,
    last: EntryId,
    is_through: Callable[[], bool],
    silence: float,
) -> ReadMessage | None:
    """Return the next message; None at the end."""
    try:
        return reader.read_next(POLL_MILLISECONDS)
    except pulsar.Timeout:
        pass  # no clock is read before
    deadline = time.monotonic() + silence
    renewal = time.monotonic() + RENEW_SECONDS
    through, held_back = False, 0
    while True:
        try:
            # An incomplete chunked message is never delivered.
            # Checked twice: messages that the broker has sent may not have arrived.
            before, through = through, is_through()
            if before and through:
                return None
            # The last readable entry is before an open transaction.
            is_held_back = not (through or reader.has_message_available())
            held_back = held_back + 1 if is_held_back else 0
            if held_back == HELD_BACK_POLLS:
                raise transaction_open(topic)
            if not through and time.monotonic() > renewal:
                reader.renew()
                renewal = time.monotonic() + RENEW_SECONDS
        except (pulsar.PulsarException, AdminError) as error:  # the broker is unreachable
            if time.monotonic() > deadline:
                raise _silent(last, silence) from error
            time.sleep(1)
        if time.monotonic() > deadline:
            raise _silent(last, silence)
        with suppress(pulsar.Timeout):
            return reader.read_next(POLL_MILLISECONDS)


def _silent(last: EntryId, silence: float) -> SourceSilentError:
    return SourceSilentError(
        f"the broker has delivered no message for {silence:g} s, but there are more up to {last}",
        remedy="the job restarts automatically; read the broker's log if the problem continues",
    )
