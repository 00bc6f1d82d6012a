"""The producers of one range: what they send, and the receipts that come back.

One producer for each partition of the target, named after the range: equal in each Replay, so that
while one run has it no other can send messages of the range. Its sequence ids rise with each try.

A producer has one schema. So it is opened again, under its name, where a message comes that was
written with another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import pulsar

from redrive.copying.errors import SchemaRefusedError
from redrive.copying.writer_schemas import LATEST
from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay.moving.outcome import Key
from redrive.replay.moving.outlets import OpenProducer, OutgoingLetter, Outlet, Receipt
from redrive.replay.topic import broker, position
from redrive.replay.topic.position import Try
from redrive.replay.topic.ranges import Range
from redrive.replay.topic.rows import DeadLetterRow


class DeduplicationOffError(RedriveError):
    """The target does not keep sequence ids: what a client sends again is stored twice."""

    reason: ClassVar[str] = "DeduplicationOff"


class NotLetInError(Exception):
    """The broker takes no more messages for a topic.

    Attributes:
        topic: is over its backlog quota.
    """

    def __init__(self, topic: TopicName) -> None:
        super().__init__()
        self.topic = topic


class SentBeforeError(Exception):
    """Messages of this very lease were sent by another process.

    Attributes:
        sent_in: the try in which.
    """

    def __init__(self, sent_in: Try) -> None:
        super().__init__()
        self.sent_in = sent_in


class _HeldProducer(NamedTuple):
    """A producer, and the schema version that it was opened for."""

    producer: OpenProducer
    version: int | None


class Sender:
    """Sends messages of a range, in the order of their positions.

    Args:
        outlet: has no other use.
        target: where to; *partitions* of it, 0 if it has none.
        source: the dead-letter topic, and *of* it the range.
        sent_in: the try.

    Attributes:
        last: of each partition that was opened, the last sequence id before this try.
        sent_to: the partitions to which any message was sent.
    """

    def __init__(
        self,
        outlet: Outlet,
        target: tuple[TopicName, int],
        source: TopicName,
        of: Range,
        sent_in: Try,
    ) -> None:
        self._outlet = outlet
        self._target, self._partitions = target
        self._source = source
        self._range = of
        self._try = sent_in
        self._producers: dict[int, _HeldProducer] = {}
        self.last: dict[int, int] = {}
        self.sent_to: set[int] = set()

    def partition(self, letter: DeadLetterRow) -> int:
        """Return the index of the target's partition for *letter*."""
        if not self._partitions:
            return broker.UNPARTITIONED
        return position.target_partition(letter.key, letter.position, self._partitions)

    def hold(self, index: int, version: int | None) -> int:
        """Open the producer for a partition, and return the last sequence id before this try.

        Until the sender is closed, no other process sends messages of the range there.

        Args:
            index: of the partition.
            version: of the source's schema, for messages that were written with it; or `LATEST`,
                of the target's own schema, which it takes in any case.

        Raises:
            SentBeforeError: there were messages of this try, or a later one; or another process
                has sent some while the producer was opened for another schema.
            SchemaError: there is no such schema, or the target does not take it.
            NotLetInError: its backlog is larger than it may be.
            RedriveError: it can't be opened.
        """
        if not self.holds(index, version):
            self._open(index, version)
        return self.last[index]

    def holds(self, index: int, version: int | None) -> bool:
        """Whether the producer for a partition is open for this schema."""
        held = self._producers.get(index)
        return held is not None and held.version == version

    def send(
        self, key: Key, letter: DeadLetterRow, partition: int, properties: dict[str, str]
    ) -> None:
        """Send a message; its receipt comes later, or never.

        Args:
            key: comes with the receipt.
            letter: what to send.
            partition: of the target, the one for *letter*; its producer has to be held.
            properties: what it carries.

        Raises:
            StalledError: nothing can be sent any more.
        """
        self.sent_to.add(partition)
        outgoing = OutgoingLetter(key, letter, partition)
        self._producers[partition].producer.send(outgoing, properties, self.sequence_id(letter))

    def receive(self, seconds: float) -> Sequence[Receipt]:
        """Return the receipts that are there; if there are none, wait for some so long.

        Raises:
            StalledError: none will come any more.
        """
        return self._outlet.receive(seconds)

    def sequence_id(self, letter: DeadLetterRow, sent_in: Try | None = None) -> int:
        """Return the id with which this try sends *letter*, or the one given would have."""
        offset = letter.position.entry - self._range.first
        return position.sequence_id(sent_in or self._try, offset, letter.position.batch_index)

    def prove(self, letter: DeadLetterRow) -> None:
        """Check that the broker remembers *letter*, which it has stored.

        Raises:
            DeduplicationOffError: it does not.
            SentBeforeError: another process has sent some while the producer was opened again.
        """
        index, sent = self.partition(letter), self.sequence_id(letter)
        held = self._producers.pop(index)
        held.producer.close()
        producer = self._create(index, held.version)
        self._producers[index] = held._replace(producer=producer)
        last = producer.last_sequence_id
        if last < sent:
            raise DeduplicationOffError(
                f"deduplication is off on {self._target}: what a client sends again when it "
                "reconnects would be stored twice",
                got=f"sequence id {last} after {sent} was stored",
                remedy="switch it on for this topic, or make another Replay with guarantee: "
                "AtLeastOnce",
            )
        if last > sent:
            raise SentBeforeError(Try.of(last))

    def close(self) -> None:
        """Stop all sending: messages without a receipt get one that says so."""
        while self._producers:
            self._producers.popitem()[1].producer.close()
        self._outlet.close()

    def _open(self, index: int, version: int | None) -> None:
        if index in self._producers:
            self._producers.pop(index).producer.close()
        producer = self._create(index, version)
        last = producer.last_sequence_id
        known = self.last.get(index)
        # While it is opened again the name is free, for a process that was stopped and wakes.
        own = known is not None and (last == known or Try.of(last) == self._try)
        if not own and (known is not None or Try.of(last) >= self._try):
            producer.close()
            raise SentBeforeError(max(Try.of(last), self._try))
        self.last.setdefault(index, last)
        self._producers[index] = _HeldProducer(producer, version)

    def _create(self, index: int, version: int | None) -> OpenProducer:
        topic = broker.partition_of(self._target, index)
        name = f"redrive-replay {self._source} {self._range} {index}"
        schema = None
        if version is not None:
            schema = self._target if version == LATEST else self._source, version
        try:
            return self._outlet.open(topic, name, schema)
        except broker.ReplayRoleRefusedError as error:
            if isinstance(error.__cause__, pulsar.IncompatibleSchema):
                raise _schema_refused(self._source, version, topic) from error
            if isinstance(error.__cause__, broker.OVER_QUOTA):
                raise NotLetInError(topic) from error
            raise


def _schema_refused(
    source: TopicName, version: int | None, target: TopicName
) -> SchemaRefusedError:
    return SchemaRefusedError(
        f"{target} does not take the schema that a dead letter was written with",
        got=f"no schema, from {source}" if version is None else f"version {version} of {source}",
        remedy="have that topic take it, or delete its schema; what was refused stays till then",
    )
