"""Outcome of replayed messages: handled, waiting, or dead again.

Each retry stores a copy of the message in another topic, and all copies name the Replay. So the job
reads the source, retry and dead-letter topic from the start of the run, and compares the messages
with the acknowledgements of the subscription. Reading does not affect the subscription.
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
from redrive.replay.account import CAUSES, Account, counts
from redrive.replay.job.plan import ENDING, SHOWN, DesiredState, ReplayGoneError
from redrive.replay.spec import ReplayJob

POLL_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MessageOutcomes:
    """Numbers of replayed messages by outcome.

    Attributes:
        moved: messages that the run moved.
        waiting: messages that are not acknowledged: undelivered, delayed or in-flight. A message
            that a consumer has forwarded but not acknowledged yet counts twice.
        dead: messages that were dead-lettered again.
        causes: the most frequent exception classes of these, with their numbers.
        settled: True if no message waits.
    """

    moved: int
    waiting: int
    dead: int
    causes: Mapping[str, int]
    settled: bool

    @property
    def handled(self) -> int:
        """Return the number of handled messages: neither waiting nor dead again.

        Messages that expired or were skipped count as handled. A killed consumer may leave two
        copies of a message, and both count.
        """
        return max(0, self.moved - self.waiting - self.dead)

    def to_status(self) -> dict[str, Any]:
        """Return the value of `status.run.outcome` of the Replay, without the time."""
        return {
            "handled": self.handled,
            "waiting": self.waiting,
            "deadAgain": self.dead,
            "causes": counts(self.causes),
            "settled": self.settled,
        }


class OutcomeReporter(Protocol):
    """Publishes the outcome of replayed messages."""

    def report_outcomes(self, outcomes: MessageOutcomes) -> None:
        """Publish the latest outcomes."""

    def desired_state(self) -> DesiredState:
        """Return the desired state of the run."""


def live_topics(job: ReplayJob) -> tuple[TopicName, ...]:
    """Return the topics in which messages of a run may wait, in the order of their path.

    A target outside the policy is not included, because its subscriptions are unknown.
    """
    source, retry = job.policy.topic, job.policy.retry_topic
    return (source, retry) if job.destination == source else (retry,)


def follow(job: ReplayJob, reporter: OutcomeReporter) -> None:
    """Poll the outcome of moved messages, until all are settled or `job.follow_for` has passed.

    Polling ends early with the Replay. Errors are logged and the poll is repeated, because the run
    is finished already.
    """
    ends = time.monotonic() + (job.follow_for or 0.0)
    stop = _Stop(reporter)
    with broker.connect(job.service_url) as client:
        outcome_reader = None
        while not stop.is_requested():
            try:
                outcome_reader = outcome_reader or OutcomeReader(job, client, stop.check)
                outcomes = outcome_reader.read()
                reporter.report_outcomes(outcomes)
                if outcomes.settled:
                    return
            except ReplayGoneError:
                return
            except (RedriveError, pulsar.PulsarException):
                logger.warning("outcome of replayed messages could not be read", exc_info=True)
            remaining = ends - time.monotonic()
            if remaining <= 0:
                return
            time.sleep(min(POLL_SECONDS, remaining))


class _Stop:
    """Polls the desired state of the Replay."""

    def __init__(self, reporter: OutcomeReporter) -> None:
        self._reporter = reporter
        self._polled = time.monotonic()

    def check(self) -> None:
        """Poll if the last poll is `POLL_SECONDS` old. Called for each message that is read.

        Raises:
            ReplayGoneError: the run has to end.
        """
        if time.monotonic() - self._polled >= POLL_SECONDS and self.is_requested():
            raise ReplayGoneError("the run has to end", remedy="no action needed")

    def is_requested(self) -> bool:
        """Return True if the run has to end; False if the API server does not answer."""
        self._polled = time.monotonic()
        try:
            return self._reporter.desired_state() in ENDING
        except RedriveError:
            logger.warning("state of the Replay could not be read, continuing", exc_info=True)
            return False


class OutcomeReader:
    """Reads the topics of a run repeatedly, and each message once.

    Args:
        job: the run. Its ledger records the moved messages and the positions to read from.
        client: client that stays open meanwhile.
        check: function that is called for each message; its errors end the read.

    Raises:
        ReplayRoleRefusedError: the ledger does not exist or cannot be read.
        RedriveError: the ledger topic was deleted and created again.
    """

    def __init__(
        self, job: ReplayJob, client: broker.ReadingClient, check: Callable[[], None]
    ) -> None:
        key = ledger.mounted_key()
        records = ledger.read(client, job.policy.ledger_topic, key, job.admin_url)
        if job.uid not in records.headers:
            raise ledger.lost(job.uid)
        self._job, self._client, self._check = job, client, check
        self._moved = Account.of(job.uid, records).moved
        self._name = f"{job.namespace}/{job.name}"
        # Partitions that are added later are read from their first message.
        self._positions = dict(records.headers[job.uid].began)
        self._live = {topic: LiveMessages() for topic in live_topics(job)}
        self._died = 0
        self._causes: Counter[str] = Counter()

    def read(self) -> MessageOutcomes:
        """Read new messages and acknowledgements. A failed read can be repeated.

        Raises:
            RedriveError: the broker refuses or does not answer.
            PulsarException: likewise.
        """
        # Acknowledgements are read first, then messages, dead letters last. A message is
        # acknowledged after its next copy is stored, so the read contains at least one of them.
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
            # Acknowledgements of partitions that were added meanwhile are unknown.
            self._live[topic].waiting(acknowledged.get((topic, partition.index), partition))
            for topic, partition in held
        )
        for partition in dead:
            causes = Counter(_cause(message) for message in self._new(dead_letters, partition))
            self._died += causes.total()
            self._causes = Counter(dict((self._causes + causes).most_common(CAUSES)))
        shown_causes = dict(self._causes.most_common(SHOWN))
        # Copies may count twice, so the numbers are limited to the moved messages.
        shown = min(waiting, max(0, self._moved - self._died))
        return MessageOutcomes(self._moved, shown, self._died, shown_causes, settled=not waiting)

    def _snapshots(self, subscription: str = "") -> list[tuple[TopicName, Partition]]:
        return [
            (topic, partition)
            for topic in self._live
            for partition in broker.read_partitions(self._job.admin_url, topic, subscription)
        ]

    def _new(self, topic: TopicName, partition: Partition) -> Iterator[ReadMessage]:
        """Yield messages of the Replay that a partition received since the last read."""
        place = TargetPartition(topic, partition.index)
        after = self._positions.get(place, NOWHERE)
        for message in reader.read_messages(
            # A failed read is repeated by the next poll.
            ReadableTopic(self._client, self._job.admin_url, topic, open_seconds=0),
            partition.index,
            after,
            partition.behind(after),
            reader.prefetch(partition.entry_bytes),
        ):
            self._check()
            if (read_properties(message) or {}).get(REPLAY) == self._name:
                yield message
        self._positions[place] = max(after, partition.end)


def _cause(message: ReadMessage) -> str:
    """Return the exception class of a dead letter; empty if its consumer did not record it.

    Consumers in Java keep all properties, so those of the replay and an older cause remain.
    """
    carried = read_properties(message) or {}
    return "" if REPLAY_SOURCE in carried else carried.get(CAUSE_TYPE, "")[:MAX_CAUSE]


class LiveMessages:
    """Positions of messages in a topic, stored compactly by range."""

    def __init__(self) -> None:
        self._entries: dict[Range, int] = {}
        self._batches: dict[tuple[int, EntryId], int] = {}

    def add(self, partition: int, message_id: pulsar.MessageId) -> None:
        """Add a message. Repetitions have no effect."""
        entry = EntryId(message_id.ledger_id(), message_id.entry_id())
        index = message_id.batch_index()
        entry_range = Range.of(partition, Position(*entry, 0))
        offset = 1 << entry.entry - entry_range.first
        self._entries[entry_range] = self._entries.get(entry_range, bitmap.EMPTY) | offset
        if index >= 0:
            place = partition, entry
            self._batches[place] = self._batches.get(place, bitmap.EMPTY) | 1 << index

    def waiting(self, partition: Partition) -> int:
        """Return the number of unacknowledged messages of *partition*.

        Messages of a batch are acknowledged together.
        """
        unacknowledged = {
            entry_range: entries & ~ranges.settled(entry_range, partition)
            for entry_range, entries in self._entries.items()
            if entry_range.partition == partition.index
        }
        more = 0
        for (index, entry), indexes in self._batches.items():
            entry_range = Range.of(index, Position(*entry, 0))
            entries = unacknowledged.get(entry_range, bitmap.EMPTY)
            if bitmap.contains(entries, entry.entry - entry_range.first):
                more += indexes.bit_count() - 1
        return sum(entries.bit_count() for entries in unacknowledged.values()) + more
