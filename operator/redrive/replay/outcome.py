"""Task and result of one range.

What has become of the messages of one range, while it is moved. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from redrive.policy.naming import TopicName
from redrive.reading import bitmap
from redrive.reading.positions import EntryId, Source, Tail, TargetPartition
from redrive.reading.ranges import Range
from redrive.replay.records import EntriesRead, Parts, Unproven

Key = tuple[int, int]
"""A message: the offset of its entry, and its index in it."""


@dataclass(frozen=True)
class RangeResult:
    """What became of a range; see `RangeRecord` and `RangePlan`.

    Attributes:
        gone: entries that were acknowledged by others before they were sent.
        discarded: entries that were acknowledged, as no client can show them.
        drained: whether the task ended before its time: entries are left.
        full: the topic that is over its backlog quota, if it did for that.
        unsubscribed: whether it did because the target had no subscription that keeps messages.
        read: what was learned of entries that the plan had not read.
        blocked: whether it did because others have its producer names, or have sent with them.
    """

    moved: Mapping[str, int]
    partly: Parts
    refused: tuple[tuple[EntryId, str], ...]
    gone: int
    tails: Mapping[TargetPartition, Tail]
    unproven: Unproven = field(default_factory=dict)
    discarded: int = bitmap.EMPTY
    drained: bool = False
    full: TopicName | None = None
    unsubscribed: bool = False
    read: EntriesRead = field(default_factory=EntriesRead)
    blocked: bool = False


@dataclass
class Found:
    """Messages of a range that are in a target.

    Attributes:
        replays: those that may have moved them, by their uids; None for any.
        by: offset → index within the entry → uid of the Replay that moved it.
        ends: behind which entry all lies that was not looked at, in each partition that was read.
        trimmed: partitions of which not all could be read: the broker holds it no more, because
            the consumers have acknowledged it. What is not found there may be stored.
    """

    replays: frozenset[str] | None = None
    by: dict[int, dict[int, str]] = field(default_factory=dict)
    ends: dict[TargetPartition, EntryId] = field(default_factory=dict)
    trimmed: set[TargetPartition] = field(default_factory=set)

    def add(self, of: Range, source: Source | None) -> None:
        """Take note of where a message of the target was moved from."""
        if source is None or source.partition != of.partition or not of.holds(source.position):
            return
        if self.replays is not None and source.uid not in self.replays:
            return
        offset = source.position.entry - of.first
        self.by.setdefault(offset, {})[source.position.batch_index] = source.uid


class RangeOutcome:
    """Counts by message, and tells by entry.

    Args:
        partly: what earlier leases have moved of entries that are not moved as a whole.
        uid: of the Replay that moves.
        proven: see there.

    Attributes:
        doubts: messages that were sent, and may be stored or not.
        alone: messages of which none was stored when all were sent together → how often it was
            sent alone since. The first of those without a receipt may be the one that is refused.
        largest: the size of the largest message that was stored, in bytes.
        too_big: from this size on no message is sent: the broker refused one of it, and has stored
            none as large.
        proven: whether the target was seen to deduplicate, or need not.
        stored_in: the target's partitions in which this lease has stored a message.
        settled: the entries that are moved or refused, a bitmap.
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
        # Of entries that were read for the first time: offset → how many messages each holds.
        self._sizes: dict[int, int] = {}
        self._chunks: dict[int, EntryId] = {}
        self._empty = bitmap.EMPTY
        self._parts = bitmap.EMPTY
        self._discarded = bitmap.EMPTY

    def read(self, offset: int, size: int, first_chunk: EntryId | None) -> None:
        """Take note of what an entry holds that the plan had not read."""
        self._sizes[offset] = size
        if first_chunk is not None:
            self._chunks[offset] = first_chunk

    def unseen(self, entries: int, of: Range) -> int:
        """Return which of *entries*, a bitmap, were neither read nor found in the target.

        None of them is settled.
        """
        return entries & ~bitmap.of((*self._sizes, *self._stored), of.size)

    def is_stored(self, key: Key) -> bool:
        """Whether a message is in the target."""
        offset, index = key
        return index in self._stored.get(offset, ())

    def is_sent(self, key: Key) -> bool:
        """Whether a message that was just sent is stored: neither refused nor in doubt."""
        return key not in self.doubts and key[0] not in self._refused

    def store(self, key: Key, size: int, uid: str = "") -> bool:
        """Take note that a message is in the target; return whether all of its entry is now.

        Args:
            key: the message.
            size: how many messages its entry holds.
            uid: the Replay that moved it, if it is not this one.
        """
        offset, index = key
        here = self._stored.setdefault(offset, {})
        here.setdefault(index, uid or self._uid)
        if len(here) < size:
            return False
        self._move(offset, here[index])
        return True

    def found(self, found: Found) -> None:
        """Take in what was seen in the target: no message in doubt is stored but for these."""
        for offset, indexes in found.by.items():
            self._stored[offset] = {**indexes, **self._stored.get(offset, {})}
        left = {key for key in self.doubts if not self.is_stored(key)}
        if left:
            self.alone.setdefault(min(left), 0)
        self.doubts.clear()

    def refuse(self, key: Key, cause: str) -> None:
        """Take note that a message, and so its entry, can't be moved."""
        self._refused[key[0]] = cause
        self.settled |= 1 << key[0]

    def skip(self, key: Key) -> None:
        """Take note that a message, and so its entry, was handled by others."""
        self._gone |= 1 << key[0]
        self.settled |= 1 << key[0]

    def is_part(self, chunks: Iterable[int]) -> None:
        """Take note of the entries of a message in chunks, all but the last."""
        for offset in chunks:
            self._parts |= 1 << offset

    @property
    def parts(self) -> int:
        """Return the entries that are chunks of messages that came, a bitmap."""
        return self._parts

    def discard(self, entries: int) -> None:
        """Take note of entries that were acknowledged, as no client can show them."""
        self._discarded |= entries
        self.settled |= entries

    def miss(self, gone: int, unread: int, empty: int = bitmap.EMPTY) -> None:
        """Take note of entries that were not delivered.

        Args:
            gone: those that are acknowledged; what the target has of them was moved.
            unread: those that are not.
            empty: those that hold no message, see `EntriesRead`.
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

    def result(self, of: Range, tails: Mapping[TargetPartition, Tail]) -> RangeResult:
        """Sum it up.

        Args:
            of: the range.
            tails: what remains to be read before anything more is sent.
        """
        sizes = {offset: size for offset, size in self._sizes.items() if size > 1}
        read = EntriesRead(bitmap.of(self._sizes, of.size), sizes, self._chunks, self._empty)
        return RangeResult(
            moved={uid: bitmap.of(at, of.size) for uid, at in self._moved.items()},
            partly=self._partly(),
            refused=tuple((of.entry_id(at), cause) for at, cause in sorted(self._refused.items())),
            gone=self._gone,
            tails=tails,
            read=read,
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
