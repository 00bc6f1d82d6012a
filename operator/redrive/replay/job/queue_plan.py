"""Plan of a Replay of RocketMQ at one master, and the readers of messages that it is made from.

The driver reads the messages itself, or tasks of Spark read parts of the queues and evaluate the
condition of the selection. Tasks only read: the driver alone writes the plan and sends messages. So
a repeated task has no effect, and needs no lease.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from redrive.admin.rocketmq import MAX_OFFSET
from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.files import job_credentials
from redrive.reading import broker
from redrive.reading.queues import MessageQueue, QueueCluster
from redrive.reading.rows import DeadLetterRow
from redrive.replay.account import CauseFigures, frequent_causes
from redrive.replay.job.plan import SHOWN
from redrive.replay.job.scanned import ScannedMessage
from redrive.replay.spec import FailureCause

RECORD_BYTES, RECORD_OFFSETS, RECORD_PARTS = 64 * 2**20, 2**24, 2**18
"""Limits of a record: its bytes, offsets, and ranges or refused messages. A broker takes 4 MiB."""
_MAX_DOUBTS = 2**16
"""Maximum number of ranges of dead letters in doubt in a record: 0.5 MiB."""
_OFFSET_BITS = MAX_OFFSET.bit_length()
PART_OFFSETS = 4_096
"""Offsets of a queue that one task reads."""
_PULLS = 16
"""Pulls of a task by one connection. It keeps their messages: 256 KiB at most, or one, of each."""

QueueScan = Callable[[Sequence[MessageQueue]], Iterator[tuple[MessageQueue, ScannedMessage]]]
"""Yields the messages of queues in order, each with its queue or a part of it."""
QueueEngine = Callable[[], AbstractContextManager[QueueScan]]
"""Opens tasks of Spark, which end with the plan."""


def parts(queues: Sequence[MessageQueue]) -> list[MessageQueue]:
    """Divide queues into parts for one task each, in order."""
    return [
        replace(queue, offsets=queue.offsets[at : at + PART_OFFSETS])
        for queue in queues
        for at in range(0, len(queue.offsets), PART_OFFSETS)
    ]


def read_part(messages: RocketMQMessages, part: MessageQueue) -> Iterator[DeadLetterRow]:
    """Yield the messages of a part in a task. It waits for an unreachable broker.

    Raises:
        RedriveError: see `QueueCluster.pulls`.
    """
    offset, stop = part.offsets.start, part.offsets.stop

    def read() -> tuple[int, list[DeadLetterRow]]:
        others = replace(part, offsets=range(offset, stop))
        with QueueCluster(messages, job_credentials()) as cluster:
            pulls = list(itertools.islice(cluster.pulls(others), _PULLS))
        return pulls[-1][0].stop, [m.row(part) for _, stored in pulls for m in stored]

    while offset < stop:
        offset, rows = broker.waited(read)
        yield from rows


def position_of(queue: int, offset: int) -> int:
    """Return a message of a master as one number: the queue in the bits above those of offsets."""
    return queue << _OFFSET_BITS | offset


def offsets_by_queue(positions: Iterable[int]) -> Mapping[int, range]:
    """Return the offsets from the first to the last of positions, by queue."""
    offsets: dict[int, range] = {}
    for queue, group in itertools.groupby(sorted(positions), lambda p: p >> _OFFSET_BITS):
        ordered = list(group)
        offsets[queue] = range(ordered[0] & MAX_OFFSET, (ordered[-1] & MAX_OFFSET) + 1)
    return offsets


@dataclass
class Share:
    """The part of a plan at one master. Sets contain positions, see `position_of`.

    Attributes:
        target: target topic.
        after: offset at which each queue of the target ended when the plan was made; empty if the
            target has lost copies since then.
        scanned: number of messages that were read.
        unevaluated: number of these for which the condition could not be computed.
        selected: dead letters to move.
        last: highest position of these in the log of the master. Later messages with their offsets
            are of a topic that was deleted and created again.
        refused: causes of those that can't be moved, by id.
        causes: frequent causes of the failures of the selected dead letters.
        samples: ids of some of them.
        masters: names of all masters in the plan.
        moved: dead letters whose copies are stored.
        gone: dead letters that the master deleted, or another Replay moved, after the plan.
        unproven: dead letters whose copies the target may have lost.
        repeated: dead letters with two copies in the target.
    """

    target: str
    after: dict[int, int]
    scanned: int = 0
    unevaluated: int = 0
    selected: set[int] = field(default_factory=set)
    last: int = -1
    refused: dict[str, str] = field(default_factory=dict)
    causes: dict[FailureCause, CauseFigures] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    masters: tuple[str, ...] = ()
    moved: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    unproven: set[int] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)

    @property
    def left(self) -> set[int]:
        """Return the dead letters that are not settled."""
        return self.selected - self.moved - self.gone

    @property
    def matched(self) -> int:
        """Return the number of messages in the plan."""
        return len(self.refused) + len(self.selected)

    @property
    def skipped(self) -> int:
        """Return the number of dead letters that needed no move, or can't be read any more."""
        return len(self.gone - self.moved)

    @property
    def doubled(self) -> int:
        """Return the number of moved dead letters that the target may contain twice."""
        return len((self.repeated | self.unproven) & self.moved)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a record.

        Doubts come from any number of earlier Replays, and later ones find some in this record
        alone. If they are too many ranges, those about selected dead letters are written; if these
        are too many as well, all selected dead letters are in doubt: `doubled` is an upper limit.
        """
        written = map(write_positions, (self.unproven, self.unproven & self.selected))
        unproven = next((ranges for ranges in written if len(ranges) <= _MAX_DOUBTS), None)
        causes = frequent_causes((self.causes,), SHOWN)
        names = "target", "after", "scanned", "unevaluated", "last", "refused", "samples", "masters"
        return {name: getattr(self, name) for name in names} | {
            "selected": write_positions(self.selected),
            "unproven": unproven,
            "causes": [[*failure, *figures] for failure, figures in causes.items()],
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Share:
        """Return the plan in a record.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it has another form.
        """
        names = "target", "scanned", "unevaluated", "last", "refused", "samples"
        selected, unproven = read_positions(record["selected"]), record["unproven"]
        return cls(
            after={int(queue): int(offset) for queue, offset in record["after"].items()},
            masters=tuple(record["masters"]),
            selected=selected,
            unproven=set(selected) if unproven is None else read_positions(unproven),
            causes={
                FailureCause(cause, fingerprint): CauseFigures(*figures)
                for cause, fingerprint, *figures in record["causes"]
            },
            **{name: record[name] for name in names},
        )


def write_positions(positions: Iterable[int]) -> list[list[int]]:
    """Return positions as pairs of the first one and the one after the last of adjacent ones."""
    groups = itertools.groupby(enumerate(sorted(positions)), lambda pair: pair[1] - pair[0])
    runs = ([number for _, number in group] for _, group in groups)
    return [[run[0], run[-1] + 1] for run in runs]


def read_positions(written: Sequence[Sequence[int]]) -> set[int]:
    """Return positions from their pairs.

    Raises:
        ValueError: there are more than a plan has.
    """
    count = sum(max(0, last - first) for first, last in written)
    if count > RECORD_OFFSETS:
        raise ValueError(f"{count} offsets in a record")
    return set(itertools.chain.from_iterable(range(first, last) for first, last in written))
