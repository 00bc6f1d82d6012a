"""The plan of a run, its engine, and its preview.

One scan of what rests → the plan of a Replay: for each range what to move and what is refused.

The plan is what a dry run shows, what the account is drawn up against, and what a run that is
interrupted goes on with: it is made once, before anything is sent.

Who runs the tasks of a replay: this process, or Spark; and what shows how far it has come.

What a dry run has found, drawn up from the plans of its ranges. Pure.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from redrive.errors import RedriveError
from redrive.policy.envelope import CAUSE_FINGERPRINT, CAUSE_TYPE, MAX_CAUSE
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, reader
from redrive.reading.positions import EntryId, Position
from redrive.reading.ranges import Piece, Range
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay import mover
from redrive.replay.lookup import MAX_CONTENT, by_entry, refusal, schema_refusals
from redrive.replay.outcome import RangeResult
from redrive.replay.records import Account, RangePlan, RefusedEntry
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
CAUSES = 100
"""So many have a count of their own: anybody may write causes."""


def failure_of(letter: DeadLetterRow) -> FailureCause:
    """Return the cause of a dead letter."""
    properties = letter.properties
    return FailureCause(properties.get(CAUSE_TYPE, ""), properties.get(CAUSE_FINGERPRINT, ""))


class Sighting(NamedTuple):
    """What a plan has to know of a message."""

    position: Position
    batch_size: int
    first_chunk: EntryId | None
    encrypted: bool
    unreadable: bool
    schema_version: int | None
    cause: str
    size: int
    replays: int
    selected: bool
    evaluated: bool = True
    """False if the condition can't be computed for a message that all else of a choice takes."""
    delivered: bool = True
    oversized: bool = False

    @classmethod
    def undelivered(cls, position: Position, *, selected: bool | None) -> Sighting:
        """Stand for an entry that no client can show.

        Args:
            position: where it lies.
            selected: None if that depends on what it holds.
        """
        return cls(
            position, 1, None, encrypted=False, unreadable=False, schema_version=None, cause="",
            size=0, replays=0, selected=bool(selected), evaluated=selected is not None,
            delivered=False,
        )  # fmt: skip

    @classmethod
    def of(cls, letter: DeadLetterRow, chooser: Chooser) -> Sighting:
        """Take of *letter* what is needed."""
        if not letter.delivered:
            taken = chooser.takes_undelivered(letter.position)
            return cls.undelivered(letter.position, selected=taken)
        return cls(
            letter.position,
            letter.batch_size,
            letter.first_chunk,
            letter.encrypted,
            letter.unreadable,
            letter.schema_version,
            letter.properties.get(CAUSE_TYPE, ""),
            letter.size,
            letter.replays,
            selected=chooser.takes(
                letter.position, letter.key, letter.publish_time, failure_of(letter)
            ),
            oversized=letter.oversized,
        )


class PlannedRange(NamedTuple):
    """The plan of a range, and what a dry run tells of it.

    Attributes:
        causes: of what is to be moved: cause → how many messages; the most frequent ones.
        samples: some of these messages.
        size: of their contents, in bytes.
    """

    range: Range
    plan: RangePlan
    causes: Mapping[str, int]
    samples: tuple[Position, ...]
    size: int

    def joined(self, other: PlannedRange) -> PlannedRange:
        """Return the plan of this range, of which *other* has other entries."""
        causes = Counter(self.causes) + Counter(other.causes)
        return PlannedRange(
            self.range,
            self.plan.joined(other.plan),
            dict(causes.most_common(CAUSES)),
            (*self.samples, *other.samples)[:SAMPLES],
            self.size + other.size,
        )

    @property
    def refused(self) -> Counter[str]:
        """Return how many messages can't be moved, by cause."""
        refused: Counter[str] = Counter()
        for each in self.plan.refused:
            refused[each.cause] += each.messages
        return refused


@dataclass(frozen=True)
class Scanned:
    """What scans have found, of ranges that are through. One that was scanned again counts again.

    Attributes:
        messages: how many were looked at.
        causes: of those that are to be moved: cause → how many messages.
        refused: cause → how many messages can't be moved for it.
        unevaluated: for how many messages the condition can't be computed.
    """

    messages: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unevaluated: int = 0

    @classmethod
    def of(cls, planned: PlannedRange) -> Self:
        """Take of the plan of one range what it adds."""
        plan = planned.plan
        return cls(plan.scanned, Counter(planned.causes), planned.refused, plan.unevaluated)

    def __add__(self, other: Scanned) -> Scanned:
        """Return both together, with the most frequent causes: there may be any number of them."""
        causes = (self.causes + other.causes).most_common(CAUSES)
        messages, refused = self.messages + other.messages, self.refused + other.refused
        unevaluated = self.unevaluated + other.unevaluated
        return Scanned(messages, Counter(dict(causes)), refused, unevaluated)


@dataclass(frozen=True)
class Scan:
    """What one task looks at.

    Attributes:
        moved: entries that are on record as moved, a bitmap: they are left out.
        ahead: see `reading.prefetch`.
        choice: which of its messages are selected; its limit is that of this range.
    """

    service_url: str
    admin_url: str
    topic: TopicName
    piece: Piece
    moved: int
    ahead: int
    choice: Choice = EVERYTHING


def scan(what: Scan) -> PlannedRange:
    """Plan a range."""
    with broker.connect(what.service_url) as client:
        return scanned(what, letters(client, what), schema_refusals(client, what.topic))


def scanned(
    what: Scan, found: Iterable[DeadLetterRow], schema_refusal: Callable[[int | None], str]
) -> PlannedRange:
    """Plan a range of which these messages were *found*."""
    chooser = Chooser(what.choice)
    # `map` holds no message while the next one is decompressed.
    seen = map(functools.partial(Sighting.of, chooser=chooser), found)
    return plan(what.piece.range, seen, schema_refusal, what.choice)


def letters(client: broker.ReadingClient, what: Scan) -> Iterator[DeadLetterRow]:
    """Read the messages that *what* is about, and stand in for entries that no client can show.

    Errors are those of `reading.messages`.
    """
    of, resting = what.piece.range, what.piece.resting & ~what.moved
    topic = ReadableTopic(client, what.admin_url, what.topic, max_content=MAX_CONTENT)
    read: set[int] = set()
    for letter in reader.read_entries(topic, of, resting, what.piece.after, what.ahead):
        read.add(letter.position.entry - of.first)
        read.update(_offsets(of, letter.chunks))
        yield letter
        del letter  # before the next one is decompressed
    missing = resting & ~bitmap.of(read, of.size)
    if missing:
        yield from _undelivered(topic, of, missing)


def _undelivered(topic: ReadableTopic, of: Range, missing: int) -> Iterator[DeadLetterRow]:
    partition = broker.waited(
        lambda: broker.read_partition(topic.admin_url, topic.topic, of.partition)
    )
    if of.ledger not in partition.held:
        return
    for chunks in reader.chunks_of_whole(topic, partition, of, missing):
        missing &= ~bitmap.of(_offsets(of, chunks), of.size)
    for offset in bitmap.members(missing):
        yield DeadLetterRow.undelivered(of.partition, of.entry_id(offset))


def _offsets(of: Range, entries: Iterable[EntryId]) -> Iterator[int]:
    return (entry.entry - of.first for entry in entries if of.holds(Position(*entry, 0)))


def plan(
    of: Range,
    seen: Iterable[Sighting],
    schema_refusal: Callable[[int | None], str],
    choice: Choice = EVERYTHING,
) -> PlannedRange:
    """Plan the messages of one range.

    Args:
        of: the range.
        seen: its messages, those of an entry one after the other.
        schema_refusal: see `schema_refusals`.
        choice: of which the limit counts here, in the order of positions, refused ones included.
            The first entry that has no room among them ends the selection.
    """
    scanned, unevaluated, selected = 0, 0, []
    room = math.inf
    if choice.limit is not None:
        room, seen = choice.limit, sorted(seen, key=lambda each: each.position)
    sizes: dict[int, int] = {}
    chunks: dict[int, EntryId] = {}
    causes: Counter[str] = Counter()
    samples: list[Position] = []
    size = 0
    refused: list[RefusedEntry] = []
    for here in by_entry(seen):
        scanned += len(here)
        count = sum(each.selected for each in here)
        unevaluated += sum(not each.evaluated for each in here) if room >= 0 else 0
        if not count:
            continue
        room = room - count if count <= room else -1
        if room < 0:
            continue
        first, entry = here[0], here[0].position.entry_id
        # A task looks at it once more before it discards it.
        is_kept = choice.discards and not first.delivered
        cause = "" if is_kept else refusal(here, count, choice.max_replays)
        cause = cause or schema_refusal(first.schema_version)
        if cause:
            refused.append(RefusedEntry(entry, count, cause))
            continue
        offset = entry.entry - of.first
        selected.append(offset)
        if count > 1:
            sizes[offset] = count
        if first.first_chunk is not None:
            chunks[offset] = first.first_chunk
        causes.update(each.cause[:MAX_CAUSE] for each in here)
        size += sum(each.size for each in here)
        if len(samples) < SAMPLES:
            samples.append(first.position)
    entries = bitmap.of(selected, of.size)
    planned = RangePlan(
        scanned, entries, sizes, tuple(refused), chunks=chunks, unevaluated=unevaluated
    )
    return PlannedRange(of, planned, dict(causes.most_common(CAUSES)), tuple(samples), size)


class TaskFailure(NamedTuple):
    """A `RedriveError` of a task as a value, to be sent to another process."""

    kind: type[RedriveError]
    message: str

    def error(self) -> RedriveError:
        """Return the error; its class may take other arguments than a message."""
        return self.kind.__new__(self.kind, self.message)


class Engine(Protocol):
    """Runs tasks. What they raise that is no `RedriveError` may pass when they run again."""

    @property
    def slots(self) -> int:
        """Return how many tasks run at a time as it stands; executors come and go."""

    @property
    def capacity(self) -> int:
        """Return how many tasks to have under way: some of them may wait for one to end.

        What waits is what Spark asks for more executors by.
        """

    @property
    def scanned(self) -> Scanned:
        """Return what scans have found by now."""

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        """Plan ranges; one that is left out has nothing to be planned."""

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range; called from several threads at a time."""


class Wish(enum.Enum):
    """What whoever made a run wants of it now."""

    RUN = enum.auto()
    SUSPEND = enum.auto()
    END = enum.auto()
    EXPIRE = enum.auto()
    """To end as well, because of the deadline."""
    CANCEL = enum.auto()
    """To end as well, because its author canceled it."""


class Rest(NamedTuple):
    """Why a run sends nothing.

    Attributes:
        full_topic: is over its backlog quota: its consumers have to catch up. None if the run is
            suspended, or of the other.
        unsubscribed_topic: has a partition without a durable subscription, which would keep no
            message.
    """

    full_topic: TopicName | None = None
    unsubscribed_topic: TopicName | None = None


SUSPENDED = Rest()


class Reporter(Protocol):
    """Shows how far a run has come."""

    def take_over(self, token: EntryId) -> None:
        """Report from now on as the run that took the ledger over with this fencing token."""

    def report(self, account: Account, *, rests: Rest | None = None) -> Wish:
        """Show the latest account, and return what is wanted.

        Args:
            account: the latest.
            rests: why nothing is sent; None while the run goes on.

        Raises:
            FencedError: a later run reports.
            RedriveError: it can't be shown now.
        """

    def rate_limit(self, job: ReplayJob) -> float | None:
        """Return the limit of messages a second by now, for all tasks of *job* together.

        None for no limit. It may differ from the limit with which the job was launched.
        """

    def report_scan(self, scanned: Scanned) -> None:
        """Show what scans have found by now, while the run is planned."""


class Local:
    """Runs tasks in this process, for jobs without SQL; good for some thousand messages."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = self.capacity = slots
        self.scanned = Scanned()

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        """Plan ranges one after the other."""
        for each in scans:
            planned = scan(each)
            self.scanned += Scanned.of(planned)
            yield planned

    def move(self, task: RangeTask) -> RangeResult:
        """Move one range."""
        return mover.move(task)


SHOWN = 20
BYTES_PER_SECOND = 10 * 2**20
"""The bytes that one task moves in a second at least, likewise."""


@dataclass(frozen=True)
class RunPreview:
    """What would be moved.

    Attributes:
        account: of which nothing is moved: what would be is left.
        causes: cause → how many messages of it would be moved; the most frequent ones.
        refused: cause → how many messages can't be moved for it.
        samples: ids of some that would be moved.
        seconds: how long it would take.
    """

    account: Account
    causes: Mapping[str, int]
    refused: Mapping[str, int]
    samples: tuple[str, ...]
    seconds: int

    @classmethod
    def of(
        cls, account: Account, planned: Sequence[PlannedRange], job: ReplayJob, slots: int
    ) -> Self:
        """Draw it up.

        Args:
            account: of these plans.
            planned: all ranges.
            job: which would move them.
            slots: how many tasks would run at a time.
        """
        causes: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        samples: list[str] = []
        for each in planned:
            causes.update(each.causes)
            refused.update(each.refused)
            partition = each.range.partition
            samples += [f"{s.ledger}:{s.entry}:{partition}:{s.batch_index}" for s in each.samples]
        # Of an ordered policy one range of each partition is moved at a time.
        beside = {each.range.partition if job.policy.ordered else each.range for each in planned}
        busy = max(1, min(slots, len(beside)))
        seconds = max(
            account.left / MESSAGES_PER_SECOND / busy,
            sum(each.size for each in planned) / BYTES_PER_SECOND / busy,
            account.left / (job.rate_limit or math.inf),
        )
        return cls(
            account,
            dict(causes.most_common(SHOWN)),
            dict(refused.most_common(SHOWN)),
            tuple(samples[:SAMPLES]),
            math.ceil(seconds),
        )

    def to_status(self) -> dict[str, Any]:
        """Write it as fields of `status.run` of the Replay."""
        return {
            **self.account.to_status(),
            "preview": {
                "causes": counts(self.causes),
                "refused": counts(self.refused),
                "samples": list(self.samples),
                "estimatedSeconds": self.seconds,
            },
        }


def so_far(scanned: Scanned) -> dict[str, Any]:
    """Write what scans have found by now as the field `status.run.preview` of the Replay."""
    return {
        "causes": counts(dict(scanned.causes.most_common(SHOWN))),
        "refused": counts(dict(scanned.refused.most_common(SHOWN))),
    }


def counts(counted: Mapping[str, int]) -> list[dict[str, Any]]:
    """Write numbers by cause as a list of the Replay's status."""
    return [{"cause": cause, "messages": n} for cause, n in counted.items()]
