"""What a lease has stored in its target, found there by the source position that messages carry.

The only evidence that a message was moved: a broker's memory of sequence ids says merely that
something at or above was stored, and is lost after some hours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from redrive.copying.reading import properties
from redrive.policy.naming import TopicName
from redrive.policy.properties import REPLAY_SOURCE
from redrive.replay.moving.outcome import Found
from redrive.replay.topic import reading, snapshot
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import EntryId, Source, TargetPartition
from redrive.replay.topic.ranges import Range
from redrive.replay.topic.reading import ReadableTopic


def marks(admin_url: str, target: TopicName) -> dict[TargetPartition, EntryId]:
    """Return for each partition of *target* behind which entry all lies that is stored from now on.

    Raises:
        AdminError: the broker refuses to tell.
    """
    partitions = snapshot.look(admin_url, target)
    return {TargetPartition(target, each.index): each.tail for each in partitions}


def find(
    found: Found, target: ReadableTopic, tails: Mapping[TargetPartition, EntryId], of: Range
) -> None:
    """Read *target* behind *tails*, up to its end as it is now, for messages of a range.

    Args:
        found: takes in what there is.
        target: one of those that *tails* are about.
        tails: behind which entries to read.
        of: the range.

    Raises:
        RedriveError: it can't be read.
    """
    for partition in snapshot.look(target.admin_url, target.topic):
        place = TargetPartition(target.topic, partition.index)
        after = tails.get(place)
        if after is None:
            continue
        if not _holds_all_behind(after, partition):
            found.trimmed.add(place)
        if partition.end > after:
            for message in reading.messages(
                target,
                partition.index,
                (after, partition.end),
                reading.prefetch(partition.entry_bytes),
            ):
                carried = properties(message) or {}
                found.add(of, Source.parse(carried.get(REPLAY_SOURCE, "")))


def _holds_all_behind(after: EntryId, partition: Partition) -> bool:
    """Whether nothing that was written behind *after* is trimmed.

    Ledgers go as a whole, the oldest first. Besides, each time a topic is loaded, those that were
    never written to.
    """
    return min(partition.held, default=math.inf) <= after.ledger
