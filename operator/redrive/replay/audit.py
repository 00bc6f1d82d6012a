"""Comparison of dead-letter topic, ledger and targets, message by message, without changes.

A Replay with `mode: Audit` runs it. Other Replays of the policy may run meanwhile: the ledger is
read before the targets and after them, so a message that is moved in between is no finding.
Messages that were consumed and deleted can't be compared.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from redrive.admin.errors import AdminNotFoundError
from redrive.api.replay_status import AuditResult
from redrive.messages import read_properties
from redrive.policy import naming
from redrive.policy.envelope import reconsume_times
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import NOWHERE, Position, Source
from redrive.reading.ranges import Range
from redrive.reading.reader import ReadableTopic
from redrive.replay import ledger
from redrive.replay.evidence import LedgerKey
from redrive.replay.lookup import proven_source
from redrive.replay.records import RangeRecord, Records, unite

EXAMPLES = 5
Entries = Mapping[Range, int]
"""Entries of the dead-letter topic, as a bitmap of offsets for each range; none is empty."""
Messages = Mapping[tuple[Range, int], int]
"""Messages of the dead-letter topic: the bitmap of entries by range and index in the entry."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditFindings:
    """Differences between the topics.

    Attributes:
        doubled: messages that the targets contain more than once in total.
        unrecorded: unacknowledged entries that a target contains, that are not recorded as moved,
            and for which the next Replay does not search the target. It would send them again.
        missing: entries that are recorded as moved, without a message in any target: consumed and
            deleted there, moved to a topic that was not read, or lost.
        returned: entries that are recorded as moved, and are not acknowledged. The next Replay
            acknowledges them.
        open: ranges for which the next Replay searches the target: a Replay moves them now, or was
            interrupted.
    """

    doubled: Messages = field(default_factory=dict)
    unrecorded: Entries = field(default_factory=dict)
    missing: Entries = field(default_factory=dict)
    returned: Entries = field(default_factory=dict)
    open: tuple[Range, ...] = ()

    def result(self, topics: tuple[str, ...], messages: int) -> AuditResult:
        """Return the numbers for the status, after so many messages of some topics were read."""
        doubled = (
            f"{place.entry_id(offset)}:{place.partition}:{index}"
            for (place, index), entries in sorted(self.doubled.items())
            for offset in bitmap.members(entries)
        )
        unrecorded = (
            f"{place.entry_id(offset)}:{place.partition}"
            for place, entries in sorted(self.unrecorded.items())
            for offset in bitmap.members(entries)
        )
        return AuditResult(
            topics=topics,
            messages=messages,
            doubled=_count(self.doubled),
            unrecorded=_count(self.unrecorded),
            missing=_count(self.missing),
            returned=_count(self.returned),
            open=len(self.open),
            doubled_examples=tuple(islice(doubled, EXAMPLES)),
            unrecorded_examples=tuple(islice(unrecorded, EXAMPLES)),
        )


class TargetMessages:
    """Dead letters that targets contain, by their positions in the dead-letter topic.

    A bitmap of up to 1.3 kB is kept for each range of 10,000 entries and each index in a batch.

    Attributes:
        doubled: messages that were added more than once.
        stored: all messages.
    """

    def __init__(self) -> None:
        self.doubled: dict[tuple[Range, int], int] = defaultdict(int)
        self.stored: dict[tuple[Range, int], int] = defaultdict(int)

    def add(self, partition: int, position: Position) -> None:
        """Add a message of a target."""
        place = Range.of(partition, position)
        offset = position.entry - place.first
        key, entry = (place, position.batch_index), bitmap.span(offset, offset)
        if self.stored[key] & entry:
            self.doubled[key] |= entry
        self.stored[key] |= entry

    def entries(self) -> dict[Range, int]:
        """Return the entries with at least one added message."""
        united: dict[Range, int] = defaultdict(int)
        for (place, _), entries in self.stored.items():
            united[place] |= entries
        return united


def moved_entries(records: Records) -> Entries:
    """Return the entries that are recorded as moved."""
    return _without_empty({place: record.moved_by_any for place, record in records.ranges.items()})


def compare(
    moved: Entries, records: Records, messages: TargetMessages, backlog: Entries
) -> AuditFindings:
    """Return the differences.

    Args:
        moved: entries that were recorded as moved before the targets were read.
        records: records of the ledger after that.
        messages: messages of the targets.
        backlog: unacknowledged entries, read last.
    """
    unrecorded: dict[Range, int] = defaultdict(int)
    for (place, index), entries in messages.stored.items():
        sent_again = entries & backlog.get(place, bitmap.EMPTY)
        unrecorded[place] |= sent_again & ~_known(records.range(place), place, index)
    stored = messages.entries()
    return AuditFindings(
        doubled=dict(messages.doubled),
        unrecorded=_without_empty(unrecorded),
        missing=_without_empty(
            {place: entries & ~stored.get(place, bitmap.EMPTY) for place, entries in moved.items()}
        ),
        returned=_without_empty(
            {place: bits & moved.get(place, bitmap.EMPTY) for place, bits in backlog.items()}
        ),
        open=tuple(sorted(place for place, record in records.ranges.items() if _is_open(record))),
    )


def _is_open(record: RangeRecord) -> bool:
    """Return True if the next Replay searches the target before it sends messages of the range."""
    return record.leased or bool(record.tails)


def _known(record: RangeRecord, place: Range, index: int) -> int:
    """Return the entries of a range for which the next Replay does not send the message *index*."""
    if _is_open(record):
        return bitmap.span(0, place.size - 1)
    partly = (
        offset
        for parts in record.partly.values()
        for offset, indexes in parts.items()
        if bitmap.contains(indexes, index)
    )
    return record.moved_by_any | unite(record.unproven.values()) | bitmap.of(partly, place.size)


def _without_empty(entries: Entries) -> Entries:
    return {place: bits for place, bits in entries.items() if bits}


def _count(places: Entries | Messages) -> int:
    return sum(entries.bit_count() for entries in places.values())


def audit(
    urls: tuple[str, str],
    dead_letter: TopicName,
    subscription: str,
    *targets: TopicName,
    on_read: Callable[[], object] = lambda: None,
) -> AuditFindings:
    """Read all topics with the credentials of the job, and compare them.

    Args:
        urls: URLs of the broker and of its admin API.
        dead_letter: dead-letter topic.
        subscription: subscription that retains dead letters.
        targets: topics to which Replays moved messages. A missing topic counts as empty.
        on_read: called for each message of a target.

    Raises:
        RedriveError: a topic can't be read.
    """
    (service_url, admin_url), ledger_topic = urls, naming.ledger_topic(dead_letter)
    key, messages = ledger.mounted_key(), TargetMessages()
    with broker.connect(service_url) as client:

        def records() -> Records:
            return broker.waited(lambda: ledger.read(client, ledger_topic, key, admin_url))

        moved = moved_entries(records())
        for target in targets:
            topic = ReadableTopic(client, admin_url, target)
            for source in _sources(topic, key, on_read):
                messages.add(source.partition, source.position)
        after = records()
    dead = broker.waited(lambda: broker.read_partitions(admin_url, dead_letter, subscription))
    backlog = {piece.range: piece.pending for piece in ranges.all_pieces(dead) if piece.pending}
    return compare(moved, after, messages, backlog)


def _sources(
    target: ReadableTopic, key: LedgerKey, on_read: Callable[[], object]
) -> Iterator[Source]:
    """Yield the sources of replayed messages in *target*, without their retries."""
    try:
        partitions = broker.waited(lambda: broker.read_partitions(target.admin_url, target.topic))
    except AdminNotFoundError:
        logger.info("%s does not exist, so it has no messages", target.topic)
        return
    for partition in partitions:
        held = partition.behind(NOWHERE)
        ahead = reader.prefetch(partition.entry_bytes)
        for message in reader.read_messages(target, partition.index, NOWHERE, held, ahead):
            on_read()
            carried = read_properties(message) or {}
            del message  # before the next one is decompressed
            source = proven_source(carried, target.topic, key)
            if source is not None and reconsume_times(carried) == 0:
                yield source
