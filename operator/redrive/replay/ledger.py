"""The ledger of a Replay: a compacted topic with one owner.

The ledger of a dead-letter topic: which of its messages were moved, by which Replay.

A topic that the operator makes beside the dead-letter topic, and that outlives Replays. Whoever
opens it fences off all who had it open before: a broker refuses whatever they write from then on.
What it says is the truth; acknowledgements, which a broker may forget, only follow it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar, Self

import pulsar

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.positions import EntryId
from redrive.replay.records import OWNER, PERMIT, Permit, Records

WRITER = "redrive-owner"
"""A property of each record: the run that wrote it."""
READ_MILLISECONDS = 30_000

logger = logging.getLogger(__name__)


class FencedError(RedriveError):
    """Another run has taken the ledger over."""

    reason: ClassVar[str] = "Fenced"


class LedgerUnavailableError(RedriveError):
    """The broker does not take a record."""

    reason: ClassVar[str] = "LedgerUnavailable"


class LedgerLostError(RedriveError):
    """The ledger lacks what was put on record."""

    reason: ClassVar[str] = "LedgerLost"


class Ledger:
    """A ledger that this run owns, until another takes it over.

    Args:
        client: stays open as long as the ledger is used.
        topic: the ledger's own.
        owner: names this run, and no other.

    Attributes:
        records: all of them, those included that this run has written.
        fencing_token: the position of the record with which this run took the ledger over. Each
            later run has a higher one.

    Raises:
        FencedError: from each method, once another run owns the ledger.
        LedgerUnavailableError: likewise, when the broker does not answer for
            `broker.WAIT_SECONDS`.
    """

    def __init__(self, client: pulsar.Client, topic: TopicName, owner: str) -> None:
        self.records = Records()
        self._client, self._topic, self._owner = client, topic, owner
        self._sequence_ids = itertools.count(1)  # the client takes 0 for none
        self._producer = broker.opened(
            f"open the ledger {topic}",
            "produce and consume",
            lambda: client.create_producer(
                str(topic),
                access_mode=pulsar.ProducerAccessMode.ExclusiveWithFencing,
                # Sequence ids of its own under a name of its own: the client numbers messages from
                # the start again when it reconnects before a first receipt, and a topic that
                # deduplicates drops them then.
                producer_name=f"redrive-ledger-{os.urandom(8).hex()}",
                batching_enabled=False,
                # Without, compaction keeps records that are empty, see `sequence_topic`.
                compression_type=pulsar.CompressionType.LZ4,
            ),
        )
        takeover = self.write(OWNER, owner)
        self.fencing_token = EntryId(takeover.ledger_id(), takeover.entry_id())
        # Read after the takeover: nothing is written any more that is not seen.
        self.records = self._read()

    @classmethod
    @contextmanager
    def open(cls, service_url: str, topic: TopicName, owner: str) -> Iterator[Self]:
        """Take the ledger *topic* over, and close it in the end."""
        with broker.connect(service_url) as client:
            yield cls(client, topic, owner)

    def write(self, key: str, value: object) -> pulsar.MessageId:
        """Put *value*, as JSON, in the place of what *key* has; None takes it away.

        When this returns, the broker has stored the record: it has answered with the entry. A
        crash before leaves the old value, or the new. A record may be stored twice, which changes
        nothing.
        """
        content = b"" if value is None else json.dumps(value, separators=(",", ":")).encode()
        deadline = time.monotonic() + broker.WAIT_SECONDS
        while True:
            try:
                stored = self._producer.send(
                    content,
                    sequence_id=next(self._sequence_ids),
                    partition_key=key,
                    properties={WRITER: self._owner},
                    # It tells of entries of this cluster, by ids that others have given, too.
                    disable_replication=True,
                )
                if stored.ledger_id() >= 0:
                    break
                problem = "no entry"  # taken for a duplicate: once more, under a higher id
            except pulsar.ProducerFenced as error:
                raise _fenced() from error
            except pulsar.PulsarException as error:
                problem = str(error)  # it may be stored anyway: once more does no harm
            if time.monotonic() > deadline:
                raise LedgerUnavailableError(
                    "the broker does not store a record of the ledger",
                    got=problem,
                    remedy="the job is started again automatically and resumes where it was",
                )
            logger.warning("the ledger does not answer, trying again: %s", problem)
            time.sleep(1)
        self.records.apply(key, content)
        return stored

    def repair(self) -> None:
        """Write again what the topic lacks of the records: it may have been deleted meanwhile.

        The operator creates it again, and a producer that reconnects does not notice.
        """
        stored = dict(self._read().items())
        lost = [(key, value) for key, value in self.records.items() if stored.get(key) != value]
        if lost:
            logger.warning("the ledger has lost %d records; they are written again", len(lost))
        for key, value in lost:
            self.write(key, value)

    def _read(self) -> Records:
        return broker.waited(lambda: read(self._client, self._topic))


class Lease:
    """The right of one task to send; it ends when another run takes the ledger over.

    Args:
        client: stays open as long as the lease is held.
        topic: the ledger's.
        owner: the run that gave the lease.
        since: the id of the record with which it did, serialized.
        permit: what the task may do at first.

    Attributes:
        permit: what it may do, as of the last check.
    """

    def __init__(
        self,
        client: pulsar.Client,
        topic: TopicName,
        owner: str,
        since: bytes,
        permit: Permit,
    ) -> None:
        self.permit = permit
        self._owner, self._topic = owner, topic
        # Compacted, for the sake of a task that slept while records were compacted away: of the
        # key `owner` it sees the last.
        self._reader = broker.opened(
            f"read the ledger {topic}",
            "consume",
            lambda: client.create_reader(
                str(topic), pulsar.MessageId.deserialize(since), is_read_compacted=True
            ),
        )

    def check(self) -> None:
        """Pass if no other run has taken over; each send is preceded by a recent check.

        Raises:
            FencedError: another has.
            ReplayRoleRefusedError: the broker does not answer, or does not let it be read.
        """
        with broker.refusals(f"read the ledger {self._topic}", "consume"):
            while self._reader.has_message_available():
                record = self._reader.read_next(READ_MILLISECONDS)
                if record.properties().get(WRITER) != self._owner:
                    raise _fenced()
                if record.partition_key() == PERMIT:
                    with suppress(ValueError):  # anybody with the right to produce may write it
                        self.permit = Permit.from_json(record.data())


def _fenced() -> FencedError:
    return FencedError(
        "another run has taken over the ledger of this dead-letter topic",
        remedy="nothing: the other run goes on from what this one has moved",
    )


def lost(uid: str) -> LedgerLostError:
    """Return the error of a ledger that has no plan of Replay *uid* any more, which was planned."""
    return LedgerLostError(
        "the ledger has lost the plan of this Replay: its topic was deleted, or another Replay "
        "has ended meanwhile",
        got=f"no plan of {uid}",
        remedy="make another Replay: it goes on from what is on record as moved",
    )


def read(client: pulsar.Client, topic: TopicName) -> Records:
    """Read what a ledger says, whoever owns it.

    Raises:
        ReplayRoleRefusedError: it is not there, or the role may not read it.
    """
    records = Records()
    with broker.refusals(f"read the ledger {topic}", "consume"):
        reader = client.create_reader(str(topic), pulsar.MessageId.earliest, is_read_compacted=True)
        try:
            while reader.has_message_available():
                record = reader.read_next(READ_MILLISECONDS)
                records.apply(record.partition_key(), record.data())
        finally:
            broker.close(reader)
    if records.skipped:
        logger.warning("ledger %s: %d invalid records skipped", topic, records.skipped)
    return records
