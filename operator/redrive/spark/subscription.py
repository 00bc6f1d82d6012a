"""The subscription that follows a stream: it keeps what has not been processed, and shows it.

What has been read is in the query's checkpoint; nothing is read by the subscription.
"""

from __future__ import annotations

from contextlib import ExitStack

import pulsar

from redrive.policy.naming import TopicName
from redrive.replay.topic.broker import UNPARTITIONED
from redrive.spark.admission import Offset
from redrive.spark.slices import first_unread
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

    def acknowledge(self, processed: Offset) -> None:
        """Acknowledge all up to some positions; of an entry that is read in part, nothing."""
        for topic, position in processed.items():
            ledger, entry = position.entry_id
            done = entry if first_unread(position) > entry else entry - 1
            if done >= 0:
                consumer = self.open(topic)
                with failures(f"acknowledge {position.entry_id} of {topic}", "consume"):
                    consumer.acknowledge_cumulative(
                        pulsar.MessageId(UNPARTITIONED, ledger, done, -1)
                    )

    def close(self) -> None:
        """Close all that is open; acknowledgements go out before."""
        self._opened.close()
