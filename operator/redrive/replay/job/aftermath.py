"""What became of the messages that a run has moved: handled, waiting yet, or dead again.

Each retry makes another message of one, in another place, and all of them name the Replay. So what
was written since the run began is read in the source, retry and dead-letter topic, and the cursors
of the subscription tell what of it is acknowledged. Nothing is taken away.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pulsar

from redrive.copying.reading import properties
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.policy.properties import CAUSE_TYPE, REPLAY
from redrive.replay.job.engine import Wish
from redrive.replay.job.preview import SHOWN, counts
from redrive.replay.ledger import ledger
from redrive.replay.ledger.account import Account
from redrive.replay.spec import ReplayJob
from redrive.replay.topic import bitmap, broker, ranges, reading, snapshot
from redrive.replay.topic.partition import Partition
from redrive.replay.topic.position import NOWHERE, EntryId, Position, TargetPartition
from redrive.replay.topic.ranges import Range
from redrive.replay.topic.reading import ReadableTopic

LOOK_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Aftermath:
    """Numbers of messages; `handled` is what is neither waiting nor dead again.

    Attributes:
        moved: by the run.
        waiting: not acknowledged: to be delivered, delayed, or in the hands of a consumer. Too many
            by those that a consumer has sent on, and not acknowledged yet.
        dead: dead-lettered again.
        causes: of these: the class of the exception → how many; the most frequent ones.
        settled: whether nothing waits, and nothing was on its way from one topic to the next.
    """

    moved: int
    waiting: int
    dead: int
    causes: Mapping[str, int]
    settled: bool = False

    @property
    def handled(self) -> int:
        """Return how many were handled; acknowledged by an expiry or by hand is that, too.

        A consumer that is killed may leave two copies of a message, each of which is counted.
        """
        return max(0, self.moved - self.waiting - self.dead)

    def to_status(self) -> dict[str, Any]:
        """Write it as a field of the Replay's status, but for the time."""
        return {
            "handled": self.handled,
            "waiting": self.waiting,
            "diedAgain": self.dead,
            "causes": counts(self.causes),
            "settled": self.settled,
        }


class AftermathReporter(Protocol):
    """Shows what became of the messages."""

    def report_aftermath(self, aftermath: Aftermath) -> Wish:
        """Show the latest, and return what is wanted."""


def live_topics(job: ReplayJob) -> tuple[TopicName, ...]:
    """Return where messages of a run may wait, in the order in which they go from one to the next.

    A target that is not the policy's own is none of them: who consumes there is not known.
    """
    source, retry = job.policy.topic, job.policy.retry_topic
    return (source, retry) if job.destination == source else (retry,)


def follow(job: ReplayJob, reporter: AftermathReporter) -> None:
    """Look at what becomes of what a run has moved, until all is settled or `job.follow_for` over.

    What can't be looked at is looked at again. It ends early when the Replay is deleted, or its
    deadline is reached.

    Raises:
        RedriveError: the last look failed.
        PulsarException: likewise.
    """
    deadline = time.monotonic() + (job.follow_for or 0.0)
    with broker.connect(job.service_url) as client:
        records = ledger.read(client, job.policy.ledger_topic)
        moved = Account.of(job.uid, records).moved
        look = AftermathLook(job, client, moved, records.headers[job.uid].began)
        while True:
            is_last = time.monotonic() >= deadline
            try:
                found = look.take()
                wish = reporter.report_aftermath(found)
                if found.settled or wish in {Wish.END, Wish.EXPIRE}:
                    return
            except (RedriveError, pulsar.PulsarException):
                if is_last:
                    raise
                logger.warning("what became of the messages is looked at again", exc_info=True)
            if is_last:
                return
            time.sleep(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))


class AftermathLook:
    """Looks at the topics of a run again and again, and reads each message of them once.

    Args:
        job: the run.
        client: stays open meanwhile.
        moved: how many messages the run has moved.
        began: see `Header`; a partition that is not in it is read from its first message on.
    """

    def __init__(
        self,
        job: ReplayJob,
        client: pulsar.Client,
        moved: int,
        began: Mapping[TargetPartition, EntryId],
    ) -> None:
        self._job, self._client, self._moved = job, client, moved
        self._name = f"{job.namespace}/{job.name}"
        self._read = dict(began)
        self._live = {topic: LiveMessages() for topic in live_topics(job)}
        self._causes: Counter[str] = Counter()
        self._was_empty = False

    def take(self) -> Aftermath:
        """Look once; one that fails half-way can be taken again.

        Raises:
            RedriveError: the broker does not let the role look, or does not answer.
            PulsarException: likewise.
        """
        # All before any is read, in the order in which messages go from one to the next: one on its
        # way counts in both places, and none is missed.
        policy, admin_url = self._job.policy, self._job.admin_url
        live = [
            (topic, partition)
            for topic in self._live
            for partition in snapshot.look(admin_url, topic, policy.subscription)
        ]
        dead = snapshot.look(admin_url, policy.dead_letter_topic)
        found = waiting = 0
        for topic, partition in live:
            messages = self._live[topic]
            for message in self._new(topic, partition):
                messages.add(partition.index, message.message_id())
                found += 1
            waiting += messages.waiting(partition)
        for partition in dead:
            self._causes += Counter(
                (properties(message) or {}).get(CAUSE_TYPE, "")
                for message in self._new(policy.dead_letter_topic, partition)
            )
        # A retry may go to a partition that was looked at just before: it is new in the next look.
        settled = self._was_empty and not waiting and not found
        self._was_empty = not waiting
        causes = dict(self._causes.most_common(SHOWN))
        died = self._causes.total()
        waiting = min(waiting, max(0, self._moved - died))
        return Aftermath(self._moved, waiting, died, causes, settled)

    def _new(self, topic: TopicName, partition: Partition) -> Iterator[pulsar.Message]:
        """Read what came to a partition since the last look, and names the Replay."""
        of = TargetPartition(topic, partition.index)
        after = self._read.get(of, NOWHERE)
        if partition.end <= after:
            return
        for message in reading.messages(
            ReadableTopic(self._client, self._job.admin_url, topic),
            partition.index,
            (after, partition.end),
            reading.prefetch(partition.entry_bytes),
        ):
            if (properties(message) or {}).get(REPLAY) == self._name:
                yield message
        self._read[of] = partition.end


class LiveMessages:
    """Where messages lie in a topic: in ranges, as few bytes for each. Pure."""

    def __init__(self) -> None:
        self._entries: dict[Range, int] = {}
        self._batches: dict[tuple[int, EntryId], int] = {}

    def add(self, partition: int, message_id: pulsar.MessageId) -> None:
        """Take note of a message; of the same one again, nothing."""
        entry, index = (
            EntryId(message_id.ledger_id(), message_id.entry_id()),
            message_id.batch_index(),
        )
        of = Range.of(partition, Position(*entry, 0))
        self._entries[of] = self._entries.get(of, bitmap.EMPTY) | 1 << entry.entry - of.first
        if index >= 0:
            place = partition, entry
            self._batches[place] = self._batches.get(place, bitmap.EMPTY) | 1 << index

    def waiting(self, partition: Partition) -> int:
        """Return how many messages of *partition* are not acknowledged.

        Those of a batch are so together.
        """
        resting = {
            of: entries & ~ranges.settled(of, partition)
            for of, entries in self._entries.items()
            if of.partition == partition.index
        }
        more = 0
        for (index, entry), indexes in self._batches.items():
            of = Range.of(index, Position(*entry, 0))
            if bitmap.contains(resting.get(of, bitmap.EMPTY), entry.entry - of.first):
                more += indexes.bit_count() - 1
        return sum(entries.bit_count() for entries in resting.values()) + more
