"""One scan of what rests → the plan of a Replay: for each range what to move and what is refused.

The plan is what a dry run shows, what the account is drawn up against, and what a run that is
interrupted goes on with: it is made once, before anything is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pulsar

from redrive.policy.naming import TopicName
from redrive.replay.ledger.records import RangePlan, RefusedEntry
from redrive.replay.topic import bitmap, broker, reading
from redrive.replay.topic.position import MAX_BATCH, Position
from redrive.replay.topic.ranges import Piece, Range
from redrive.replay.topic.rows import DeadLetterRow


class Sighting(NamedTuple):
    """What a plan has to know of a message."""

    position: Position
    batch_size: int
    chunked: bool
    encrypted: bool
    unreadable: bool
    selected: bool

    @classmethod
    def of(cls, letter: DeadLetterRow) -> Sighting:
        """Take *letter* as selected."""
        kinds = letter.chunked, letter.encrypted, letter.unreadable
        return cls(letter.position, letter.batch_size, *kinds, selected=True)


@dataclass(frozen=True)
class Scan:
    """What one task looks at.

    Attributes:
        moved: entries that are on record as moved, a bitmap: they are left out.
        ahead: see `reading.prefetch`.
    """

    service_url: str
    topic: TopicName
    piece: Piece
    moved: int
    ahead: int


def scan(what: Scan) -> tuple[Range, RangePlan]:
    """Plan a range of which everything is selected."""
    with broker.connect(what.service_url) as client:
        of = what.piece.range
        return of, plan(of, map(Sighting.of, letters(client, what)))


def letters(client: pulsar.Client, what: Scan) -> Iterator[DeadLetterRow]:
    """Read the messages that *what* is about; errors are those of `reading.messages`."""
    of, resting = what.piece.range, what.piece.resting & ~what.moved
    yield from reading.of_entries(client, what.topic, of, resting, what.ahead)


def plan(of: Range, seen: Iterable[Sighting]) -> RangePlan:
    """Plan the messages of one range, in the order they were written.

    A broker acknowledges entries, not messages. So an entry of which only a part is selected is
    refused: what is sent of it would be sent again by the next Replay.
    """
    scanned, selected = 0, []
    sizes: dict[int, int] = {}
    refused: list[RefusedEntry] = []
    for entry, group in itertools.groupby(seen, key=lambda each: each.position.entry_id):
        here = list(group)
        scanned += len(here)
        count = sum(each.selected for each in here)
        if not count:
            continue
        if cause := _refusal(here[0], len(here), count):
            refused.append(RefusedEntry(entry, count, cause))
            continue
        offset = entry.entry - of.first
        selected.append(offset)
        if count > 1:
            sizes[offset] = count
    return RangePlan(scanned, bitmap.of(selected, of.size), sizes, tuple(refused))


def _refusal(first: Sighting, found: int, selected: int) -> str:
    """Say why an entry can't be moved; nothing if it can.

    Args:
        first: its first message.
        found: how many messages of it were read.
        selected: how many of them are selected.
    """
    if first.chunked:
        return "Chunked"
    if first.encrypted:
        return "Encrypted"
    if first.unreadable:
        return "UnreadableProperties"
    if first.batch_size > MAX_BATCH:
        return "BatchTooLarge"
    return "" if selected == found == first.batch_size else "PartOfBatch"
