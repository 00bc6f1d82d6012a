"""Where a message was consumed from; called by `processor` and `decisions`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pulsar

from redrive.delivery.parts import Subscription
from redrive.errors import InvalidSpecError
from redrive.policy.naming import TopicName


class SubscriptionsByTopic(dict[str, Subscription]):
    """The subscription of a topic, or of any of its partitions, by that one's name.

    Raises:
        InvalidSpecError: the topic is none of them.
    """

    def __init__(self, of_topics: Mapping[TopicName, Subscription]) -> None:
        super().__init__()
        self._of_topics = of_topics

    def __missing__(self, name: str) -> Subscription:
        """Find the subscription once: each message is looked up here."""
        topic = _whole(name)
        if topic not in self._of_topics:
            raise InvalidSpecError(
                "a message is settled by the consumer it came from",
                got=str(topic),
                remedy=f"this one consumes {' and '.join(map(str, self._of_topics))}",
            )
        self[name] = self._of_topics[topic]
        return self[name]


def topic_of(message: pulsar.Message) -> TopicName:
    """Return the topic that *message* was consumed from, without partition."""
    # Set by the client from its subscription: no producer can forge it.
    return _whole(message.topic_name())


@functools.lru_cache
def _whole(name: str) -> TopicName:
    return TopicName.parse(name).without_partition()
