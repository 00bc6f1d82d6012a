"""What became of the messages that a run has moved: handled, waiting yet, or dead again.

Each retry makes another message of one, in another place, and all of them name the Replay. So what
was written since the run began is read in the source, retry and dead-letter topic, and the cursors
of the subscription tell what of it is acknowledged. Nothing is taken away.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pulsar

from redrive.errors import RedriveError
from redrive.messages import read_properties
from redrive.policy.envelope import CAUSE_TYPE, MAX_CAUSE, REPLAY, REPLAY_SOURCE
from redrive.policy.naming import TopicName
from redrive.reading import bitmap, broker, ranges, reader
from redrive.reading.positions import NOWHERE, EntryId, Position, TargetPartition
from redrive.reading.ranges import Partition, Range
from redrive.reading.reader import ReadableTopic
from redrive.reading.stored import ReadMessage
from redrive.replay import ledger
from redrive.replay.job.plan import CAUSES, SHOWN, Wish, counts
from redrive.replay.records import Account
from redrive.replay.spec import ReplayJob

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
        settled: whether nothing waits.
    """

    moved: int
    waiting: int
    dead: int
    causes: Mapping[str, int]
    settled: bool

    @property
    def handled(self) -> int:
        """Return how many were handled; acknowledged by an expiry or by hand is that, too.

        A consumer that is killed may leave two copies of a message, each of which is counted.
        """
        return max(0, self.moved - self.waiting - self.dead)

    def to_status(self) -> dict[str, Any]:
        """Write it as `status.run.outcome` of the Replay, without the time."""
        return {
            "handled": self.handled,
            "waiting": self.waiting,
            "deadAgain": self.dead,
            "causes": counts(self.causes),
            "settled": self.settled,
        }


class AftermathReporter(Protocol):
    """Shows what became of the messages."""

    def report_outcomes(self, aftermath: Aftermath) -> None:
        """Show the latest."""

    def desired_state(self) -> Wish:
        """Return what is wanted."""


def live_topics(job: ReplayJob) -> tuple[TopicName, ...]:
    """Return where messages of a run may wait, in the order in which they go from one to the next.

    A target that is not the policy's own is none of them: who consumes there is not known.
    """
    source, retry = job.policy.topic, job.policy.retry_topic
    return (source, retry) if job.destination == source else (retry,)


def follow(job: ReplayJob, reporter: AftermathReporter) -> None:
    """Look at what becomes of what a run has moved, until all is settled or `job.follow_for` over.

    It ends early with its Replay. The run is finished already, so nothing here fails it: what can't
    be looked at is looked at again.
    """
    ends = time.monotonic() + (job.follow_for or 0.0)
    stop = _Stop(reporter)
    with broker.connect(job.service_url) as client:
        look = None
        while not stop.is_asked():
            try:
                look = look or AftermathLook(job, client, stop.check)
                found = look.take()
                reporter.report_outcomes(found)
                if found.settled:
                    return
            except _StopAskedError:
                return
            except (RedriveError, pulsar.PulsarException):
                logger.warning("it is not known what became of the messages", exc_info=True)
            left = ends - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(LOOK_SECONDS, left))


class _StopAskedError(Exception):
    """The Replay is deleted, has ended, or has reached its deadline."""


class _Stop:
    """Asks from time to time whether the Replay still wants to know."""

    def __init__(self, reporter: AftermathReporter) -> None:
        self._reporter = reporter
        self._asked = time.monotonic()

    def check(self) -> None:
        """Called for each message that is read: a look at a busy topic takes long.

        Raises:
            _StopAskedError: it does not.
        """
        if time.monotonic() - self._asked >= LOOK_SECONDS and self.is_asked():
            raise _StopAskedError

    def is_asked(self) -> bool:
        """Ask now; without an answer it goes on."""
        self._asked = time.monotonic()
        try:
            return self._reporter.desired_state() in {Wish.END, Wish.EXPIRE, Wish.CANCEL}
        except RedriveError:
            logger.warning("it is not known whether the Replay has ended", exc_info=True)
            return False


class AftermathLook:
    """Looks at the topics of a run again and again, and reads each message of them once.

    Args:
        job: the run; its ledger says what it has moved, and where its messages begin.
        client: stays open meanwhile.
        check: called for each message that is read; what it raises ends the look.

    Raises:
        ReplayRoleRefusedError: the ledger is not there, or can't be read.
        LedgerLostError: its topic was deleted since, and created again.
    """

    def __init__(
        self, job: ReplayJob, client: broker.ReadingClient, check: Callable[[], None]
    ) -> None:
        records = ledger.read(client, job.policy.ledger_topic, ledger.mounted_key())
        if job.uid not in records.headers:
            raise ledger.lost(job.uid)
        self._job, self._client, self._check = job, client, check
        self._moved = Account.of(job.uid, records).moved
        self._name = f"{job.namespace}/{job.name}"
        # A partition that was added later is read from its first message on.
        self._read = dict(records.headers[job.uid].began)
        self._live = {topic: LiveMessages() for topic in live_topics(job)}
        self._died = 0
        self._causes: Counter[str] = Counter()

    def take(self) -> Aftermath:
        """Look once; one that fails half-way can be taken again.

        Raises:
            RedriveError: the broker does not let the role look, or does not answer.
            PulsarException: likewise.
        """
        # What is acknowledged, then what there is, dead letters last. A message is acknowledged
        # once the next one is stored, which is among these then: none is missed.
        acknowledged = {
            (topic, partition.index): partition
            for topic, partition in self._snapshots(self._job.policy.subscription)
        }
        held = self._snapshots()
        dead_letters = self._job.policy.dead_letter_topic
        dead = broker.read_partitions(self._job.admin_url, dead_letters)
        for topic, partition in held:
            for message in self._new(topic, partition):
                self._live[topic].add(partition.index, message.message_id())
        waiting = sum(
            # Of a partition that was added in between nothing is known to be acknowledged.
            self._live[topic].waiting(acknowledged.get((topic, partition.index), partition))
            for topic, partition in held
        )
        for partition in dead:
            found = Counter(_cause(each) for each in self._new(dead_letters, partition))
            self._died += found.total()
            self._causes = Counter(dict((self._causes + found).most_common(CAUSES)))
        causes = dict(self._causes.most_common(SHOWN))
        # Some are in two places; together they are no more than were moved.
        shown = min(waiting, max(0, self._moved - self._died))
        return Aftermath(self._moved, shown, self._died, causes, settled=not waiting)

    def _snapshots(self, subscription: str = "") -> list[tuple[TopicName, Partition]]:
        return [
            (topic, partition)
            for topic in self._live
            for partition in broker.read_partitions(self._job.admin_url, topic, subscription)
        ]

    def _new(self, topic: TopicName, partition: Partition) -> Iterator[ReadMessage]:
        """Read what came to a partition since the last look, and names the Replay."""
        of = TargetPartition(topic, partition.index)
        after = self._read.get(of, NOWHERE)
        for message in reader.read_messages(
            # What can't be looked at now is looked at again, if the Replay still wants it.
            ReadableTopic(self._client, self._job.admin_url, topic, open_seconds=0),
            partition.index,
            after,
            partition.behind(after),
            reader.prefetch(partition.entry_bytes),
        ):
            self._check()
            if (read_properties(message) or {}).get(REPLAY) == self._name:
                yield message
        self._read[of] = max(after, partition.end)


def _cause(message: ReadMessage) -> str:
    """Return what a dead letter died of; empty where its consumer did not say.

    One in Java leaves all properties as they are: those of the replay, and an older cause.
    """
    carried = read_properties(message) or {}
    return "" if REPLAY_SOURCE in carried else carried.get(CAUSE_TYPE, "")[:MAX_CAUSE]


class LiveMessages:
    """Where messages lie in a topic: in ranges, as few bytes for each. Pure."""

    def __init__(self) -> None:
        self._entries: dict[Range, int] = {}
        self._batches: dict[tuple[int, EntryId], int] = {}

    def add(self, partition: int, message_id: pulsar.MessageId) -> None:
        """Take note of a message; of the same one again, nothing."""
        entry = EntryId(message_id.ledger_id(), message_id.entry_id())
        index = message_id.batch_index()
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
