"""The subscription that follows a stream: it keeps what has not been processed, and shows it.

What has been read is in the query's checkpoint; nothing is read by the subscription. Of each
partition it keeps the last entry that was processed, too. As long as it stands before that, the
broker has deleted nothing of what follows; once it does not, as when messages expired, it may have.
"""

from __future__ import annotations

from contextlib import ExitStack

import pulsar

from redrive.policy.naming import TopicName
from redrive.replay.topic.broker import UNPARTITIONED
from redrive.replay.topic.position import EntryId
from redrive.spark.admission import Offset
from redrive.spark.topics import TopicReader, failures


class FollowingSubscription:
    """Acknowledges what a stream has processed; keeps a consumer open for each partition.

    Args:
        of: the broker.
        subscription: its name. Where it is missing, it is created with all that the topic holds,
            if the broker creates subscriptions by itself.
    """

    def __init__(self, of: TopicReader, subscription: str) -> None:
        self._opened = ExitStack()
        self._client = self._opened.enter_context(of.client())
        self._subscription = subscription
        self._consumers: dict[TopicName, pulsar.Consumer] = {}

    def open(self, topic: TopicName) -> pulsar.Consumer:
        """Subscribe to a partition, once."""
        if topic not in self._consumers:
            with failures(f"subscribe as {self._subscription} to {topic}", "consume"):
                self._consumers[topic] = self._client.subscribe(
                    str(topic),
                    self._subscription,
                    initial_position=pulsar.InitialPosition.Earliest,
                    receiver_queue_size=0,  # it receives nothing
                )
        return self._consumers[topic]

    def keep(self, topic: TopicName, passed: EntryId, processed: EntryId) -> None:
        """Have the subscription keep what follows on *processed*, and that itself.

        Args:
            topic: a partition.
            passed: up to where it has acknowledged.
            processed: where the stream begins.
        """
        consumer = self.open(topic)
        if passed >= processed:
            ledger, entry = processed
            first = pulsar.MessageId(UNPARTITIONED, ledger, entry, -1)
            with failures(f"move {self._subscription} of {topic} to {processed}", "consume"):
                consumer.seek(first if entry >= 0 else pulsar.MessageId.earliest)

    def acknowledge(self, processed: Offset) -> None:
        """Acknowledge all before some entries; see above."""
        for topic, position in processed.items():
            ledger, entry = position.entry_id
            if entry > 0:
                consumer = self.open(topic)
                with failures(f"acknowledge {position.entry_id} of {topic}", "consume"):
                    consumer.acknowledge_cumulative(
                        pulsar.MessageId(UNPARTITIONED, ledger, entry - 1, -1)
                    )

    def close(self) -> None:
        """Close all that is open; acknowledgements go out before."""
        self._opened.close()
