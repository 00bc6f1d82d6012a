"""What is done to each dead letter: send, wait for the broker's receipt, acknowledge.

A crash in between leaves messages that were sent and not acknowledged. A repetition sends them
again with the same producer name and sequence id, the broker drops them, and they are acknowledged
then: nothing is lost, and nothing is stored twice.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Self

import pulsar

from redrive.errors import RedriveError
from redrive.policy import envelope
from redrive.policy.naming import TopicName
from redrive.replay import broker, position
from redrive.replay.position import Position
from redrive.replay.producer import Sent, SequencedProducer
from redrive.replay.rows import DeadLetter

WINDOW_MESSAGES = 500
WINDOW_BYTES = 32 * 2**20


class OutOfOrderError(RedriveError):
    """Rows came in another order than the source gives them."""

    reason: ClassVar[str] = "OutOfOrder"


@dataclass(frozen=True)
class Tally:
    """What became of the messages that were selected.

    Attributes:
        replayed: stored in the target once, and acknowledged.
        duplicates: how many of these had been stored by an earlier, interrupted run.
        kept: left where they are, neither sent nor acknowledged: see `Mover.move`.
    """

    replayed: int = 0
    duplicates: int = 0
    kept: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.replayed + other.replayed,
            self.duplicates + other.duplicates,
            self.kept + other.kept,
        )


@dataclass(frozen=True)
class Route:
    """From where to where.

    Attributes:
        source: the topic where the messages rest.
        subscription: the one that keeps them there; they are acknowledged on it.
        target_partitions: 0 for a target without partitions; it must not change between runs.
        producer: how the names of the producers begin. Runs in which this is equal are repetitions
            of one another: what one has sent, the other does not send again.
        replay: written into each message, see `envelope.for_replay`.
    """

    service_url: str
    source: TopicName
    subscription: str
    target: TopicName
    target_partitions: int
    producer: str
    replay: str


class Mover:
    """Moves the dead letters of one partition, in their order.

    At most `WINDOW_MESSAGES` and `WINDOW_BYTES` are under way at a time, and one entry more.

    Raises:
        RedriveError: from each method, when the broker refuses or answers what does not fit.
    """

    def __init__(self, route: Route, partition: int) -> None:
        self._route = route
        self._partition = partition
        self._producers: dict[int, SequencedProducer] = {}
        self._under_way: deque[list[Sent]] = deque()
        self._messages = self._bytes = 0
        self._last = Position(-1, -1, -1)
        self._tally = Tally()

    def __enter__(self) -> Self:
        name = str(broker.partition_of(self._route.source, self._partition))
        doing = f"open the subscription {self._route.subscription} of {name}"
        with ExitStack() as stack:
            self._client = stack.enter_context(broker.connect(self._route.service_url))
            with broker.refusals(doing, "consume"):
                # It only acknowledges: without a queue it receives no message.
                self._consumer = self._client.subscribe(
                    name,
                    self._route.subscription,
                    consumer_type=pulsar.ConsumerType.Shared,
                    receiver_queue_size=0,
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def move(self, entry: Sequence[DeadLetter]) -> None:
        """Send the selected messages of one entry of the source; acknowledge it some time later.

        A broker acknowledges entries, not messages. So an entry of which only a part is selected
        is kept: sending that part would send it again with every later replay. And what was cut
        into chunks is kept, because deduplication and chunks don't go together; and what can't be
        read, because a copy would lack its properties.
        """
        partial = len(entry) != entry[0].batch_size
        if partial or entry[0].chunked or any(letter.unreadable for letter in entry):
            self._tally += Tally(kept=len(entry))
            return
        self._messages += len(entry)
        self._bytes += sum(letter.size for letter in entry)
        self._under_way.append([self._send(letter) for letter in entry])
        new = [each for each in self._producers.values() if not each.is_proven]
        self._settle(leaving=0 if new else WINDOW_MESSAGES)
        for producer in new:
            producer.prove()

    def finish(self) -> Tally:
        """Wait for all that is under way, and return what became of everything."""
        self._settle(leaving=0)
        return self._tally

    def _send(self, letter: DeadLetter) -> Sent:
        if letter.position <= self._last or letter.partition != self._partition:
            raise OutOfOrderError(
                "a task gets the messages of one partition in the order they were written: "
                f"{tuple(self._last)} of partition {self._partition} was the last one",
                got=f"{tuple(letter.position)} of partition {letter.partition}",
                remedy="do not sort or repartition between the source and the sink",
            )
        self._last = letter.position
        partitions = self._route.target_partitions
        index = broker.UNPARTITIONED
        if partitions:
            index = position.target_partition(letter.key, letter.position, partitions)
        properties = envelope.for_replay(letter.properties, replay=self._route.replay)
        return self._producer(index).send(letter, properties)

    def _producer(self, index: int) -> SequencedProducer:
        if index not in self._producers:
            topic = broker.partition_of(self._route.target, index)
            name = f"{self._route.producer}-{self._partition}-{index}"
            self._producers[index] = SequencedProducer(self._client, topic, name)
        return self._producers[index]

    def _settle(self, *, leaving: int) -> None:
        """Wait for receipts and acknowledge, until at most so many messages are under way."""
        while self._messages > leaving or self._bytes > WINDOW_BYTES:
            self._settle_entry(self._under_way.popleft())

    def _settle_entry(self, entry: Sequence[Sent]) -> None:
        duplicates = sum(sent.is_duplicate() for sent in entry)
        ledger, number = entry[0].letter.position.entry_id
        # The index -1 stands for the whole entry: single messages of a batch can't be named here.
        self._consumer.acknowledge(pulsar.MessageId(self._partition, ledger, number, -1))
        self._messages -= len(entry)
        self._bytes -= sum(sent.letter.size for sent in entry)
        self._tally += Tally(replayed=len(entry), duplicates=duplicates)


def by_entry(letters: Iterator[DeadLetter]) -> Iterator[list[DeadLetter]]:
    """Put together what lies in one entry; *letters* come in order."""
    for _, entry in itertools.groupby(letters, key=lambda letter: letter.position.entry_id):
        yield list(entry)
