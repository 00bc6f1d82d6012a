"""Messages of a topic between two entries, in the order they were written.

Reading takes nothing away: it goes around the subscription, which the messages stay in. A message
that was sent in chunks comes with its last one, if the reading began before its first. What the
broker holds and a client can't show, such as the parts of an unfinished one, does not come.

Entries that no message came of are read once more, from before their chunks; what comes then comes
late.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Self

import pulsar

from redrive.admin.errors import AdminError
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker
from redrive.reading.entries import EntryReader
from redrive.reading.positions import EntryId
from redrive.reading.ranges import (
    LOOK_BACK,
    Partition,
    Range,
    Span,
    look_back,
    spans_hold,
    spans_of_entries,
    spans_without,
)
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import MAX_CONTENT, ReadMessage

POLL_MILLISECONDS = 2_000
SILENCE_SECONDS = 300.0
"""So long a broker may deliver nothing of what it holds, as while it is restarted."""
HELD_BACK_POLLS = 4
"""So many polls in a row may find that the broker makes no more entries readable."""
PREFETCH_BYTES = 16 * 2**20
MIN_PREFETCH = 10
"""A client that has room for one message never puts chunks together."""
MAX_PREFETCH = 1_000


class ReadableTopic(NamedTuple):
    """A topic, and what it is read with.

    Attributes:
        client: stays open meanwhile.
        topic: the partitioned topic, or one without partitions.
        read_through: as that of `snapshot`, which it is with the credentials of a job; None where
            only the binary protocol is used.
        open_seconds: so long the opening of a reader is tried again, see `broker.waited`.
        silence_seconds: time without a message after which a reading ends.
        max_content: see `StoredEntry.of`.
    """

    client: broker.ReadingClient
    admin_url: str
    topic: TopicName
    read_through: Callable[[str, TopicName, str], EntryId | None] | None = broker.read_through
    open_seconds: float = broker.WAIT_SECONDS
    silence_seconds: float = SILENCE_SECONDS
    max_content: int = MAX_CONTENT


class SourceSilentError(RedriveError):
    """The broker holds messages of the run and does not deliver them."""

    reason = "SourceSilent"


class TransactionOpenError(RedriveError):
    """A transaction is open in a topic, and the broker delivers nothing from behind its start."""

    reason = "TransactionOpen"

    @classmethod
    def on(cls, topic: TopicName) -> Self:
        """Return the error of *topic*, or of one partition."""
        return cls(
            f"a transaction is open in {topic}, and until it ends the broker delivers no message "
            "from behind its first one",
            remedy="commit or abort it, or wait for its timeout; then another Replay goes on from "
            "what was moved",
        )


def prefetch(average_bytes: float) -> int:
    """Return how many messages of this size to have the broker send ahead."""
    return max(MIN_PREFETCH, min(MAX_PREFETCH, int(PREFETCH_BYTES / max(1.0, average_bytes))))


def read_messages(  # noqa: PLR0913, PLR0917  one each
    of: ReadableTopic,
    partition: int,
    after: EntryId,
    wanted: Sequence[Span],
    ahead: int,
    lost: list[Span] | None = None,
) -> Iterator[ReadMessage]:
    """Read messages of one partition, each once.

    Args:
        of: the topic.
        partition: its index, `broker.UNPARTITIONED` where there is none.
        after: the entry behind which the reading begins.
        wanted: up to the last of which it goes, in order. Those that no message comes of are read
            again; of others all comes that a first reader delivers.
        ahead: how many messages are prefetched, see `prefetch`.
        lost: takes in what a first reader did not deliver of *wanted*.

    Raises:
        ReplayRoleRefusedError: the broker does not let the role read.
        SourceSilentError: it stops delivering before the end.
        TransactionOpenError: a transaction holds it back.
    """
    # `map` holds no message while the next one is decompressed.
    return map(attrgetter("message"), _received(of, partition, after, wanted, ahead, lost))


class _Received(NamedTuple):
    """A message, and its entry."""

    at: EntryId
    message: ReadMessage


def _received(  # noqa: PLR0913, PLR0917  as `messages`
    of: ReadableTopic,
    partition: int,
    after: EntryId,
    wanted: Sequence[Span],
    ahead: int,
    lost: list[Span] | None = None,
) -> Iterator[_Received]:
    if not wanted:
        return
    seen = _Seen()
    yield from _read(of, partition, (after, wanted[-1].end), ahead, seen)
    missing = spans_without(wanted, seen.spans)
    if lost is not None:
        lost += missing
    if missing:
        first = missing[0]
        if first.first > LOOK_BACK:
            after = max(after, EntryId(first.ledger, first.first - LOOK_BACK - 1))
        for received in _read(of, partition, (after, missing[-1].end), ahead, _Seen()):
            if spans_hold(missing, received.at):
                yield received
            del received  # before the next one is decompressed


class _Seen:
    """The entries that a reader has delivered, in order.

    Those in the midst of a message are not among them: others may lie between its chunks.
    """

    def __init__(self) -> None:
        self._runs: list[list[int]] = []
        self._run = [-1, 0, -1]

    @property
    def spans(self) -> list[Span]:
        return [Span(*run) for run in self._runs]

    def add(self, entries: Sequence[tuple[int, int]]) -> None:
        """Take in the last entry of a message, and that of its first chunk if it lies before it."""
        ledger, entry = entries[-1]
        of, _, last = self._run
        if ledger != of or entry > last + 1:
            alone = entries[0] != (ledger, entry - 1)
            first = entry if alone else entry - 1
            if ledger != of or first > last + 1:
                self._run = [ledger, first, entry]
                self._runs.append(self._run)
        self._run[2] = entry


def _read(
    of: ReadableTopic,
    partition: int,
    bounds: tuple[EntryId, EntryId],
    ahead: int,
    seen: _Seen,
) -> Iterator[_Received]:
    """Read what one reader delivers from behind an entry up to another; *seen* takes note of it."""
    after, last = bounds
    topic = broker.partition_of(of.topic, partition)
    name = f"redrive-{secrets.token_hex(8)}"

    def open_reader() -> EntryReader:
        return of.client.open_entry_reader(
            of.topic, partition, after, name=name, ahead=ahead, max_content=of.max_content
        )

    doing = f"open a reader on {topic}"
    reader = broker.opened(doing, "consume", open_reader, of.open_seconds)

    def is_through() -> bool:
        """Whether the broker has sent all that is to be read, shown by the client or not.

        A client says as well that nothing is available where a transaction is open before it.
        """
        if of.read_through is None:
            return not reader.has_message_available()
        sent = of.read_through(of.admin_url, topic, name)
        return sent is not None and sent >= last

    newest = *after, math.inf
    try:
        while (message := _next(reader, topic, last, is_through, of.silence_seconds)) is not None:
            place = message.place
            at = EntryId(*place.entries[-1])
            if at > last:
                return
            # One that is connected again, or begins behind a batch, may repeat some.
            position = *at, place.batch_index
            if position > newest:
                newest = position
                seen.add(place.entries)
                yield _Received(at, message)
            if at == last and place.batch_index + 1 in {0, place.batch_size}:
                return
            del message  # before the next one is decompressed
    finally:
        broker.close(reader)


def read_entries(
    topic: ReadableTopic, of: Range, entries: int, after: EntryId, ahead: int
) -> Iterator[DeadLetterRow]:
    """Read all messages of some entries of a range, as `messages` does.

    Args:
        topic: of which it is a range.
        of: the range.
        entries: a bitmap.
        after: behind which entry to begin: see `begin`.
        ahead: see `prefetch`.
    """
    offsets = list(bitmap.members(entries))
    there = spans_of_entries(of.ledger, (of.first + offset for offset in offsets))
    wanted = frozenset(offsets)
    for (ledger, entry), message in _received(topic, of.partition, after, there, ahead):
        if ledger == of.ledger and entry - of.first in wanted:
            yield DeadLetterRow.of(message, of.partition)
        del message  # before the next one is decompressed


def chunks_of_whole(
    topic: ReadableTopic, partition: Partition, of: Range, entries: int
) -> Iterator[Sequence[EntryId]]:
    """Yield the entries of each message in chunks that has some among *entries*, a bitmap.

    It looks for the others as far behind them as whoever moves the next range looks back: such a
    message may end there.
    """
    last = of.entry_id(entries.bit_length() - 1)
    after = look_back(partition, of.entry_id(bitmap.lowest(entries)))
    wanted, room = [], LOOK_BACK
    for span in partition.behind(after):
        behind = span.size if span.ledger > last.ledger else span.last - last.entry
        if span.ledger >= last.ledger and behind > 0:
            wanted.append(span._replace(last=span.last - max(0, behind - room)))
            room -= min(room, behind)
            if not room:
                break
        else:
            wanted.append(span)
    ahead = prefetch(partition.entry_bytes)
    for message in read_messages(topic, of.partition, after, wanted, ahead):
        whole = [EntryId(*each) for each in message.place.entries]
        if len(whole) > 1 and any(
            at.ledger == of.ledger
            and of.first <= at.entry <= of.last
            and bitmap.contains(entries, at.entry - of.first)
            for at in whole
        ):
            yield whole


def first_entry(of: Range, entries: int, chunks: Mapping[int, EntryId]) -> EntryId:
    """Return behind which entry lies all of some entries of a range, a bitmap.

    Args:
        of: the range.
        entries: not empty.
        chunks: offset → the first chunk of the message that ends there.
    """
    first = of.entry_id(bitmap.lowest(entries))
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
    """Return the next message, None where nothing is left to come."""
    deadline = time.monotonic() + silence
    through, held_back = False, 0
    while True:
        try:
            return reader.read_next(POLL_MILLISECONDS)
        except pulsar.Timeout:
            pass
        try:
            # A message of which chunks are missing never comes, as when its producer was killed.
            # Twice: what the broker has just sent may be under way.
            before, through = through, is_through()
            if before and through:
                return None
            # The last entry that may be read lies before an open transaction.
            is_held_back = not (through or reader.has_message_available())
            held_back = held_back + 1 if is_held_back else 0
            if held_back == HELD_BACK_POLLS:
                raise TransactionOpenError.on(topic)
        except (pulsar.PulsarException, AdminError) as error:  # the broker is away
            if time.monotonic() > deadline:
                raise _silent(last, silence) from error
            time.sleep(1)
        if time.monotonic() > deadline:
            raise _silent(last, silence)


def _silent(last: EntryId, silence: float) -> SourceSilentError:
    return SourceSilentError(
        f"the broker has delivered nothing for {silence:g} s, although there is more up to {last}",
        remedy="the job is started again by itself; look into the broker's log if it stays",
    )
