"""One producer to one partition of the target, which sends each message at most once, ever.

The broker remembers the highest sequence id of each producer by name, and drops what is not above
it. That holds for messages sent one by one under a fixed name, without batches, chunks or a send
time-out; and only on a topic that deduplicates, which has to be proven
after the first message.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

import pulsar

from redrive.errors import RedriveError
from redrive.policy.naming import TopicName
from redrive.replay import broker, position
from redrive.replay.rows import DeadLetter

RECEIPT_SECONDS = 120.0


class DeduplicationOffError(RedriveError):
    """The target does not keep sequence ids: a repeated run would store messages twice."""

    reason: ClassVar[str] = "DeduplicationOff"


class SendFailedError(RedriveError):
    """The broker did not store a message."""

    reason: ClassVar[str] = "SendFailed"


class UnexpectedDuplicateError(RedriveError):
    """The broker calls a message a duplicate that this run can't have sent before."""

    reason: ClassVar[str] = "UnexpectedDuplicate"


@dataclass(frozen=True)
class Sent:
    """A message that is on its way.

    Attributes:
        resumed_at: the highest sequence id that the broker knew when the producer was opened.
    """

    letter: DeadLetter
    sequence_id: int
    resumed_at: int
    outcome: Future[tuple[pulsar.Result, pulsar.MessageId]]

    def is_duplicate(self) -> bool:
        """Wait for the broker's receipt: stored now, or dropped because it was stored before?

        Raises:
            SendFailedError: there is no receipt.
            UnexpectedDuplicateError: it was dropped, and cannot have been stored.
        """
        where = f"the dead letter at {tuple(self.letter.position)}"
        try:
            result, stored_as = self.outcome.result(RECEIPT_SECONDS)
        except TimeoutError:
            result, stored_as = f"no answer for {RECEIPT_SECONDS:g} s", None
        if result != pulsar.Result.Ok:
            raise SendFailedError(
                f"the broker gave no receipt for {where}, which stays where it is",
                got=str(result),
                remedy="see the broker's log; leave a message that is too big out of the "
                "selection, by its size",
            )
        # A dropped message gets an id without ledger.
        duplicate: bool = stored_as.ledger_id() < 0
        if duplicate and self.sequence_id > self.resumed_at:
            raise UnexpectedDuplicateError(
                f"the broker dropped {where}, although its id is above all that were known",
                got=f"sequence id {self.sequence_id}, known up to {self.resumed_at}",
                remedy="it is not acknowledged; the job is started again by itself and finds out",
            )
        return duplicate


class SequencedProducer:
    """Sends to one topic without partitions, or to one partition.

    Args:
        name: of the producer; equal in each run that may repeat this one, and in no other.
    """

    def __init__(self, client: pulsar.Client, topic: TopicName, name: str) -> None:
        self._client = client
        self._topic = topic
        self._name = name
        self._last_sent = -1
        self._open()

    @property
    def is_proven(self) -> bool:
        """Whether the broker has shown that it remembers what this producer sends."""
        return self._resumed_at >= 0

    def send(self, letter: DeadLetter, properties: Mapping[str, str]) -> Sent:
        """Send a message; positions must rise from call to call.

        Raises:
            PositionOutOfRangeError: its position is not good for a sequence id.
        """
        sequence_id = position.sequence_id(letter.position)
        sent = Sent(letter, sequence_id, self._resumed_at, Future())
        self._producer.send_async(
            letter.value,
            lambda result, stored_as: sent.outcome.set_result((result, stored_as)),
            properties=dict(properties),
            partition_key=letter.key,
            ordering_key=letter.ordering_key,
            event_timestamp=letter.event_time,
            sequence_id=sequence_id,
        )
        self._last_sent = sequence_id
        return sent

    def prove(self) -> None:
        """Check that the broker remembers the last message, for which there is a receipt.

        Raises:
            DeduplicationOffError: it does not.
        """
        self._producer.close()
        self._open()
        if self._resumed_at < self._last_sent:
            raise DeduplicationOffError(
                f"deduplication is off on {self._topic}: a repeated run would store messages twice",
                got=f"sequence id {self._resumed_at} after {self._last_sent} was stored",
                remedy="switch it on for this topic, as the operator does when it provisions it",
            )

    def _open(self) -> None:
        self._producer = broker.open_producer(self._client, self._topic, self._name)
        self._resumed_at: int = self._producer.last_sequence_id()
