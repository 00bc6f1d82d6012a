"""Dead letters that the masters of a RocketMQ cluster keep, by queue and offset.

A reading has the offsets of the moment of its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from redrive.api.rocketmq import RocketMQMessages
from redrive.auth.files import BrokerCredentials
from redrive.inspection.payloads import AvroSchema
from redrive.inspection.reader import MessageReading, even_shares
from redrive.reading.queues import MessageQueue, QueueCluster, named
from redrive.reading.rows import DeadLetterRow
from redrive.replay.spec import Choice, Chooser, FailureCause


@dataclass(frozen=True)
class DeadLetterQueues:
    """Queues of a dead-letter topic of RocketMQ at all masters, and the caller's access to them.

    Attributes:
        messages: address of the topic.
    """

    messages: RocketMQMessages
    credentials: BrokerCredentials = field(repr=False)

    @property
    def name(self) -> str:
        """Return the name of the topic."""
        return self.messages.topic

    def plan(self, choice: Choice, newest: int | None, max_bytes: int | None) -> MessageReading:  # noqa: ARG002
        """Plan a reading, see `MessageSource`. Masters show no size of a message.

        Raises:
            RedriveError: a master does not answer, also one that no name server lists.
        """
        with self.cluster() as cluster:
            masters = cluster.all_masters()
            queues = [queue for master in masters for queue in cluster.queues(master, self.name)]
        sizes = [len(queue.offsets) for queue in queues]
        total = sum(sizes)
        shares = sizes if newest is None else even_shares(sizes, newest)
        planned = named(choice.ids, queues) if choice.ids else [
            replace(queue, offsets=queue.offsets[len(queue.offsets) - share :])
            for queue, share in zip(queues, shares, strict=True)
        ]  # fmt: skip
        count = sum(len(queue.offsets) for queue in planned)
        is_truncated = not choice.ids and count < total
        return QueueReading(self, total, count, is_truncated, queues=planned, choice=choice)

    def cluster(self) -> QueueCluster:
        """Return the cluster, which the caller has to close."""
        return QueueCluster(self.messages, self.credentials)


@dataclass
class QueueReading(MessageReading):
    """One reading of a topic of RocketMQ. The masters are read one after the other."""

    topic: DeadLetterQueues
    queues: Sequence[MessageQueue] = field(default=(), repr=False)
    choice: Choice = field(default_factory=Choice, repr=False)

    def schema(self, version: int | None) -> AvroSchema | None:  # noqa: ARG002
        """Return None: RocketMQ has no schemas."""
        return None

    def selected(self, on_read: Callable[[], object]) -> Iterator[DeadLetterRow]:
        """Yield the selected messages, see `MessageReading`."""
        chooser = Chooser(replace(self.choice, ids=()))  # the plan has those of the ids
        with self.topic.cluster() as cluster:
            for queue in self.queues:
                for covered, messages in cluster.pulls(queue):
                    for message in messages:
                        self.messages += 1
                        row = message.row(queue)
                        on_read()
                        cause = FailureCause.of(row.properties)
                        if chooser.takes(row.position, row.keys, row.publish_time, cause):
                            self.matched += 1
                            yield row
                    self.entries += len(covered)
