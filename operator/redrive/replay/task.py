"""Task of moving one range of a dead-letter topic to a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import broker, reader
from redrive.reading.positions import EntryId, Tail, TargetPartition
from redrive.reading.ranges import Range
from redrive.replay.records import Parts, Permit, Unproven


@dataclass(frozen=True)
class Route:
    """Source and target of a Replay.

    Attributes:
        service_url: URL of the cluster.
        admin_url: URL of its admin API.
        source: dead-letter topic.
        subscription: subscription of the dead-letter topic on which messages are acknowledged.
        target: target topic.
        target_partitions: partitions of the target; 0 if it is not partitioned.
        exactly_once: True to refuse a target that does not deduplicate, and messages that may be
            stored already.
        batch: True to send batches in the first attempt.
        ledger: ledger topic.
        replay: `namespace/name` of the Replay, a property of each moved message.
        uid: uid of the Replay.
        owner: name of the run in the ledger.
        receiver: see `ReplayJob`.
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
        """Return True if the target retains new messages; see `broker.is_subscribed`."""
        return broker.is_subscribed(
            self.admin_url, self.target, self.target_partitions, self.receiver
        )


@dataclass(frozen=True)
class RangeTask:
    """A range to move, under a lease. Sets of entries are bitmaps of offsets.

    Attributes:
        route: source and target.
        range: the range.
        entries: entries to move.
        chunks: see `RangePlan`.
        unread: see `RangePlan`.
        after: entry before all unread entries.
        max_replays: see `Choice`. It applies to unread entries.
        discards: see `Choice`.
        settles_unproven: see `Choice`.
        acknowledged: acknowledged entries, which are not sent even if they were not moved.
        partly: see `RangeRecord`.
        tails: places where earlier leases may have stored messages; see `RangeRecord`.
        unproven: see `RangeRecord`.
        replays: see `RangeRecord`; before this lease.
        since: *tails*, and the ends of the target at the start of this lease.
        generation: generation of this lease.
        renamed: see `RangeRecord`.
        lease: entry of the record of this lease.
        number: number of that record, see `SignedRecord`.
        permit: initial permit.
        fenced_seconds: time since the last process that may send by an earlier lease was fenced
            off, in seconds; 0 if that may have been this run.
        ahead: see `reader.prefetch`.
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

    @property
    def all_replays(self) -> frozenset[str] | None:
        """Return *replays* and this Replay; None if unknown."""
        return None if self.replays is None else self.replays | {self.route.uid}

    @property
    def is_in_doubt(self) -> bool:
        """Return True if earlier leases of this Replay may have stored unrecorded messages."""
        return self.replays is None or self.route.uid in self.replays

    @property
    def to_read(self) -> int:
        """Return a bitmap of entries that are not acknowledged, or not counted yet."""
        return self.entries & ~(self.acknowledged & ~self.unread)

    def first_of(self, entries: int) -> EntryId:
        """Return the entry after which reading of *entries*, a bitmap, begins."""
        after = reader.first_entry(self.range, entries, self.chunks)
        return min(after, self.after) if self.unread else after


class TaskFailure(NamedTuple):
    """A `RedriveError` of a task, as a value for another process."""

    kind: type[RedriveError]
    message: str
    reason: str

    @classmethod
    def of(cls, error: RedriveError) -> TaskFailure:
        """Return *error* as a value."""
        return cls(type(error), str(error), error.reason)

    def error(self) -> RedriveError:
        """Return the error; the constructor of its class may take other arguments."""
        error = self.kind.__new__(self.kind, self.message)
        error.reason = self.reason
        return error
