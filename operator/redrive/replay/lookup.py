"""The search for messages in a target that a killed run has sent, and refusals of entries.

Messages that a killed run has sent are found in the target by the source position that they carry.
This is the only evidence that a message was moved: the last sequence id of a broker only shows that
some message with that id or a higher one was stored, and the broker forgets it after some hours.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import pulsar

from redrive.admin.errors import AdminError, AdminForbiddenError, AdminNotFoundError
from redrive.errors import RedriveError
from redrive.messages import SchemaError, WriterSchemas, read_properties
from redrive.policy.envelope import REPLAY_PROOF, REPLAY_SOURCE
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import MAX_BATCH, EntryId, Position, Source, Tail, TargetPartition
from redrive.reading.ranges import Partition, Range, Span
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay.evidence import LedgerKey
from redrive.replay.outcome import RangeOutcome, StoredMessages
from redrive.replay.records import SentTo
from redrive.replay.task import RangeTask

_NOT_SENT = {
    "oversized": "ContentTooLarge",
    "encrypted": "Encrypted",
    "unreadable": "UnreadableProperties",
}
"""Attributes of messages that cannot be moved, and the causes of their refusal."""


class MovableMessage(Protocol):
    """Fields of a message that determine if it can be moved; see `DeadLetterRow`."""

    @property
    def position(self) -> Position:
        """Return its position."""

    @property
    def delivered(self) -> bool:
        """Return True if a client can show it."""

    @property
    def oversized(self) -> bool:
        """Return True if its content is larger than `stored.MAX_READ_CONTENT`."""

    @property
    def encrypted(self) -> bool:
        """Return True if only its readers can decrypt it."""

    @property
    def unreadable(self) -> bool:
        """Return True if a property is not UTF-8."""

    @property
    def batch_size(self) -> int:
        """Return the number of messages in its entry."""

    @property
    def replays(self) -> int:
        """Return the number of its replays."""


_Message = TypeVar("_Message", bound=MovableMessage)


def refusal(entry: Sequence[MovableMessage], selected: int, max_replays: int | None) -> str:
    """Return the cause for which an entry cannot be moved; empty if it can.

    A broker acknowledges entries, not messages. So the next Replay would send the messages of a
    partly moved entry again.

    Args:
        entry: its messages that were read.
        selected: number of selected messages.
        max_replays: number of replays from which messages are refused; None for no limit.
    """
    first = entry[0]
    if not first.delivered:
        return "NotDelivered"
    if first.oversized or first.encrypted or first.unreadable:
        return next(cause for kind, cause in _NOT_SENT.items() if getattr(first, kind))
    if first.batch_size > MAX_BATCH:
        return "BatchTooLarge"
    if not selected == len(entry) == first.batch_size:
        return "PartOfBatch"
    if max_replays is None or max(message.replays for message in entry) < max_replays:
        return ""
    return "ReplayedTooOften"


def schema_refusals(client: pulsar.Client, topic: TopicName) -> Callable[[int | None], str]:
    """Return a function from a version of the schema of *topic* to the cause of a refusal.

    The cause is empty if messages can be sent with that version.
    """
    schemas = WriterSchemas(client)

    @functools.cache
    def refusal(version: int | None) -> str:
        try:
            if version is not None:
                broker.waited(lambda: schemas.get(topic, version))
        except SchemaError as error:
            return error.reason
        return ""

    return refusal


def by_entry(messages: Iterable[_Message]) -> Iterator[list[_Message]]:
    """Group messages by entry."""
    entry: list[_Message] = []
    place = None
    for message in messages:
        # Faster than `entry_id`, which would create a named tuple for each message.
        if entry and message.position[:2] != place:
            yield entry
            entry = []
        if message.batch_size == 1:
            yield [message]
        else:
            place = message.position[:2]
            entry.append(message)
            if len(entry) == message.batch_size:
                yield entry
                entry = []
        del message  # before the next one is decompressed
    if entry:
        yield entry


def read_first(
    entry: Sequence[DeadLetterRow],
    offset: int,
    outcome: RangeOutcome,
    acknowledged: int,
    cause_of: Callable[[Sequence[DeadLetterRow]], str],
) -> bool:
    """Record an entry that is read for the first time; return True if it has to be sent.

    Args:
        entry: all its messages.
        offset: offset of the entry.
        outcome: outcome to which its content and a refusal are added.
        acknowledged: bitmap of entries that are not sent.
        cause_of: function that returns the cause of a refusal; empty without one.
    """
    outcome.read(offset, len(entry), entry[0].first_chunk)
    if bitmap.contains(acknowledged, offset):
        return False
    cause = cause_of(entry)
    if cause:
        outcome.refuse((offset, 0), cause)
    return not cause


WRITE_SECONDS = 300.0
POLL_SECONDS = 0.2


def topic_lost(topic: TopicName, got: object) -> RedriveError:
    """Return the error of a dead-letter topic that was deleted, or recreated."""
    return RedriveError(
        f"cannot read {topic}; it was deleted or recreated, or was empty and was unloaded, or the "
        "replay role lost its rights",
        got=got,
        remedy="check if the topic exists, and its grants; another Replay moves its messages",
        reason="DeadLetterTopicLost",
    )


def read_source(admin_url: str, topic: TopicName, subscription: str, index: int) -> Partition:
    """Return the current state of a partition of the dead-letter *topic*.

    Raises:
        RedriveError: the topic, and so the rights on it, were deleted; or as for
            `broker.read_partition`.
    """
    try:
        return broker.read_partition(admin_url, topic, index, subscription)
    except (AdminNotFoundError, AdminForbiddenError) as error:
        raise topic_lost(topic, error) from error


def target_ends(admin_url: str, target: TopicName) -> dict[TargetPartition, EntryId]:
    """Return the last entry of each partition of *target*.

    Raises:
        AdminError: the broker refuses.
    """
    partitions = broker.read_partitions(admin_url, target)
    return {TargetPartition(target, partition.index): partition.tail for partition in partitions}


def target_partitions(admin_url: str, target: TopicName) -> frozenset[TargetPartition]:
    """Return the partitions of *target*; none if it, and so the rights on it, were deleted.

    Raises:
        AdminError: the broker does not answer.
    """
    try:
        return frozenset(broker.waited(lambda: target_ends(admin_url, target)))
    except (AdminNotFoundError, AdminForbiddenError):
        return frozenset()


def wait_for_writes(admin_url: str, place: TargetPartition) -> None:
    """Wait until the broker has written all messages that it has received for a partition.

    Writes are ordered, and may be pending for minutes while the storage does not answer. Requests
    are repeated while the broker restarts.

    Raises:
        AdminError: the broker refuses, or does not answer for `WRITE_SECONDS`.
        RedriveError: writes are pending after `WRITE_SECONDS`.
    """
    deadline = time.monotonic() + WRITE_SECONDS
    goal = math.inf
    before = None
    while True:
        try:
            now = broker.read_partition(admin_url, place.topic, place.partition)
        except AdminError as error:
            if not broker.may_pass(error) or time.monotonic() > deadline:
                raise
            before, goal = None, math.inf
            time.sleep(POLL_SECONDS)
            continue
        if not now.pending or now.written >= goal:
            return
        if before is None or now.written < before.written:  # the topic was loaded
            goal = math.inf
        elif goal == math.inf:
            # A broker counts written entries before pending ones, and writes continue meanwhile.
            goal = now.written + before.pending
        if time.monotonic() > deadline:
            raise RedriveError(
                f"the broker does not write to {broker.partition_of(place.topic, place.partition)}",
                got=f"{now.pending} entries pending after {WRITE_SECONDS:g} s",
                remedy="check its bookies; another Replay moves the messages that are left",
                reason="WritesPending",
            )
        before = now
        time.sleep(POLL_SECONDS)


def proven_source(
    properties: Mapping[str, str], target: TopicName, key: LedgerKey
) -> Source | None:
    """Return the source of a moved message; None if no job of the policy moved it.

    Args:
        properties: properties of a message in *target*.
        target: topic without a partition.
        key: key of the ledger.
    """
    source = properties.get(REPLAY_SOURCE, "")
    is_proven = key.proves(properties.get(REPLAY_PROOF, ""), source, target)
    return Source.parse(source) if is_proven else None


def find_in_target(
    stored: StoredMessages,
    target: ReadableTopic,
    tails: Mapping[TargetPartition, Tail],
    source_range: Range,
    key: LedgerKey,
) -> None:
    """Search *target* after *tails* for messages of a range that the broker has received.

    Args:
        stored: result, to which messages are added.
        target: target topic.
        tails: entries after which to read, by partition of the target.
        source_range: the range.
        key: key of the ledger.

    Raises:
        RedriveError: the target cannot be read; or as for `wait_for_writes`.
    """
    for place in tails:
        wait_for_writes(target.admin_url, place)
    for partition in broker.waited(lambda: broker.read_partitions(target.admin_url, target.topic)):
        place = TargetPartition(target.topic, partition.index)
        if place not in tails:
            continue
        after = tails[place].entry
        stored.ends[place] = partition.tail
        if not _holds_all_behind(after, partition):
            stored.trimmed.add(place)
        if behind := partition.behind(after):
            ahead = reader.prefetch(partition.entry_bytes)
            lost: list[Span] = []
            for message in reader.read_messages(
                target, partition.index, after, behind, ahead, lost
            ):
                stored.add(
                    source_range, proven_source(read_properties(message) or {}, target.topic, key)
                )
                del message  # before the next one is decompressed
            if not lost:
                continue
            # Readers skip entries that are deleted meanwhile, without an error.
            now = broker.waited(
                functools.partial(
                    broker.read_partition, target.admin_url, target.topic, partition.index
                )
            )
            if not _holds_all_behind(after, now):
                stored.trimmed.add(place)


def _holds_all_behind(after: EntryId, partition: Partition) -> bool:
    """Return True if no entry after *after* was deleted.

    The broker deletes whole ledgers, the oldest first. It also deletes unused ledgers each time a
    topic is loaded.
    """
    return min(partition.held, default=math.inf) <= after.ledger


class Doubts:
    """Places where messages of a range may be stored, and cannot be searched for.

    Args:
        task: task of the range.

    Attributes:
        unproven: see `RangeRecord`.
        unseen: the same for partitions that cannot be searched now, and may become available again.
        own: places where this Replay may have stored messages. Its author cannot have known of
            these. The doubts of other Replays there are not told apart.
    """

    def __init__(self, task: RangeTask) -> None:
        self._task = task
        self.unproven, self.unseen = dict(task.unproven), dict[SentTo, int]()
        self.own = set(filter(self._is_own, task.unproven)) if task.is_in_doubt else set[SentTo]()

    def add(self, sent_to: SentTo, entries: int, *, own: bool) -> None:
        """Record that messages of *entries*, a bitmap, may be stored in a partition.

        Args:
            own: this lease may have stored some of them.
        """
        self._add(self.unproven, sent_to, entries, own=own)

    def add_unseen(self, sent_to: SentTo, entries: int, *, own: bool) -> None:
        """Do the same for a partition that cannot be searched now."""
        self._add(self.unseen, sent_to, entries, own=own)

    def _add(self, to: dict[SentTo, int], sent_to: SentTo, entries: int, *, own: bool) -> None:
        to[sent_to] = to.get(sent_to, bitmap.EMPTY) | entries
        if (own or self._task.is_in_doubt) and self._is_own(sent_to):
            self.own.add(sent_to)

    def of(self, entry: Iterable[DeadLetterRow], offset: int) -> list[set[SentTo]]:
        """Return the places where each message of an entry, at *offset*, may be stored."""
        doubts = [*self.unproven.items(), *self.unseen.items()]
        return [
            {
                (place, partitions)
                for (place, partitions), entries in doubts
                if bitmap.contains(entries, offset)
                and (not partitions or place.partition == row.partition_in(place.topic, partitions))
            }
            for row in entry
        ]

    def are_of_others(self, places: Iterable[set[SentTo]]) -> bool:
        """Return True if earlier Replays, and not this one, may have stored each message."""
        return all(of_one and of_one.isdisjoint(self.own) for of_one in places)

    def replays(self, tails: Collection[TargetPartition]) -> frozenset[str] | None:
        """Return `RangeRecord.replays` after a task that leaves *tails*, and knows its messages."""
        if not tails:
            return frozenset({self._task.route.uid} if self.own else ())
        return self._task.all_replays if self.own else self._task.replays

    def _is_own(self, sent_to: SentTo) -> bool:
        """Return True if messages of this Replay go there: it has no other target."""
        return sent_to[0].topic == self._task.route.target


class ReadableChunks(NamedTuple):
    """Entries of a range that are chunks of readable messages.

    Attributes:
        parts: bitmap of the chunks before the last one of each message. Such a message may end in
            another range, and is moved with it.
        firsts: first chunk of each message, by the offset of the last one.
        returned: chunks of messages whose last chunk is acknowledged.
    """

    parts: int
    firsts: Mapping[int, EntryId]
    returned: Sequence[EntryId]


def find_chunks(
    topic: ReadableTopic,
    partition: Partition,
    source_range: Range,
    entries: int,
    on_read: Callable[[], object] | None = None,
) -> ReadableChunks:
    """Find the readable messages that have chunks among *entries*, a bitmap.

    Arguments are those of `reader.chunks_of_whole`, but *entries* may be empty.
    """
    parts, firsts, returned = bitmap.EMPTY, dict[int, EntryId](), list[EntryId]()
    if entries and source_range.ledger in partition.held:
        for chunks in reader.chunks_of_whole(topic, partition, source_range, entries, on_read):
            *before, last = chunks
            parts |= entries & source_range.offsets(before)
            ends = bitmap.members(entries & source_range.offsets([last]))
            firsts.update(dict.fromkeys(ends, chunks[0]))
            piece = Range.of(source_range.partition, Position(*last, 0))
            if ranges.settled(piece, partition) & piece.offsets([last]):
                returned += [chunk for chunk in before if source_range.offsets([chunk])]
    return ReadableChunks(parts, firsts, returned)
