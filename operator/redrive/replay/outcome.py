"""Outcome of the messages of one range, while it is moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from redrive.policy.naming import TopicName
from redrive.reading import bitmap
from redrive.reading.positions import EntryId, Source, Tail, TargetPartition
from redrive.reading.ranges import Range
from redrive.replay.records import EntriesRead, Parts, Unproven

Key = tuple[int, int]
"""Key of a message: the offset of its entry, and its index in the entry."""


@dataclass(frozen=True)
class RangeResult:
    """Result of a range; see `RangeRecord` and `RangePlan` for other attributes.

    Attributes:
        refused: refused entries with causes.
        gone: entries that others acknowledged before they were sent.
        discarded: entries that were acknowledged because no client can show them.
        drained: True if the task ended early, so entries are left.
        full: topic over its backlog quota, if the task ended for this.
        unsubscribed: True if the task ended because the target retains no messages.
        read: information about entries that the plan had not read.
        blocked: True if the task ended because another client uses its producer names.
    """

    moved: Mapping[str, int]
    partly: Parts
    refused: tuple[tuple[EntryId, str], ...]
    gone: int
    tails: Mapping[TargetPartition, Tail]
    replays: frozenset[str] | None
    unproven: Unproven = field(default_factory=dict)
    discarded: int = bitmap.EMPTY
    drained: bool = False
    full: TopicName | None = None
    unsubscribed: bool = False
    read: EntriesRead = field(default_factory=EntriesRead)
    blocked: bool = False


@dataclass
class StoredMessages:
    """Messages of a range that a search found in a target.

    Attributes:
        replays: uids of Replays that may have moved them; None for any.
        by: uid of the Replay that moved each message, by offset and index within the entry.
        ends: last entry that was read, for each partition.
        trimmed: partitions that were not read completely, because consumers acknowledged messages
            and the broker deleted them. Messages that were not found there may have been stored.
    """

    replays: frozenset[str] | None = None
    by: dict[int, dict[int, str]] = field(default_factory=dict)
    ends: dict[TargetPartition, EntryId] = field(default_factory=dict)
    trimmed: set[TargetPartition] = field(default_factory=set)

    def add(self, source_range: Range, source: Source | None) -> None:
        """Add a message of the target by its source, if it is of the range and the Replays."""
        if source is None or source.partition != source_range.partition:
            return
        if not source_range.holds(source.position):
            return
        if self.replays is not None and source.uid not in self.replays:
            return
        offset = source.position.entry - source_range.first
        self.by.setdefault(offset, {})[source.position.batch_index] = source.uid


class RangeOutcome:
    """Outcome of a range, recorded by message and summarized by entry.

    Args:
        partly: messages that earlier leases moved, of entries that are not moved completely.
        uid: uid of the moving Replay.
        proven: see the attribute.

    Attributes:
        doubts: sent messages that may be stored or not.
        alone: number of attempts to send a message alone, for messages that the broker may refuse:
            the first message without a receipt when messages were sent together.
        largest: size of the largest stored message in bytes.
        too_big: size from which messages are refused, because the broker refused one and stored
            none of that size.
        proven: True if the target has proved to deduplicate, or does not need to.
        stored_in: target partitions in which this lease has stored a message.
        settled: bitmap of moved or refused entries.
        parts: bitmap of entries that are chunks of readable messages, without the last ones.
    """

    def __init__(self, partly: Parts, uid: str, *, proven: bool = False) -> None:
        self._uid = uid
        self._stored: dict[int, dict[int, str]] = {}
        for by, entries in partly.items():
            for offset, indexes in entries.items():
                stored = self._stored.setdefault(offset, {})
                stored.update(dict.fromkeys(bitmap.members(indexes), by))
        self._moved: dict[str, list[int]] = {}
        self._refused: dict[int, str] = {}
        self._gone = bitmap.EMPTY
        self.doubts: set[Key] = set()
        self.alone: dict[Key, int] = {}
        self.largest = 0
        self.too_big = math.inf
        self.proven = proven
        self.stored_in: set[int] = set()
        self.settled = bitmap.EMPTY
        # Numbers of messages of entries that were read for the first time, by offset.
        self._sizes: dict[int, int] = {}
        self._chunks: dict[int, EntryId] = {}
        self._empty = bitmap.EMPTY
        self.parts = bitmap.EMPTY
        self._discarded = bitmap.EMPTY

    def read(self, offset: int, size: int, first_chunk: EntryId | None) -> None:
        """Record the content of an entry that the plan had not read."""
        self._sizes[offset] = size
        if first_chunk is not None:
            self._chunks[offset] = first_chunk

    def unseen(self, entries: int, source_range: Range) -> int:
        """Return the unsettled *entries*, a bitmap, that were neither read nor found."""
        return entries & ~bitmap.of((*self._sizes, *self._stored), source_range.size)

    def is_stored(self, key: Key) -> bool:
        """Return True if a message is in the target."""
        offset, index = key
        return index in self._stored.get(offset, ())

    def is_sent(self, key: Key) -> bool:
        """Return True if a message that was just sent is neither refused nor in doubt."""
        return key not in self.doubts and key[0] not in self._refused

    def store(self, key: Key, size: int, uid: str = "") -> bool:
        """Record a message as stored; return True if its entry is complete.

        Args:
            key: the message.
            size: number of messages of its entry.
            uid: uid of the Replay that moved it, if not this one.
        """
        offset, index = key
        stored = self._stored.setdefault(offset, {})
        stored.setdefault(index, uid or self._uid)
        if len(stored) < size:
            return False
        self._move(offset, stored[index])
        return True

    def resolve_doubts(self, stored: StoredMessages) -> None:
        """Record the messages that a search found. Other messages in doubt are not stored."""
        for offset, indexes in stored.by.items():
            self._stored[offset] = {**indexes, **self._stored.get(offset, {})}
        missing = {key for key in self.doubts if not self.is_stored(key)}
        if missing:
            self.alone.setdefault(min(missing), 0)
        self.doubts.clear()

    def refuse(self, key: Key, cause: str) -> None:
        """Record the entry of a message as refused."""
        self._refused[key[0]] = cause
        self.settled |= 1 << key[0]

    def skip(self, key: Key) -> None:
        """Record the entry of a message as handled by others."""
        self._gone |= 1 << key[0]
        self.settled |= 1 << key[0]

    def discard(self, entries: int) -> None:
        """Record entries that were acknowledged because no client can show them."""
        self._discarded |= entries
        self.settled |= entries

    def miss(self, gone: int, unread: int, empty: int = bitmap.EMPTY) -> None:
        """Record entries that were not delivered.

        Args:
            gone: acknowledged entries. If the target has their messages, they were moved.
            unread: unacknowledged entries, which are refused.
            empty: entries without a message, see `EntriesRead`.
        """
        for offset in bitmap.members(gone):
            if by := self._stored.get(offset):
                self._sizes.setdefault(offset, len(by))
                self._move(offset, next(iter(by.values())))
            else:
                self._gone |= 1 << offset
        for offset in bitmap.members(unread):
            self._refused[offset] = "NotDelivered"
            self.settled |= 1 << offset
        self._empty = empty

    def result(
        self,
        source_range: Range,
        tails: Mapping[TargetPartition, Tail],
        replays: frozenset[str] | None,
    ) -> RangeResult:
        """Return the result.

        Args:
            source_range: the range.
            tails: places to search before the range is sent again.
            replays: see `RangeRecord`.
        """
        sizes = {offset: size for offset, size in self._sizes.items() if size > 1}
        entries = bitmap.of(self._sizes, source_range.size)
        refused = sorted(self._refused.items())
        return RangeResult(
            moved={
                uid: bitmap.of(offsets, source_range.size) for uid, offsets in self._moved.items()
            },
            partly=self._partly(),
            refused=tuple((source_range.entry_id(offset), cause) for offset, cause in refused),
            gone=self._gone,
            tails=tails,
            replays=replays,
            read=EntriesRead(entries, sizes, self._chunks, self._empty),
            discarded=self._discarded,
        )

    def _partly(self) -> Parts:
        partly: dict[str, dict[int, int]] = {}
        for offset, indexes in self._stored.items():
            for index, uid in indexes.items():
                entries = partly.setdefault(uid, {})
                entries[offset] = entries.get(offset, bitmap.EMPTY) | 1 << index
        return partly

    def _move(self, offset: int, uid: str) -> None:
        del self._stored[offset]
        self._moved.setdefault(uid, []).append(offset)
        self.settled |= 1 << offset
