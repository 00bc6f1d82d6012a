"""Where a dead letter lies → the number and the partition it is sent with. Pure.

A broker that deduplicates keeps the highest sequence id of each producer and drops what is not
above it. So a run that is repeated after a crash must give each message the id it had before,
whatever has been acknowledged meanwhile: the id is a function of the position alone.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar, NamedTuple

from redrive.errors import RedriveError


class PositionOutOfRangeError(RedriveError):
    """A message lies where no sequence id can be made from its position."""

    reason: ClassVar[str] = "PositionOutOfRange"


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


_ENTRY_BITS = 20
_INDEX_BITS = 11
# A ledger id below 2³² - 1 keeps the whole within the 63 bits of a positive sequence id.
LIMITS = Position(ledger=2**32 - 1, entry=2**_ENTRY_BITS, batch_index=2**_INDEX_BITS)


def sequence_id(position: Position) -> int:
    """Return the id to send a message with: from 1 up, rising with the position.

    Raises:
        PositionOutOfRangeError: a part of the position is too large, or negative.
    """
    for part, value, limit in zip(Position._fields, position, LIMITS, strict=True):
        if not 0 <= value < limit:
            raise PositionOutOfRangeError(
                f"the {part} of a dead letter's position must be from 0 to {limit - 1}",
                got=tuple(position),
                remedy="this topic can't be replayed exactly once; replay it by other means",
            )
    return (
        (position.ledger << _ENTRY_BITS | position.entry) << _INDEX_BITS | position.batch_index
    ) + 1


def target_partition(key: str | None, position: Position, partitions: int) -> int:
    """Return the partition of the target to send to, from 0 to one less than *partitions*.

    Messages with one key go to one partition; those without spread by their position. A repeated
    run decides the same, as long as *partitions* is the same.
    """
    basis = f"key:{key}" if key else f"position:{tuple(position)}"
    digest = hashlib.blake2b(basis.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % partitions
