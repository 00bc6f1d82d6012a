"""Where a dead letter lies → the number and the partition it is sent with. Pure.

A broker that deduplicates keeps the highest sequence id of each producer and drops what is not
above it. Producers are named after ranges, so the first message that a later try stores shuts out
all that an earlier one, of a process that was stopped and goes on, has yet to send.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from redrive.policy.naming import TopicName


class EntryId(NamedTuple):
    """An entry of a partition: a message, or a batch of them. Ordered as they were written."""

    ledger: int
    entry: int

    @classmethod
    def parse(cls, text: str) -> EntryId:
        """Read `ledger:entry`, as brokers and `str` write it."""
        ledger, _, entry = text.partition(":")
        return cls(int(ledger), int(entry))

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}"


NOWHERE = EntryId(-1, -1)
"""Before every entry: the end of an empty partition."""
LATEST = EntryId(2**63 - 1, 2**63 - 1)
"""Behind every entry."""


class TargetPartition(NamedTuple):
    """A partition of a topic that messages are moved to; one of -1 is all of the topic."""

    topic: TopicName
    partition: int

    def __str__(self) -> str:
        return f"{self.topic} {self.partition}"

    @classmethod
    def parse(cls, text: str) -> TargetPartition:
        """Read what `str` writes."""
        topic, _, partition = text.partition(" ")
        return cls(TopicName.parse(topic), int(partition))


class Tail(NamedTuple):
    """The end of a partition of a target, behind which leases may have stored what no record says.

    Attributes:
        entry: the last one, when the first of these leases was given.
        generation: of that lease; 0 if it is not known.
        partitions: how many the topic had for them, 0 for none; None if that is not known.
        through: the last offset of what they had to send; None if that is not known.
    """

    entry: EntryId
    generation: int = 0
    partitions: int | None = None
    through: int | None = None

    def joined(self, later: Tail | None) -> Tail:
        """Return it as the tail of later leases, too, if there are any."""
        if later is None:
            return self
        same = self.partitions == later.partitions
        bounds = self.through, later.through
        return self._replace(
            partitions=self.partitions if same else None,
            through=None if None in bounds else max(bounds),  # type: ignore[type-var]
        )

    def stored_through(self, last: int, only: Try | None, size: int) -> int:
        """Return the last offset of what may be stored behind it, of a range of so many entries.

        Args:
            last: the sequence id of the last message that the broker knows of.
            only: the one try of which anything may be stored, if there is no other; of it nothing
                above *last* is.
            size: of the range.
        """
        if only and self.generation == only.generation and Try.of(last) == only:
            return offset_of(last)
        return self.last_offset(size)

    def last_offset(self, size: int) -> int:
        """Return the last offset of what was to be sent, of a range of so many entries."""
        return size - 1 if self.through is None else self.through


class Position(NamedTuple):
    """A message of a partition. Ordered as they were written.

    Attributes:
        batch_index: its place within the entry; 0 for one that is not part of a batch.
    """

    ledger: int
    entry: int
    batch_index: int

    @property
    def entry_id(self) -> EntryId:
        """Return the entry it is part of."""
        return EntryId(self.ledger, self.entry)


class Source(NamedTuple):
    """From where a message was moved, and by which Replay: a property that it carries."""

    uid: str
    partition: int
    position: Position

    def __str__(self) -> str:
        ledger, entry, index = self.position
        return f"{self.uid}@{self.partition}:{ledger}:{entry}:{index}"

    @classmethod
    def parse(cls, text: str) -> Source | None:
        """Read what `str` writes; None for anything else, which anybody may have written."""
        match = _SOURCE.fullmatch(text)
        if match is None:
            return None
        uid, *numbers = match.groups()
        partition, *position = map(int, numbers)
        return cls(uid, partition, Position(*position))


_SOURCE = re.compile(r"([\w-]{1,64})@(-?\d{1,9}):(\d{1,19}):(\d{1,19}):(\d{1,9})", re.ASCII)

_ATTEMPT_BITS, _OFFSET_BITS, _INDEX_BITS = 8, 14, 11
MAX_BATCH = 2**_INDEX_BITS
"""Entries that hold more messages than this can't be replayed."""


class Try(NamedTuple):
    """One try at sending the messages of a range. Later ones are greater.

    Attributes:
        generation: counts the leases of the range.
        attempt: counts the tries within one lease, from 0.
    """

    generation: int
    attempt: int

    @classmethod
    def of(cls, sequence_id: int) -> Try:
        """Return the try in which a message with this id was sent; all zero for -1, none."""
        number = max(0, sequence_id - 1) >> (_OFFSET_BITS + _INDEX_BITS)
        return cls(number >> _ATTEMPT_BITS, number % 2**_ATTEMPT_BITS)


def sequence_id(sent_in: Try, offset: int, batch_index: int) -> int:
    """Return the id to send a message with: it rises with the try, then with the position.

    So once a broker has stored one message of a try, it drops all that an earlier one still sends.

    Args:
        sent_in: generations from 1, attempts below 256.
        offset: of its entry within its range.
        batch_index: its place within the entry, below `MAX_BATCH`.
    """
    number = sent_in.generation << _ATTEMPT_BITS | sent_in.attempt
    return ((number << _OFFSET_BITS | offset) << _INDEX_BITS | batch_index) + 1


def offset_of(number: int) -> int:
    """Return the offset, within its range, of what was sent with this sequence id."""
    return (number - 1 >> _INDEX_BITS) & (1 << _OFFSET_BITS) - 1


def target_partition(key: str | None, position: Position, partitions: int) -> int:
    """Return the partition of the target to send to, from 0 to one less than *partitions*.

    Messages with one key go to one partition; those without spread by their position. A repeated
    run decides the same, as long as *partitions* is the same.
    """
    basis = f"key:{key}" if key else f"position:{tuple(position)}"
    digest = hashlib.blake2b(basis.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % partitions
