"""Plan of a run, with the interfaces of its engine and reporter, and the preview of a dry run.

A scan of unacknowledged dead letters makes the plan: the entries of each range to move, and the
refused ones. The plan is made once, before any message is sent. A dry run shows it, the account
refers to it, and an interrupted run resumes with it.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, reader
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Piece, Range
from redrive.reading.reader import MessagesByRange, ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.reading.stored import ReadMessage
from redrive.replay.account import (
    MAX_LEADERS,
    Account,
    CauseFigures,
    Causes,
    Leaders,
    count_message,
    counted_causes,
    counts,
    drop_rare,
    frequent_causes,
    shown_causes,
)
from redrive.replay.job.scanned import ScannedMessage, StoredMessage
from redrive.replay.lookup import by_entry, find_chunks, refusal, schema_refusals
from redrive.replay.outcome import RangeResult
from redrive.replay.records import RangePlan, RefusedEntry
from redrive.replay.spec import (
    EVERYTHING,
    MESSAGES_PER_SECOND,
    Choice,
    Chooser,
    FailureCause,
    ReplayJob,
)
from redrive.replay.task import RangeTask

SAMPLES = 10
GROUPS = 4
"""Minimum number of groups of small ranges for each slot. One task reads or moves a group."""
GROUP_RANGES, GROUP_ENTRIES = 16, 1_000
"""Maximum numbers of ranges and entries of a group. If a task that moves it is lost, each range is
searched in the target."""


class PlannedRange(NamedTuple):
    """Plan of a range, with the details that a dry run shows.

    Attributes:
        range: the range.
        plan: its plan.
        causes: the most frequent causes of messages to move.
        samples: positions of some of these messages.
        size: total size of their contents, in bytes.
        leaders: see `Leaders.causes`.
        following: number of other messages that follow a dead letter of their key.
    """

    range: Range
    plan: RangePlan
    causes: Causes
    samples: tuple[Position, ...]
    size: int
    leaders: Mapping[str, FailureCause] = MappingProxyType({})
    following: int = 0

    def joined(self, other: PlannedRange) -> PlannedRange:
        """Return the plan of this range, merged with the plan of other entries of it."""
        return PlannedRange(
            self.range,
            self.plan.joined(other.plan),
            frequent_causes((self.causes, other.causes)),
            (*self.samples, *other.samples)[:SAMPLES],
            self.size + other.size,
            {**self.leaders, **other.leaders},
            self.following + other.following,
        )

    @property
    def refused(self) -> Counter[str]:
        """Return the numbers of refused messages by cause."""
        refused: Counter[str] = Counter()
        for entry in self.plan.refused:
            refused[entry.cause] += entry.messages
        return refused


@dataclass(frozen=True)
class Scanned:
    """Results of the scans of complete ranges. A range that is scanned again counts again.

    Attributes:
        messages: number of scanned messages.
        causes: the most frequent causes of messages to move.
        refused: numbers of refused messages, by cause.
        unevaluated: number of messages for which the condition could not be computed.
    """

    messages: int = 0
    causes: Causes = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    unevaluated: int = 0

    @classmethod
    def of(cls, planned: PlannedRange) -> Self:
        """Return the results of one range."""
        plan = planned.plan
        return cls(plan.scanned, counted_causes([planned]), planned.refused, plan.unevaluated)

    def __add__(self, other: Scanned) -> Scanned:
        """Return the sum, with the most frequent causes."""
        causes = frequent_causes((self.causes, other.causes))
        messages, refused = self.messages + other.messages, self.refused + other.refused
        unevaluated = self.unevaluated + other.unevaluated
        return Scanned(messages, causes, refused, unevaluated)


@dataclass(frozen=True)
class Scan:
    """Work of one scan task.

    Attributes:
        service_url: URL of the cluster.
        admin_url: URL of its admin API.
        topic: dead-letter topic.
        piece: range, with its unacknowledged entries.
        moved: bitmap of entries that are recorded as moved, which are left out.
        ahead: see `reader.prefetch`.
        choice: selection; its limit applies to this range.
        sequenced: True if messages may follow a dead letter of their key.
    """

    service_url: str
    admin_url: str
    topic: TopicName
    piece: Piece
    moved: int
    ahead: int
    choice: Choice = EVERYTHING
    sequenced: bool = False

    @property
    def entries(self) -> int:
        """Return a bitmap of the entries to read."""
        return self.piece.pending & ~self.moved

    def follows(self, before: Scan) -> bool:
        """Return True if reading begins before the end of another scan in any case."""
        source_range, pending, _ = before.piece
        last = source_range.entry_id(bitmap.highest(pending))
        return self.piece.range.partition == source_range.partition and self.piece.after <= last

    def readable(self, client: broker.ReadingClient) -> ReadableTopic:
        """Return the topic, as read by *client*."""
        return ReadableTopic(client, self.admin_url, self.topic)


def grouped(scans: Sequence[Scan], slots: int) -> Iterator[Sequence[Scan]]:
    """Divide *scans*, in the order of their ranges, into groups that lie close together."""
    most = max(1, min(GROUP_RANGES, len(scans) // (GROUPS * slots)))
    group: list[Scan] = []
    room = GROUP_ENTRIES
    for task in scans:
        size = task.entries.bit_count()
        if group and not (len(group) < most and size <= room and task.follows(group[-1])):
            yield group
            group, room = [], GROUP_ENTRIES
        group.append(task)
        room -= size
    if group:
        yield group


def scan(task: Scan) -> PlannedRange:
    """Plan a range."""
    return scan_all([task])[0]


def scan_all(tasks: Sequence[Scan]) -> list[PlannedRange]:
    """Plan ranges of one partition, which are read together."""
    with reading(tasks) as (client, messages):
        schema_refusal = schema_refusals(client, tasks[0].topic)
        return list(map(plan_dead_letters, tasks, messages, itertools.repeat(schema_refusal)))


@contextmanager
def reading(
    tasks: Sequence[Scan],
) -> Iterator[tuple[broker.ReadingClient, Iterator[Iterator[StoredMessage]]]]:
    """Open a client and the messages of each scan, which are read together, in order."""
    with (
        broker.connect(tasks[0].service_url) as client,
        closing(MessagesByRange(_read_all(client, tasks))) as messages,
    ):
        yield client, (read_dead_letters(client, task, messages) for task in tasks)


def _read_all(client: broker.ReadingClient, tasks: Sequence[Scan]) -> Generator[ReadMessage]:
    pieces = {task.piece.range: task.entries for task in tasks if task.entries}
    if len(pieces) > 1:
        after, ahead = (min(task.piece.after for task in tasks), min(task.ahead for task in tasks))
        yield from reader.read_ranges(tasks[0].readable(client), pieces, after, ahead)


def plan_dead_letters(
    task: Scan, messages: Iterable[StoredMessage], schema_refusal: Callable[[int | None], str]
) -> PlannedRange:
    """Plan a range from its *messages*."""
    chooser, leaders = Chooser(task.choice), Leaders(MAX_LEADERS if task.sequenced else 0)
    # `map` holds no message while the next one is decompressed.
    read = functools.partial(ScannedMessage.read, chooser=chooser, leaders=leaders)
    return plan(task.piece.range, map(read, messages), schema_refusal, task.choice, leaders.causes)


def read_dead_letters(
    client: broker.ReadingClient, task: Scan, messages: MessagesByRange | None = None
) -> Iterator[StoredMessage]:
    """Yield the messages of a scan, and a placeholder for each entry that no client can show.

    *messages* are read together with those of other scans. It raises the errors of
    `reader.read_entries`.
    """
    source_range, entries = task.piece.range, task.entries
    topic = task.readable(client)
    read: set[int] = set()

    def read_others() -> Iterator[ReadMessage]:
        others = entries & ~bitmap.of(read, source_range.size)
        if others:
            after = task.piece.after
            yield from reader.read_entries(topic, source_range, others, after, task.ahead)

    together = () if messages is None else messages.of(source_range)
    first = source_range.first
    for message in itertools.chain(together, read_others()):
        chunks = message.place.entries
        read.add(chunks[-1][1] - first)
        if len(chunks) > 1:
            read.update(bitmap.members(source_range.offsets(chunks)))
        yield message
        del message  # before the next one is decompressed
    missing = entries & ~bitmap.of(read, source_range.size)
    if missing:
        yield from _undelivered(topic, source_range, missing, task.ahead)


def _undelivered(
    topic: ReadableTopic, source_range: Range, missing: int, ahead: int
) -> Iterator[StoredMessage]:
    """Yield messages whose chunks are far apart, and a placeholder for each other entry."""
    index = source_range.partition
    partition = broker.waited(lambda: broker.read_partition(topic.admin_url, topic.topic, index))
    if source_range.ledger not in partition.held:
        return
    chunks = find_chunks(topic, partition, source_range, missing)
    ends = bitmap.of(chunks.firsts, source_range.size)
    if ends:
        after = reader.first_entry(source_range, ends, chunks.firsts)
        yield from reader.read_entries(topic, source_range, ends, after, ahead)
    for offset in bitmap.members(missing & ~(ends | chunks.parts)):
        yield DeadLetterRow.undelivered(index, source_range.entry_id(offset))


def plan(
    source_range: Range,
    messages: Iterable[ScannedMessage],
    schema_refusal: Callable[[int | None], str],
    choice: Choice = EVERYTHING,
    leaders: Mapping[str, FailureCause] = MappingProxyType({}),
) -> PlannedRange:
    """Plan the messages of one range.

    Args:
        source_range: the range.
        messages: its messages, grouped by entry.
        schema_refusal: see `schema_refusals`.
        choice: selection. Its limit applies in the order of positions, and includes refused
            messages. The first entry that exceeds the limit ends the selection.
        leaders: see `Leaders.causes`.
    """
    scanned, unevaluated, selected = 0, 0, []
    room = math.inf
    if choice.limit is not None:
        room, messages = choice.limit, sorted(messages, key=lambda message: message.position)
    sizes: dict[int, int] = {}
    chunks: dict[int, EntryId] = {}
    causes: dict[FailureCause, CauseFigures] = {}
    samples: list[Position] = []
    size = 0
    refused: list[RefusedEntry] = []
    following = 0
    for batch in by_entry(messages):
        first = batch[0]
        scanned += len(batch)
        count, failed = _selected(batch)
        unevaluated += failed if room >= 0 else 0
        if not count:
            following += sum([message.follows for message in batch])
            continue
        room = room - count if count <= room else -1
        if room < 0:
            continue
        # A task reads the entry again before it discards it.
        is_discarded = choice.discards and not first.delivered
        cause = "" if is_discarded else refusal(batch, count, choice.max_replays)
        cause = cause or schema_refusal(first.schema_version)
        if cause:
            refused.append(RefusedEntry(first.position.entry_id, count, cause))
            continue
        offset = first.position.entry - source_range.first
        selected.append(offset)
        if count > 1:
            sizes[offset] = count
        if first.first_chunk is not None:
            chunks[offset] = first.first_chunk
        for message in batch:
            count_message(causes, message.failure, message.replays, message.published)
            size += message.size
        drop_rare(causes)
        if len(samples) < SAMPLES:
            samples.append(first.position)
    entries = bitmap.of(selected, source_range.size)
    planned = RangePlan(
        scanned, entries, sizes, tuple(refused), chunks=chunks, unevaluated=unevaluated
    )
    return PlannedRange(
        source_range, planned, frequent_causes((causes,)), tuple(samples), size, leaders,
        following,
    )  # fmt: skip


def _selected(batch: Sequence[ScannedMessage]) -> tuple[int, int]:
    """Return the numbers of selected messages, and of those whose condition failed."""
    if len(batch) == 1:  # as most
        (message,) = batch
        return int(message.selected), int(not message.evaluated)
    failed = sum([not message.evaluated for message in batch])
    return sum([message.selected for message in batch]), failed


class Engine(Protocol):
    """Engine that runs tasks. Errors other than `RedriveError` may be transient."""

    @property
    def slots(self) -> int:
        """Return the current number of concurrent tasks, which changes with executors."""

    @property
    def capacity(self) -> int:
        """Return the number of tasks to submit. Some of them may wait for others to end.

        Spark requests more executors for waiting tasks.
        """

    @property
    def scanned(self) -> Scanned:
        """Return the current results of scans."""

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        """Plan ranges. Ranges without messages may be left out."""

    def cancel(self, error: RedriveError) -> None:
        """End the current scan, by *error* or another one. May be called repeatedly."""

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range. Several threads call this concurrently."""

    def move_all(self, tasks: Sequence[RangeTask]) -> Sequence[RangeResult]:
        """Move several small ranges, one after the other; see `mover.move_all`."""


class DesiredState(enum.Enum):
    """Desired state of a run, by its spec and approval."""

    RUN = enum.auto()
    SUSPEND = enum.auto()
    END = enum.auto()
    EXPIRE = enum.auto()
    """End because of the deadline."""
    CANCEL = enum.auto()
    """End because the author canceled the Replay."""


ENDING = frozenset({DesiredState.END, DesiredState.EXPIRE, DesiredState.CANCEL})


class RunEndedError(RedriveError):
    """The run was canceled, or has reached its deadline."""


class ReplayGoneError(RedriveError):
    """The Replay of this job has ended or was deleted."""

    reason = "ReplayGone"


DEADLINE_EXCEEDED = "DeadlineExceeded"
CANCELED = "Canceled"


def check_continues(desired: DesiredState | None, remaining: int) -> None:
    """Check that a run with so many remaining dead letters need not end.

    Raises:
        ReplayGoneError: the Replay was deleted.
        RunEndedError: the deadline has passed, or the Replay was canceled.
    """
    if desired is DesiredState.EXPIRE:
        raise RunEndedError(
            "the run has reached its deadline, and dead letters are left",
            got=remaining,
            remedy="create another Replay with a longer one for those that are left",
            reason=DEADLINE_EXCEEDED,
        )
    if desired is DesiredState.CANCEL:
        raise RunEndedError(
            "the Replay was canceled, and dead letters are left",
            got=remaining,
            remedy="create another Replay for those that are left",
            reason=CANCELED,
        )
    if desired is DesiredState.END:
        raise ReplayGoneError(
            "the Replay is deleted",
            remedy="create another Replay for the messages that are left",
        )


class Pause(NamedTuple):
    """Cause for which a run sends no messages. Without a topic the run is suspended.

    Attributes:
        full_topic: topic over its backlog quota, whose consumers have to catch up.
        unsubscribed_topic: topic with a partition without a durable subscription, which would
            retain no message.
    """

    full_topic: TopicName | None = None
    unsubscribed_topic: TopicName | None = None


SUSPENDED = Pause()


class Reporter(Protocol):
    """Reporter of the progress of a run."""

    def take_over(self, token: EntryId) -> None:
        """Use the fencing token with which the run took the ledger over in later reports."""

    def report(self, account: Account, *, pause: Pause | None = None) -> DesiredState:
        """Publish the account, and return the desired state.

        Args:
            account: latest account.
            pause: cause of a pause; None while messages are sent.

        Raises:
            FencedError: a later run reports.
            RedriveError: the account could not be published.
        """

    def rate_limit(self, job: ReplayJob) -> float | None:
        """Return the current limit in messages per second for all tasks of *job*; None without.

        It may differ from the limit at the launch of the job.
        """

    def report_scan(self, scanned: Scanned) -> None:
        """Publish the current results of scans, while the run is planned.

        Raises:
            ReplayGoneError, RunEndedError: the run has to end.
            RedriveError: the results could not be published.
        """


SHOWN = 20
BYTES_PER_SECOND = 10 * 2**20
"""Minimum bytes per second of one task, for estimates."""


@dataclass(frozen=True)
class RunPreview:
    """Preview of a run.

    Attributes:
        account: account in which all messages to move are left.
        causes: the most frequent causes of messages to move.
        refused: numbers of refused messages, by cause.
        samples: ids of some messages to move.
        seconds: estimated duration.
        following: number of other messages that follow a dead letter of their key.
    """

    account: Account
    causes: Causes
    refused: Mapping[str, int]
    samples: tuple[str, ...]
    seconds: int
    following: int = 0

    @classmethod
    def of(
        cls, account: Account, planned: Sequence[PlannedRange], job: ReplayJob, slots: int
    ) -> Self:
        """Summarize the plans of all ranges.

        Args:
            account: account of these plans.
            planned: plans of all ranges.
            job: job that would move them.
            slots: number of concurrent tasks.
        """
        refused: Counter[str] = Counter()
        samples: list[str] = []
        for piece in planned:
            refused.update(piece.refused)
            partition = piece.range.partition
            samples += [f"{s.ledger}:{s.entry}:{partition}:{s.batch_index}" for s in piece.samples]
        # For an ordered policy, one range of each partition is moved at a time.
        parallel = {
            piece.range.partition if job.policy.ordered else piece.range for piece in planned
        }
        busy = max(1, min(slots, len(parallel)))
        seconds = max(
            account.left / MESSAGES_PER_SECOND / busy,
            sum(piece.size for piece in planned) / BYTES_PER_SECOND / busy,
            account.left / (job.rate_limit or math.inf),
        )
        return cls(
            account,
            counted_causes(planned, SHOWN),
            dict(refused.most_common(SHOWN)),
            tuple(samples[:SAMPLES]),
            math.ceil(seconds),
            sum(piece.following for piece in planned),
        )

    def to_status(self) -> dict[str, Any]:
        """Return fields of `status.run` of the Replay."""
        return {
            **self.account.to_status(),
            "preview": {
                "causes": shown_causes(self.causes),
                "refused": counts(self.refused),
                "samples": list(self.samples),
                "estimatedSeconds": self.seconds,
                "following": self.following,
            },
        }


def so_far(scanned: Scanned) -> dict[str, Any]:
    """Return the field `status.run.preview` of the Replay for the current results of scans."""
    return {
        "causes": shown_causes(frequent_causes((scanned.causes,), SHOWN)),
        "refused": counts(dict(scanned.refused.most_common(SHOWN))),
    }
