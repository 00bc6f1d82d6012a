"""Entries that can be moved, and messages that the target holds already.

Entries of a dead-letter topic: which can be moved, and what those hold that no plan has read.

What a lease has stored in its target, found there by the source position that messages carry.

The only evidence that a message was moved: a broker's memory of sequence ids says merely that
something at or above was stored, and is lost after some hours.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import pulsar

from redrive.admin.errors import AdminError, AdminForbiddenError, AdminNotFoundError
from redrive.errors import RedriveError
from redrive.messages import SchemaError, WriterSchemas, read_properties
from redrive.policy.envelope import REPLAY_PROOF, REPLAY_SOURCE
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, reader
from redrive.reading.positions import MAX_BATCH, EntryId, Position, Source, Tail, TargetPartition
from redrive.reading.ranges import Partition, Range, Span
from redrive.reading.reader import ReadableTopic
from redrive.reading.rows import DeadLetterRow
from redrive.replay.evidence import LedgerKey
from redrive.replay.outcome import Found, RangeOutcome

MAX_CONTENT = 128 * 2**20
"""Largest decompressed content of an entry that a Replay moves, in bytes. It bounds the memory of
tasks: 5 MiB in a topic may be 1 GiB when it is decompressed."""

_NOT_SENT = {
    "oversized": "ContentTooLarge",
    "encrypted": "Encrypted",
    "unreadable": "UnreadableProperties",
}
"""Attributes of messages that cannot be moved, and the causes of their refusal."""


class SeenMessage(Protocol):
    """What decides whether a message can be moved; see `DeadLetterRow`."""

    @property
    def position(self) -> Position:
        """Return where it lies."""

    @property
    def delivered(self) -> bool:
        """Return whether a client can show it."""

    @property
    def oversized(self) -> bool:
        """Return True if its content is larger than `MAX_CONTENT`."""

    @property
    def encrypted(self) -> bool:
        """Return whether only its readers can decrypt it."""

    @property
    def unreadable(self) -> bool:
        """Return whether its properties can't be shown."""

    @property
    def batch_size(self) -> int:
        """Return how many messages its entry holds."""

    @property
    def replays(self) -> int:
        """Return how often it was replayed."""


_Seen = TypeVar("_Seen", bound=SeenMessage)


def refusal(entry: Sequence[SeenMessage], selected: int, max_replays: int | None) -> str:
    """Say why an entry can't be moved; nothing if it can.

    A broker acknowledges entries, not messages: what is sent of an entry in part would be sent
    again by the next Replay.

    Args:
        entry: what was read of its messages.
        selected: how many of them are to be moved.
        max_replays: what was replayed so often stays; None for any number.
    """
    first = entry[0]
    if not first.delivered:
        return "NotDelivered"
    for kind, cause in _NOT_SENT.items():
        if getattr(first, kind):
            return cause
    if first.batch_size > MAX_BATCH:
        return "BatchTooLarge"
    if not selected == len(entry) == first.batch_size:
        return "PartOfBatch"
    often = max_replays is not None and max_replays <= max(each.replays for each in entry)
    return "ReplayedTooOften" if often else ""


def schema_refusals(client: pulsar.Client, topic: TopicName) -> Callable[[int | None], str]:
    """Return what says of a version of the schema of *topic* why no message can be sent with it.

    It says nothing where one can.
    """
    schemas = WriterSchemas(client)

    @functools.cache
    def refusal(version: int | None) -> str:
        try:
            if version is not None:
                broker.waited(lambda: schemas.get(topic, version))
        except SchemaError as error:
            return error.reason
        return ""

    return refusal


def by_entry(messages: Iterable[_Seen]) -> Iterator[list[_Seen]]:
    """Put the messages of each entry together."""
    # As `entry_id`, which would make a named tuple for each.
    for _, entry in itertools.groupby(messages, key=lambda message: message.position[:2]):
        yield list(entry)


def read_first(
    entry: Sequence[DeadLetterRow],
    offset: int,
    outcome: RangeOutcome,
    acknowledged: int,
    cause_of: Callable[[Sequence[DeadLetterRow]], str],
) -> bool:
    """Take note of an entry that is read for the first time, and return whether to send it.

    Args:
        entry: all its messages.
        offset: of the entry.
        outcome: takes in what it holds, and why it can't be moved.
        acknowledged: what is not to be sent, a bitmap.
        cause_of: says why an entry can't be moved; nothing if it can.
    """
    outcome.read(offset, len(entry), entry[0].first_chunk)
    if bitmap.contains(acknowledged, offset):
        return False
    cause = cause_of(entry)
    if cause:
        outcome.refuse((offset, 0), cause)
    return not cause


WRITE_SECONDS = 300.0
POLL_SECONDS = 0.2


class WritesPendingError(RedriveError):
    """The broker has received messages, and neither stores nor refuses them."""

    reason = "WritesPending"


class DeadLetterTopicLostError(RedriveError):
    """The dead-letter topic was deleted while a run moved dead letters."""

    reason = "DeadLetterTopicLost"


def topic_lost(topic: TopicName, got: object) -> DeadLetterTopicLostError:
    """Return the error of a dead-letter topic of which nothing is left."""
    return DeadLetterTopicLostError(
        f"{topic} was deleted while the run moved dead letters, and those that were not moved by "
        "then are lost; or it was emptied and unloaded, or the replay role lost its rights there",
        got=got,
        remedy="find out who changes topics; another Replay moves what the topic holds now",
    )


def read_source(admin_url: str, topic: TopicName, subscription: str, index: int) -> Partition:
    """Read one partition of the dead-letter *topic* as it is now.

    Raises:
        DeadLetterTopicLostError: the topic is not there; the rights go with it.
        RedriveError: as for `broker.read_partition`.
    """
    try:
        return broker.read_partition(admin_url, topic, index, subscription)
    except (AdminNotFoundError, AdminForbiddenError) as error:
        raise topic_lost(topic, error) from error


def target_ends(admin_url: str, target: TopicName) -> dict[TargetPartition, EntryId]:
    """Return for each partition of *target* behind which entry all lies that is stored from now on.

    Raises:
        AdminError: the broker refuses to tell.
    """
    partitions = broker.read_partitions(admin_url, target)
    return {TargetPartition(target, each.index): each.tail for each in partitions}


def target_partitions(admin_url: str, target: TopicName) -> frozenset[TargetPartition]:
    """Return the partitions that *target* has, none if it is gone: rights go with a topic.

    Raises:
        AdminError: the broker does not answer.
    """
    try:
        return frozenset(broker.waited(lambda: target_ends(admin_url, target)))
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
            now = broker.read_partition(admin_url, place.topic, place.partition)
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


def proven_source(
    properties: Mapping[str, str], target: TopicName, key: LedgerKey
) -> Source | None:
    """Return from where a Replay moved a message; None if no job of the policy did.

    Args:
        properties: of a message in *target*.
        target: a topic, without a partition.
        key: of the ledger.
    """
    source = properties.get(REPLAY_SOURCE, "")
    is_proven = key.proves(properties.get(REPLAY_PROOF, ""), source, target)
    return Source.parse(source) if is_proven else None


def find_in_target(
    found: Found,
    target: ReadableTopic,
    tails: Mapping[TargetPartition, Tail],
    of: Range,
    key: LedgerKey,
) -> None:
    """Read *target* behind *tails* for messages of a range, all that the broker has received.

    Args:
        found: takes in what there is.
        target: the topic that *tails* are about.
        tails: behind which to read.
        of: the range.
        key: of the ledger.

    Raises:
        RedriveError: it can't be read.
        WritesPendingError: as for `wait_for_writes`.
    """
    for place in tails:
        wait_for_writes(target.admin_url, place)
    for partition in broker.waited(lambda: broker.read_partitions(target.admin_url, target.topic)):
        place = TargetPartition(target.topic, partition.index)
        if place not in tails:
            continue
        after = tails[place].entry
        found.ends[place] = partition.tail
        if not _holds_all_behind(after, partition):
            found.trimmed.add(place)
        if behind := partition.behind(after):
            ahead = reader.prefetch(partition.entry_bytes)
            lost: list[Span] = []
            for message in reader.read_messages(
                target, partition.index, after, behind, ahead, lost
            ):
                found.add(of, proven_source(read_properties(message) or {}, target.topic, key))
            if not lost:
                continue
            # Readers pass over what is trimmed under way, and say nothing.
            now = broker.waited(
                functools.partial(
                    broker.read_partition, target.admin_url, target.topic, partition.index
                )
            )
            if not _holds_all_behind(after, now):
                found.trimmed.add(place)


def _holds_all_behind(after: EntryId, partition: Partition) -> bool:
    """Whether nothing that was written behind *after* is trimmed.

    Ledgers go as a whole, the oldest first. Besides, each time a topic is loaded, those that were
    never written to.
    """
    return min(partition.held, default=math.inf) <= after.ledger
