"""What one task is to move: a range of a dead-letter topic, from where to where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.positions import EntryId, Tail, TargetPartition
from redrive.reading.ranges import Range
from redrive.replay.records import Parts, Permit, Unproven


@dataclass(frozen=True)
class Route:
    """From where to where, for which Replay.

    Attributes:
        source: the dead-letter topic.
        subscription: the one that keeps the messages there; they are acknowledged on it.
        target_partitions: 0 for a target without partitions.
        receiver: the subscription that has to keep the messages in the target; empty for any
            durable one of an application.
        exactly_once: whether to move nothing to a target that does not deduplicate, and nothing
            that may be stored already.
        batch: whether to send in batches, at first.
        replay: `namespace/name`, written into each message.
        owner: the run, as the ledger knows it.
    """

    service_url: str
    admin_url: str
    source: TopicName
    subscription: str
    target: TopicName
    target_partitions: int
    exactly_once: bool
    batch: bool
    ledger: TopicName
    replay: str
    uid: str
    owner: str
    receiver: str = ""

    def is_subscribed(self) -> bool:
        """Return True if the target keeps what is stored there; see `snapshot.is_subscribed`."""
        return broker.is_subscribed(
            self.admin_url, self.target, self.target_partitions, self.receiver
        )


@dataclass(frozen=True)
class RangeTask:
    """A range to move, under a lease. Sets of entries are bitmaps of offsets.

    Attributes:
        entries: what to move.
        chunks: see `RangePlan`, likewise *unread*.
        after: behind which entry lies all of what is unread.
        max_replays: see `Choice`; it is looked at in what is unread.
        discards: see `Choice`, likewise *settles_unproven*.
        acknowledged: which of them are acknowledged: not to be sent, moved or not.
        partly: see `RangeRecord`.
        tails: where earlier leases may have stored what is not on record; see `RangeRecord`.
        unproven: see `RangeRecord`.
        replays: likewise; this one is one of them.
        since: *tails* with those of this lease, the ends of the target when it was given.
        generation: of this lease.
        renamed: see `RangeRecord`.
        lease: the entry of its record.
        number: number of that record, see `SignedRecord`.
        permit: what the task may do at first.
        fenced_seconds: time since the last process that may send by an earlier lease was fenced
            off, in seconds; 0 if that may have been this run.
        ahead: see `reading.prefetch`.
    """

    route: Route
    range: Range
    entries: int
    chunks: Mapping[int, EntryId]
    unread: int
    after: EntryId
    max_replays: int | None
    discards: bool
    settles_unproven: bool
    acknowledged: int
    partly: Parts
    tails: Mapping[TargetPartition, Tail]
    unproven: Unproven
    replays: frozenset[str] | None
    since: Mapping[TargetPartition, Tail]
    generation: int
    renamed: int
    lease: EntryId
    number: int
    permit: Permit
    fenced_seconds: float
    ahead: int
