"""What a lease has stored in its target, found there by the source position that messages carry.

The only evidence that a message was moved: a broker's memory of sequence ids says merely that
something at or above was stored, and is lost after some hours.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import ClassVar

from redrive.admin.errors import AdminError, AdminForbiddenError, AdminNotFoundError
from redrive.copying.reading import properties
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.policy.properties import REPLAY_SOURCE
from redrive.replay.moving.outcome import Found
from redrive.replay.topic import broker, reading, snapshot
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import EntryId, Source, Tail, TargetPartition
from redrive.replay.topic.ranges import Range
from redrive.replay.topic.reading import ReadableTopic
from redrive.replay.topic.spans import Span

WRITE_SECONDS = 300.0
POLL_SECONDS = 0.2


class WritesPendingError(RedriveError):
    """The broker has received messages, and neither stores nor refuses them."""

    reason: ClassVar[str] = "WritesPending"


def marks(admin_url: str, target: TopicName) -> dict[TargetPartition, EntryId]:
    """Return for each partition of *target* behind which entry all lies that is stored from now on.

    Raises:
        AdminError: the broker refuses to tell.
    """
    partitions = snapshot.look(admin_url, target)
    return {TargetPartition(target, each.index): each.tail for each in partitions}


def places(admin_url: str, target: TopicName) -> frozenset[TargetPartition]:
    """Return the partitions that *target* has, none if it is gone: rights go with a topic.

    Raises:
        AdminError: the broker does not answer.
    """
    try:
        return frozenset(broker.waited(lambda: marks(admin_url, target)))
    except (AdminNotFoundError, AdminForbiddenError):
        return frozenset()


def wait_for_writes(admin_url: str, place: TargetPartition) -> None:
    """Return once the broker has written all that it has received for a partition by now.

    Writes are done in their order, and may wait for minutes while the storage does not answer. A
    broker that does not answer itself is asked again, as one that is restarted is waited for.

    Raises:
        AdminError: the broker refuses to tell, or does not answer for `WRITE_SECONDS`.
        WritesPendingError: they are not done after `WRITE_SECONDS`.
    """
    deadline = time.monotonic() + WRITE_SECONDS
    goal = math.inf
    before = None
    while True:
        try:
            now = snapshot.look_at(admin_url, place.topic, place.partition)
        except AdminError as error:
            if not broker.may_pass(error) or time.monotonic() > deadline:
                raise
            before, goal = None, math.inf
            time.sleep(POLL_SECONDS)
            continue
        if not now.pending or now.written >= goal:
            return
        if before is None or now.written < before.written:  # it was loaded, maybe again
            goal = math.inf
        elif goal == math.inf:
            # A broker counts what is written first, then what is pending, while it goes on.
            goal = now.written + before.pending
        if time.monotonic() > deadline:
            raise WritesPendingError(
                f"the broker does not write to {broker.partition_of(place.topic, place.partition)}",
                got=f"{now.pending} entries pending after {WRITE_SECONDS:g} s",
                remedy="look at its bookies; another Replay goes on from what was moved",
            )
        before = now
        time.sleep(POLL_SECONDS)


def find(
    found: Found, target: ReadableTopic, tails: Mapping[TargetPartition, Tail], of: Range
) -> None:
    """Read *target* behind *tails* for messages of a range, all that the broker has received.

    Args:
        found: takes in what there is.
        target: the topic that *tails* are about.
        tails: behind which to read.
        of: the range.

    Raises:
        RedriveError: it can't be read.
        WritesPendingError: as for `wait_for_writes`.
    """
    for place in tails:
        wait_for_writes(target.admin_url, place)
    for partition in broker.waited(lambda: snapshot.look(target.admin_url, target.topic)):
        place = TargetPartition(target.topic, partition.index)
        if place not in tails:
            continue
        after = tails[place].entry
        found.ends[place] = partition.tail
        if not _holds_all_behind(after, partition):
            found.trimmed.add(place)
        if behind := partition.behind(after):
            ahead = reading.prefetch(partition.entry_bytes)
            lost: list[Span] = []
            for message in reading.messages(target, partition.index, after, behind, ahead, lost):
                carried = properties(message) or {}
                found.add(of, Source.parse(carried.get(REPLAY_SOURCE, "")))
            if not lost:
                continue
            # Readers pass over what is trimmed under way, and say nothing.
            now = broker.waited(
                functools.partial(snapshot.look_at, target.admin_url, target.topic, partition.index)
            )
            if not _holds_all_behind(after, now):
                found.trimmed.add(place)


def _holds_all_behind(after: EntryId, partition: Partition) -> bool:
    """Whether nothing that was written behind *after* is trimmed.

    Ledgers go as a whole, the oldest first. Besides, each time a topic is loaded, those that were
    never written to.
    """
    return min(partition.held, default=math.inf) <= after.ledger
