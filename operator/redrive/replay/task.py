"""Task of moving a range of a dead-letter topic to a target, and the connections of tasks."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from redrive.policy.naming import TopicName
from redrive.reading import broker, reader
from redrive.reading.positions import EntryId, Tail, TargetPartition
from redrive.reading.ranges import Partition, Range
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay import lookup
from redrive.replay.ledger import Lease, mounted_key
from redrive.replay.records import Parts, Permit, Unproven
from redrive.replay.sending import Pace
from redrive.replay.transport import ProtocolTransport


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
        receiver: subscription that has to retain messages in the target; empty for any durable
            subscription of an application.
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
        replays: see `RangeRecord`. It includes this Replay.
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
    def to_read(self) -> int:
        """Return a bitmap of entries that are not acknowledged, or not counted yet."""
        return self.entries & ~(self.acknowledged & ~self.unread)

    def first_of(self, entries: int) -> EntryId:
        """Return the entry after which reading of *entries*, a bitmap, begins."""
        after = reader.first_entry(self.range, entries, self.chunks)
        return min(after, self.after) if self.unread else after


POLL_SECONDS = 1.0
"""Interval of polls of acknowledgements of others, while ranges are sent."""
POLL_SHARE = 20
"""Minimum interval of polls, as a multiple of the duration of the last one."""


class TaskConnections:
    """Connections that the ranges of a task share, which are moved one after the other.

    Args:
        tasks: the ranges, in order, of one partition and one Replay.
        client: client for everything but sending.

    Attributes:
        client: the client.
        key: key of the ledger.
        lease: lease of all ranges.
        consumer: consumer that acknowledges dead letters.
        pace: pace of all messages.
        proven: True if the target has proved to deduplicate, or does not need to.
        source: state of the partition of dead letters at the last poll; None before the first.
    """

    def __init__(self, tasks: Sequence[RangeTask], client: broker.ReadingClient) -> None:
        last, self._route = tasks[-1], tasks[-1].route
        route = self._route
        self.client, self.key = client, mounted_key()
        self.lease = Lease(
            client,
            route.ledger,
            route.owner,
            self.key,
            [task.range for task in tasks],
            last.lease,
            last.number,
            last.permit,
        )
        self._partition = last.range.partition
        topic = broker.partition_of(route.source, self._partition)
        self.consumer = broker.acknowledger(client, topic, route.subscription)
        self.pace, self.proven = Pace(), not route.exactly_once
        self.source: Partition | None = None
        self._poll_due = time.monotonic() + POLL_SECONDS
        self._transport: ProtocolTransport | None = None
        self._rows = self._read_all(tasks)
        self._row: DeadLetterRow | None = None

    def close(self) -> None:
        """Close all connections but the client."""
        self._rows.close()
        self.lease.close()
        if self._transport is not None:
            self._transport.end()

    def transport(self) -> ProtocolTransport:
        """Return the transport of the last range if nothing is in flight there, or a new one."""
        if self._transport is None or not self._transport.is_idle:
            url, batches = self._route.service_url, self._route.batch
            self._transport = ProtocolTransport(url, batches=batches)
        return self._transport

    def rows(self, source_range: Range) -> Iterator[DeadLetterRow]:
        """Yield messages of a range that are read together with those of other ranges.

        Other messages of the range are not included, for example after an error.
        """
        end = source_range.ledger, source_range.last
        row, self._row = self._row, None
        while (row := row or next(self._rows, None)) is not None:
            if row.position[:2] > end:
                self._row = row
                return
            if source_range.holds(row.position):
                yield row
            row = None

    def read_source(self) -> Partition:
        """Return the current state of the partition of dead letters."""
        route = self._route
        return broker.waited(
            lambda: lookup.read_source(
                route.admin_url, route.source, route.subscription, self._partition
            )
        )

    def poll(self) -> None:
        """Read `source` again after `POLL_SECONDS`, or `POLL_SHARE` times as long as it takes."""
        begun = time.monotonic()
        if begun >= self._poll_due:
            self.source = self.read_source()
            now = time.monotonic()
            self._poll_due = now + max(POLL_SECONDS, POLL_SHARE * (now - begun))

    def _read_all(self, tasks: Sequence[RangeTask]) -> Generator[DeadLetterRow]:
        pieces = {task.range: task.to_read for task in tasks if task.to_read}
        if len(pieces) < 2:  # noqa: PLR2004  a range alone is read for each attempt
            return
        route = self._route
        topic = ReadableTopic(
            self.client, route.admin_url, route.source, max_content=lookup.MAX_CONTENT
        )
        after = min(task.first_of(task.to_read) for task in tasks if task.to_read)
        yield from reader.read_ranges(topic, pieces, after, min(task.ahead for task in tasks))
