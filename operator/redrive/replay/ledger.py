"""Ledger of a dead-letter topic: a compacted topic with one owner, which records moved messages.

The operator creates the topic, and it outlives Replays. Fencing: a run that opens it excludes all
earlier owners, because the broker refuses their writes from then on. The ledger is authoritative.
Acknowledgements, which a broker may lose, follow it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from typing import Any, Self

import pulsar

from redrive.admin.errors import refused_by_setting
from redrive.auth.files import job_credentials
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.reading import broker
from redrive.reading.entries import EntryReader
from redrive.reading.positions import NOWHERE, EntryId
from redrive.reading.ranges import Range
from redrive.reading.reader import transaction_open
from redrive.reading.stored import ReadMessage
from redrive.replay.evidence import LedgerKey, SignedRecord
from redrive.replay.records import OWNER, PERMIT, Permit, Records, range_key

READ_MILLISECONDS = 30_000
READABLE_SECONDS = 10.0
"""Time for which a transaction in the ledger may block the record of a takeover."""
POLL_SECONDS = 0.5
IN_FLIGHT = 32
"""Maximum number of records that are written together."""
_AHEAD = 1_000

logger = logging.getLogger(__name__)


class FencedError(RedriveError):
    """Another run has taken the ledger over."""

    reason = "Fenced"


class Ledger:
    """A ledger that this run owns, until another run takes it over.

    Args:
        client: client that stays open as long as the ledger is used.
        topic: topic of the ledger.
        owner: unique name of this run.
        key: key that signs its records. Messages without a valid signature are skipped.

    Attributes:
        records: all records, including those of this run.
        number: number of the last record, see `SignedRecord`.
        fencing_token: position of the record with which this run took the ledger over. Later runs
            have higher ones.
        owned_since: time by the monotonic clock since which tasks of all earlier runs are stopped
            at their next check of a lease.

    Raises:
        FencedError: from each method, if another run owns the ledger.
        AdminError: from each method, if the topic is terminated.
        RedriveError: from each method, if the broker does not answer for
            `broker.WAIT_SECONDS`.
    """

    def __init__(
        self, client: broker.ReadingClient, topic: TopicName, owner: str, key: LedgerKey
    ) -> None:
        self.records, self.number = Records(), 0
        self._client, self._topic, self._owner, self._key = client, topic, owner, key
        self._sequence_ids = itertools.count(1)  # the client treats 0 as no id
        self._producer = broker.opened(
            f"open the ledger {topic}",
            "produce and consume",
            lambda: client.create_producer(
                str(topic),
                access_mode=pulsar.ProducerAccessMode.ExclusiveWithFencing,
                # Explicit sequence ids and a unique name: a client that reconnects before its first
                # receipt restarts its sequence ids, and a topic with deduplication drops these
                # messages.
                producer_name=f"redrive-ledger-{os.urandom(8).hex()}",
                batching_enabled=False,
                # Without compression, compaction retains empty records.
                compression_type=pulsar.CompressionType.LZ4,
            ),
        )
        takeover = self._store(OWNER, _json(owner), number=0)
        self.fencing_token = EntryId(takeover.ledger_id(), takeover.entry_id())
        # The takeover follows all records of earlier runs. Messages that other clients send after
        # it are not read.
        reading = broker.waited(lambda: _read(client, topic, key, self.fencing_token))
        self.records, self.number = reading.records, reading.number
        # Tasks of earlier runs skip the record of the takeover, which has no number.
        self.write(OWNER, owner)
        self.owned_since = time.monotonic()
        for replaced in reading.replaced:
            self._write(replaced, reading.values[replaced])

    @classmethod
    @contextmanager
    def open(cls, service_url: str, topic: TopicName, owner: str) -> Iterator[Self]:
        """Take over the ledger *topic* with the key of the job; close it at the end."""
        with broker.connect(service_url) as client:
            yield cls(client, topic, owner, mounted_key())

    def write(self, key: str, value: object) -> pulsar.MessageId:
        """Write *value* of *key* as JSON; None removes the record.

        On return the broker has stored the record and sent its entry. After a crash, the old or the
        new value applies. A record may be stored twice, which has no effect.
        """
        return self._write(key, _json(value))

    def write_all(self, records: Iterable[tuple[str, object]]) -> list[pulsar.MessageId]:
        """Write records in their order, without waiting for each; see `write`.

        Until it returns, one may be stored without those before it; after an error, any of them.
        """
        contents = ((key, _json(value)) for key, value in records)
        stored: list[pulsar.MessageId] = []
        waiting: list[tuple[str, bytes]] = []
        while waiting := [*waiting, *itertools.islice(contents, IN_FLIGHT - len(waiting))]:
            written = self._store_some(waiting)
            for key, content in waiting[: len(written)]:
                self.records.apply(key, content)
            stored += written
            del waiting[: len(written)]
        return stored

    def _write(self, key: str, content: bytes) -> pulsar.MessageId:
        stored = self._store(key, content)
        self.records.apply(key, content)
        return stored

    def _store(self, key: str, content: bytes, number: int | None = None) -> pulsar.MessageId:
        """Store a record, with the next number if none is given."""
        deadline = time.monotonic() + broker.WAIT_SECONDS
        while True:
            try:
                stored = self._producer.send(content, **self._options(key, content, number))
                if stored.ledger_id() >= 0:
                    return stored
                problem = "no entry"  # dropped as a duplicate; repeated with a higher id
            except pulsar.ProducerFenced as error:
                raise _fenced() from error
            except broker.OVER_QUOTA:
                with broker.refusals(f"store a record of the ledger {self._topic}", "produce"):
                    raise
            except pulsar.PulsarException as error:
                problem = str(error)  # it may be stored; a repetition is safe
                refused = f"the broker refused a record of the ledger {self._topic}"
                if by_setting := refused_by_setting(refused, problem):
                    raise by_setting from error
                if isinstance(error, pulsar.Timeout):
                    broker.check_producer(self._client.service_url, self._topic)
            if time.monotonic() > deadline:
                raise RedriveError(
                    "the broker does not store a record of the ledger",
                    got=problem,
                    remedy="the job is started again automatically and resumes where it was",
                    reason="LedgerUnavailable",
                )
            logger.warning("record of the ledger was not stored, retrying: %s", problem)
            time.sleep(1)

    def _store_some(self, records: Sequence[tuple[str, bytes]]) -> list[pulsar.MessageId]:
        """Store records together, and return the ids of those before the first failure.

        If the first one fails, it is stored alone. Those behind a failure may be stored too; the
        caller writes them again, with higher numbers.
        """
        sent = [self._send(key, content) for key, content in records]
        stored: list[pulsar.MessageId] = []
        for receipt in [receipt.result() for receipt in sent]:
            if receipt is None:
                break
            stored.append(receipt)
        return stored or [self._store(*records[0])]

    def _send(self, key: str, content: bytes) -> Future[pulsar.MessageId | None]:
        """Send a record; the result is None if it is unknown whether it is stored."""
        receipt = Future[pulsar.MessageId | None]()

        def receive(result: pulsar.Result, stored: pulsar.MessageId) -> None:
            is_stored = result == pulsar.Result.Ok and stored.ledger_id() >= 0
            receipt.set_result(stored if is_stored else None)

        self._producer.send_async(content, receive, **self._options(key, content))
        return receipt

    def _options(self, key: str, content: bytes, number: int | None = None) -> dict[str, Any]:
        """Return the options of the message of a record, with the next number if none is given."""
        if number is None:
            self.number = number = self.number + 1
        record = SignedRecord(key, content, self._owner, number)
        return {
            "sequence_id": next(self._sequence_ids),
            "partition_key": self._key.topic_key(key),
            "properties": self._key.properties(record),
            # Entry ids are valid in this cluster only.
            "disable_replication": True,
        }

    def repair(self) -> None:
        """Write records again that the topic lacks, because it may have been deleted meanwhile.

        The operator creates the topic again, and a reconnected producer does not detect it.
        Records after an open transaction are written again too, which has no effect.
        """
        reading = broker.waited(lambda: _read(self._client, self._topic, self._key))
        stored = dict(reading.records.items())
        lost = [(key, value) for key, value in self.records.items() if stored.get(key) != value]
        if lost:
            logger.warning("ledger lost %d records, which are written again", len(lost))
        headers = self.records.header_keys
        self.write_all(record for record in lost if record[0] not in headers)
        self.write_all(record for record in lost if record[0] in headers)  # after their plans


class Lease:
    """Lease of one task for its ranges.

    It ends when another run takes the ledger over, or when one of the ranges is leased again
    because the task is considered lost.

    Args:
        client: client that stays open as long as the lease is held.
        topic: topic of the ledger.
        owner: run that gave the lease.
        key: key of the ledger.
        source_ranges: the ranges.
        since: entry of the last record of the lease.
        number: number of that record, see `SignedRecord`.
        permit: initial permit.

    Attributes:
        permit: permit as of the last check.
    """

    def __init__(  # noqa: PLR0913, PLR0917  each has a source of its own
        self,
        client: broker.ReadingClient,
        topic: TopicName,
        owner: str,
        key: LedgerKey,
        source_ranges: Iterable[Range],
        since: EntryId,
        number: int,
        permit: Permit,
    ) -> None:
        self.permit = permit
        self._client, self._topic, self._owner, self._key = client, topic, owner, key
        self._keys, self._number = frozenset(map(range_key, source_ranges)), number
        self._position = since
        self._reader: EntryReader | None = None

    def check(self) -> None:
        """Check that the lease has not ended. Each send follows a recent check.

        Raises:
            FencedError: the lease has ended.
            ReplayRoleRefusedError: the broker refuses or does not answer.
        """
        with broker.refusals(f"read the ledger {self._topic}", "consume"):
            try:
                self._read()
            except pulsar.PulsarException:
                self.close()  # the next check opens another reader
                raise

    def close(self) -> None:
        """Close its reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self) -> None:
        if self._reader is None:
            self._reader = _open_reader(self._client, self._topic, self._position)
        while (message := self._reader.next_stored(READ_MILLISECONDS)) is not None:
            self._position = _entry(message)
            record = _verified(self._key, message)
            if record is None or record.number <= self._number:
                continue  # message of another writer, or a copy
            self._number = record.number
            if record.owner != self._owner or record.key in self._keys:
                raise _fenced()
            if record.key == PERMIT:
                with suppress(ValueError):  # shape of another version
                    self.permit = Permit.from_json(record.value)


def mounted_key() -> LedgerKey:
    """Return the key of the ledger of this job.

    Raises:
        RedriveError: the key is not mounted.
    """
    return LedgerKey(job_credentials().ledger_key())


def _fenced() -> FencedError:
    return FencedError(
        "another run has taken over the ledger of this dead-letter topic, or the range of the task "
        "was leased again",
        remedy="No action needed: the other run moves the messages that are left",
    )


def lost(uid: str) -> RedriveError:
    """Return the error of a ledger that has lost the plan of Replay *uid*."""
    return RedriveError(
        "the ledger has no plan of this Replay any more: the ledger topic was deleted, or another "
        "Replay ended meanwhile",
        got=f"no plan of {uid}",
        remedy="create another Replay, which moves the messages that are not recorded as moved",
        reason="LedgerLost",
    )


def read(
    client: broker.ReadingClient, topic: TopicName, key: LedgerKey, admin_url: str | None = None
) -> Records:
    """Read the records of a ledger without taking it over.

    Args:
        client: client that stays open meanwhile.
        topic: topic of the ledger.
        key: key of the ledger.
        admin_url: without it, records after an open transaction are left out.

    Raises:
        ReplayRoleRefusedError: the ledger does not exist, or the role may not read it.
        AdminError: the admin API does not answer, or refuses.
        RedriveError: a transaction is open in the ledger.
    """
    # Before the read: a later transaction blocks no record that is stored by now.
    if admin_url is not None and broker.has_open_transaction(admin_url, topic):
        raise transaction_open(topic)
    return _read(client, topic, key).records


class _LedgerReading:
    """Records of a ledger topic, while its messages are read in order.

    Attributes:
        records: records that are signed with the key of the ledger.
        number: highest number of a record.
        values: value of each record by its key; empty for removed records.
        replaced: keys of records that compaction would replace by a message of another writer that
            copied the message key.
    """

    def __init__(self, key: LedgerKey) -> None:
        self.records, self.number = Records(), 0
        self.values: dict[str, bytes] = {}
        self.replaced: set[str] = set()
        self._key = key
        self._keys: dict[str, str] = {}

    def add(self, message: ReadMessage) -> None:
        """Apply a record; skip and count a message of another writer, or a copy of a record."""
        record = _verified(self._key, message)
        if record is not None and not record.number:
            return
        if record is None or record.number <= self.number:
            self.records.skipped += 1
            with suppress(UnicodeDecodeError):
                if (replaced := self._keys.get(message.partition_key())) is not None:
                    self.replaced.add(replaced)
            return
        self.number = record.number
        self.replaced.discard(record.key)
        self.values[record.key] = record.value
        self._keys[message.partition_key()] = record.key
        self.records.apply(record.key, record.value)


def _read(
    client: broker.ReadingClient, topic: TopicName, key: LedgerKey, end: EntryId | None = None
) -> _LedgerReading:
    """Read a ledger topic, up to the entry *end* or to its end.

    Raises:
        ReplayRoleRefusedError: the ledger does not exist, or the role may not read it.
        RedriveError: an open transaction blocks entries up to *end*.
    """
    reading = _LedgerReading(key)
    deadline = time.monotonic() + READABLE_SECONDS
    with (
        broker.refusals(f"read the ledger {topic}", "consume"),
        closing(_open_reader(client, topic, NOWHERE)) as reader,
    ):
        while True:
            if (message := reader.next_stored(READ_MILLISECONDS)) is not None:
                reading.add(message)
                if end is not None and _entry(message) >= end:
                    break
            elif end is None:
                break
            elif time.monotonic() > deadline:
                raise transaction_open(topic)
            else:
                time.sleep(POLL_SECONDS)
    if reading.records.skipped:
        logger.warning(
            "ledger %s: %d messages skipped that no job of its policy wrote, or that are invalid",
            topic,
            reading.records.skipped,
        )
    return reading


def _open_reader(client: broker.ReadingClient, topic: TopicName, after: EntryId) -> EntryReader:
    """Open a reader that skips malformed entries of other writers.

    It reads the compacted topic, so a task that was stopped reads the last record of the owner.
    """
    name = f"redrive-ledger-{os.urandom(8).hex()}"
    return client.open_entry_reader(
        topic, broker.UNPARTITIONED, after, name=name, ahead=_AHEAD, compacted=True
    )


def _entry(message: ReadMessage) -> EntryId:
    return EntryId(*message.place.entries[-1])


def _verified(key: LedgerKey, message: ReadMessage) -> SignedRecord | None:
    try:
        return key.verify(message.partition_key(), message.data(), message.properties())
    except UnicodeDecodeError:
        return None


def _json(value: object) -> bytes:
    return b"" if value is None else json.dumps(value, separators=(",", ":")).encode()
