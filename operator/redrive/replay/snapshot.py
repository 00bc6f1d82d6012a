"""What rests in a dead-letter topic at one moment, and what of it is acknowledged already.

Taken by the job, which fixes the end of the run with it before reading: messages that die again
while it runs come after that end, so a run never chases its own failures. Taken again by the
source for each slice, so that a message which is acknowledged is never read twice into a run.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from redrive.admin.access import Access
from redrive.admin.client import Admin
from redrive.admin.http import Http
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay import broker
from redrive.replay.position import EntryId

NOWHERE = EntryId(-1, -1)
"""Before every entry: the end of an empty partition."""


class SubscriptionMissingError(RedriveError):
    """The subscription that keeps the messages of a topic is not there."""

    reason: ClassVar[str] = "SubscriptionMissing"


@dataclass(frozen=True)
class Acknowledged:
    """The entries that a subscription has settled.

    Attributes:
        through: this one and all before it.
        ranges: those between the first of a pair, not included, and the second, included; in order.
    """

    through: EntryId = NOWHERE
    ranges: tuple[tuple[EntryId, EntryId], ...] = ()

    def __contains__(self, entry: EntryId) -> bool:
        """Whether *entry* is settled."""
        if entry <= self.through:
            return True
        after = bisect.bisect_left(self.ranges, (entry,))
        return after > 0 and entry <= self.ranges[after - 1][1]

    @classmethod
    def from_cursor(cls, cursor: Mapping[str, Any]) -> Acknowledged:
        """Read a cursor of a broker's `internalStats`."""
        ranges = _RANGE.findall(cursor["individuallyDeletedMessages"])
        return cls(
            EntryId.parse(cursor["markDeletePosition"]),
            tuple((EntryId.parse(after), EntryId.parse(last)) for after, last in ranges),
        )


@dataclass(frozen=True)
class Partition:
    """One partition of a topic.

    Attributes:
        index: `broker.UNPARTITIONED` for a topic without partitions.
        ledgers: id and number of entries of each ledger that holds any, in order.
        acknowledged: by the subscription asked about; nothing if none was.
    """

    index: int
    ledgers: tuple[tuple[int, int], ...]
    acknowledged: Acknowledged = Acknowledged()

    @property
    def end(self) -> EntryId:
        """Return the last entry, `NOWHERE` if there is none."""
        if not self.ledgers:
            return NOWHERE
        ledger, entries = self.ledgers[-1]
        return EntryId(ledger, entries - 1)

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
        if not subscription:
            return cls(index, ledgers)
        if subscription not in stats["cursors"]:
            raise SubscriptionMissingError(
                f"the dead-letter topic has no subscription {subscription}",
                got=sorted(stats["cursors"]),
                remedy="wait until the RetryPolicy is Ready again: the operator creates it",
            )
        return cls(index, ledgers, Acknowledged.from_cursor(stats["cursors"][subscription]))


async def count_partitions(admin_url: str, topic: TopicName) -> int:
    """Return how many partitions *topic* has, 0 if none, asked with the replay role's own token.

    Raises:
        AdminError: the broker refuses to tell.
    """
    async with Http.open() as http:
        return await Admin(http, admin_url, Access.bearer(broker.token())).partitions(topic)


async def take(admin_url: str, topic: TopicName, subscription: str = "") -> tuple[Partition, ...]:
    """Look at *topic* as it is now, with the replay role's own token.

    Raises:
        AdminError: the broker refuses to tell.
        SubscriptionMissingError: the topic has no such *subscription*.
    """
    async with Http.open() as http:
        admin = Admin(http, admin_url, Access.bearer(broker.token()))
        count = await admin.partitions(topic)
        taken = []
        for index in range(count) if count else [broker.UNPARTITIONED]:
            stats = await admin.internal_stats(broker.partition_of(topic, index))
            taken.append(Partition.from_stats(index, stats, subscription))
        return tuple(taken)


_RANGE = re.compile(r"[(\[](-?\d+:-?\d+)\.\.(-?\d+:-?\d+)\]")
