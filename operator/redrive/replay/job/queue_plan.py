"""Plan of a Replay of RocketMQ at one master, and the readers of messages that it is made from.

The driver reads the messages itself, or tasks of Spark read parts of the queues and evaluate the
condition of the selection. Tasks only read: the driver alone writes the plan and sends messages. So
a repeated task has no effect, and needs no lease.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.files import job_credentials
from redrive.reading import broker
from redrive.reading.queues import MessageQueue, QueueCluster
from redrive.reading.rows import DeadLetterRow
from redrive.replay.job.plan import ScannedMessage

RECORD_BYTES, RECORD_OFFSETS, RECORD_PARTS = 64 * 2**20, 2**24, 2**18
"""Limits of a record: its bytes, offsets, and ranges or refused messages. A broker takes 4 MiB."""
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


Offsets = dict[int, set[int]]
"""Offsets by queue."""


@dataclass
class Share:
    """The part of a plan at one master.

    Attributes:
        target: target topic.
        after: offset at which each queue of the target ended when the plan was made; empty if the
            target has lost copies since then.
        scanned: number of messages that were read.
        unevaluated: number of these for which the condition could not be computed.
        selected: dead letters to move.
        refused: causes of those that can't be moved, by id.
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
    selected: Offsets = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    masters: tuple[str, ...] = ()
    moved: Offsets = field(default_factory=lambda: defaultdict(set))
    gone: Offsets = field(default_factory=lambda: defaultdict(set))
    unproven: Offsets = field(default_factory=lambda: defaultdict(set))
    repeated: Offsets = field(default_factory=lambda: defaultdict(set))

    def left(self, queue: int) -> set[int]:
        """Return the offsets of a queue that are not settled."""
        return self.selected[queue] - self.moved[queue] - self.gone[queue]

    @property
    def matched(self) -> int:
        """Return the number of messages in the plan."""
        return len(self.refused) + count_offsets(self.selected)

    @property
    def skipped(self) -> int:
        """Return the number of dead letters that needed no move, or can't be read any more."""
        return sum(len(gone - self.moved[queue]) for queue, gone in self.gone.items())

    @property
    def doubled(self) -> int:
        """Return the number of moved dead letters that the target may contain twice."""
        doubts = ((self.repeated[n] | self.unproven[n]) & self.moved[n] for n in self.selected)
        return sum(map(len, doubts))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a record."""
        offsets = {name: write_offsets(getattr(self, name)) for name in ("selected", "unproven")}
        names = "target", "after", "scanned", "unevaluated", "refused", "masters"
        return offsets | {name: getattr(self, name) for name in names}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Share:
        """Return the plan in a record.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it has another form.
        """
        after = {int(queue): int(offset) for queue, offset in record["after"].items()}
        names = "target", "scanned", "unevaluated", "refused"
        fields = {name: record[name] for name in names}
        fields |= {name: read_offsets(record[name]) for name in ("selected", "unproven")}
        return cls(after=after, masters=tuple(record["masters"]), **fields)


def add_offsets(offsets: Offsets, others: Offsets, but: Offsets | None = None) -> None:
    """Add others to offsets, without those in *but*."""
    for queue, numbers in others.items():
        offsets[queue] |= numbers - (but or {}).get(queue, set())


def count_offsets(offsets: Offsets) -> int:
    """Return the number of offsets of all queues."""
    return sum(map(len, offsets.values()))


def write_offsets(offsets: Offsets) -> dict[str, list[list[int]]]:
    """Return offsets as pairs of the first one and the one after the last of adjacent ones."""
    written = {}
    for queue, numbers in offsets.items():
        groups = itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
        runs = ([number for _, number in group] for _, group in groups)
        written[str(queue)] = [[run[0], run[-1] + 1] for run in runs]
    return written


def read_offsets(written: Mapping[str, list[list[int]]]) -> Offsets:
    """Return offsets from their pairs.

    Raises:
        ValueError: there are more than a plan has.
    """
    count = sum(max(0, last - first) for runs in written.values() for first, last in runs)
    if count > RECORD_OFFSETS:
        raise ValueError(f"{count} offsets in a record")
    offsets: Offsets = defaultdict(set)
    for queue, runs in written.items():
        offsets[int(queue)] = set(itertools.chain.from_iterable(range(*run) for run in runs))
    return offsets
