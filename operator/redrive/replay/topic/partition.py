"""What one partition of a topic holds, and what of it is acknowledged, as a broker tells. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from redrive.errors import RedriveError
from redrive.replay.topic.position import NOWHERE, EntryId
from redrive.replay.topic.spans import Span


class SubscriptionMissingError(RedriveError):
    """The subscription that keeps the messages of a topic is not there."""

    reason: ClassVar[str] = "SubscriptionMissing"


@dataclass(frozen=True)
class Acknowledged:
    """The entries that a subscription has settled.

    Attributes:
        through: this one and all before it.
        ranges: those between the first of a pair, not included, and the second, included; in order,
            as a broker writes them: there may be hundreds of thousands, of which few are wanted.
    """

    through: EntryId = NOWHERE
    ranges: str = ""

    def overlapping(self, first: EntryId, last: EntryId) -> Iterator[tuple[EntryId, EntryId]]:
        """Go through the ranges that hold any of the entries from *first* to *last*, in order."""
        for match in _RANGE.finditer(self.ranges, self._begin(first)):
            pair = EntryId.parse(match[1]), EntryId.parse(match[2])
            if pair[0] >= last:
                return
            yield pair

    def _begin(self, first: EntryId) -> int:
        """Return where in the text no range begins any more that ends before *first*."""
        low, high = 0, len(self.ranges)
        while low < high:
            middle = (low + high) // 2
            match = _RANGE.search(self.ranges, middle)
            if match is None or EntryId.parse(match[2]) >= first:
                high = middle
            else:
                low = match.end()
        return low

    @classmethod
    def from_cursor(cls, cursor: Mapping[str, Any]) -> Acknowledged:
        """Read a cursor of a broker's `internalStats`."""
        through = EntryId.parse(cursor["markDeletePosition"])
        return cls(through, cursor["individuallyDeletedMessages"])


@dataclass(frozen=True)
class Partition:
    """One partition of a topic.

    Attributes:
        index: `broker.UNPARTITIONED` for a topic without partitions.
        ledgers: id and number of entries of each ledger that holds any, in order.
        acknowledged: by the subscription asked about; nothing if none was.
        tail: in the ledger that is being written, the last entry, or what is before the first.
            All that is written from now on lies behind it.
        entry_bytes: the average size of an entry.
        written: how many entries were written since the broker loaded the topic.
        pending: how many it has received, and neither written nor refused yet.
        held: the ids of all ledgers, empty ones too; others are trimmed, or still to come.
    """

    index: int
    ledgers: tuple[tuple[int, int], ...]
    acknowledged: Acknowledged = Acknowledged()
    tail: EntryId = NOWHERE
    held: frozenset[int] = frozenset()
    entry_bytes: float = 0.0
    written: int = 0
    pending: int = 0

    @property
    def end(self) -> EntryId:
        """Return the last entry, `NOWHERE` if there is none."""
        if not self.ledgers:
            return NOWHERE
        ledger, entries = self.ledgers[-1]
        return EntryId(ledger, entries - 1)

    def behind(self, entry: EntryId) -> list[Span]:
        """Return all that lies behind *entry*, in order."""
        begins = (
            (ledger, entry.entry + 1 if ledger == entry.ledger else 0, entries - 1)
            for ledger, entries in self.ledgers
            if ledger >= entry.ledger
        )
        return [Span(*each) for each in begins if each[1] <= each[2]]

    @classmethod
    def from_stats(cls, index: int, stats: Mapping[str, Any], subscription: str) -> Partition:
        """Read a broker's `internalStats`; no *subscription* is the empty string.

        Raises:
            SubscriptionMissingError: the topic has no such subscription.
        """
        # Of the ledger being written the list does not tell the number of entries.
        last = EntryId.parse(stats["lastConfirmedEntry"])
        counts = {ledger["ledgerId"]: ledger["entries"] for ledger in stats["ledgers"]}
        if last.ledger in counts:
            counts[last.ledger] = last.entry + 1
        ledgers = tuple(sorted(item for item in counts.items() if item[1] > 0))
        newest = max(counts, default=-1)
        found = cls(
            index,
            ledgers,
            tail=EntryId(newest, counts.get(newest, 0) - 1),
            held=frozenset(counts),
            entry_bytes=stats.get("totalSize", 0) / max(1, stats.get("numberOfEntries", 0)),
            written=stats.get("entriesAddedCounter", 0),
            pending=stats.get("pendingAddEntriesCount", 0),
        )
        if not subscription:
            return found
        if subscription not in stats["cursors"]:
            raise SubscriptionMissingError(
                f"the topic has no subscription {subscription}",
                got=sorted(stats["cursors"]),
                remedy="wait until the RetryPolicy is Ready again: the operator creates it",
            )
        cursor = Acknowledged.from_cursor(stats["cursors"][subscription])
        return replace(found, acknowledged=cursor)


_RANGE = re.compile(r"[(\[](-?\d+:-?\d+)\.\.(-?\d+:-?\d+)\]")
