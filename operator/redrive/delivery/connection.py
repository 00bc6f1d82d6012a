"""The parts of a consumer at a real broker, and its subscriptions.

The parts of a consumer at a broker: subscriptions, one stream of them, and producers.

Subscribes a consumer to the two topics it consumes; called by `consumer` once, at its start.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import pulsar

from redrive.delivery.bursts import BURST, BURST_BYTES, LARGEST_BATCH, Arrivals
from redrive.delivery.concurrency import Timer, release_at_exit
from redrive.delivery.early_retries import EarlyRetries
from redrive.delivery.fetcher import Fetcher
from redrive.delivery.forwarder import Producers
from redrive.delivery.parts import (
    BrokerConnection,
    Parts,
    SequenceLog,
    Subscribing,
    SystemClock,
    for_consumer,
)
from redrive.delivery.reporting import OutageBeacon
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName

_log = logging.getLogger(__name__)

_LINGER_SECONDS = 0.1
"""How long further messages may be on their way when a first one has come."""


class ClientConnection(BrokerConnection):
    """A connection of *client*, which it leaves open."""

    def __init__(self, client: pulsar.Client) -> None:
        self.clock = SystemClock()
        self.client = client
        release_at_exit(client)

    def open(self, policy: Policy, subscribing: Subscribing) -> Parts:
        """Subscribe both topics of *policy*, or neither; warn where dead letters may be lost."""
        if policy.dead_letters and not policy.name:  # made by hand: there is no operator for it
            _log.warning(
                "%s keeps dead letters only if it has a subscription, which a client can't find "
                "out: create one (pulsar-admin topics create-subscription -s %s …), or use the "
                "policy of a RetryPolicy",
                policy.dead_letter_topic, DEAD_LETTER_SUBSCRIPTION,
            )  # fmt: skip
        subscribed = subscribe(self.client, policy, subscribing)
        return Parts(
            self.clock,
            subscribed.consumers,
            Fetcher(list(subscribed.consumers.values()), subscribed.arrivals),
            Producers(self.client, name=subscribing.name, crypto=subscribing.crypto),
            Timer,
            operator.methodcaller("until_stopped"),
            _LINGER_SECONDS,
            OutageBeacon(self.client, policy),
            subscribing.nack_delay.total_seconds(),
            subscribing.max_in_flight_bytes,
            self._letters(policy),
            subscribed.behind,
        )

    def _letters(self, policy: Policy) -> SequenceLog | None:
        if not policy.sequenced:
            return None
        # What it needs takes long to import, and few policies ask for it.
        from redrive.delivery.middleware.sequencing import SequenceTopic  # noqa: PLC0415

        return SequenceTopic(self.client, policy.sequences_topic)


_CONSUMER_TYPES = {
    SubscriptionType.SHARED: pulsar.ConsumerType.Shared,
    SubscriptionType.KEY_SHARED: pulsar.ConsumerType.KeyShared,
    SubscriptionType.EXCLUSIVE: pulsar.ConsumerType.Exclusive,
    SubscriptionType.FAILOVER: pulsar.ConsumerType.Failover,
}

PREFETCH = 1_000

MAX_PENDING_CHUNKED = 100
"""So many messages in chunks are put together at a time, of each partition: one for each producer
that sends at the time. The client keeps their chunks in memory beyond the prefetch; with more of
them it drops the oldest, which `TopicFetcher` recovers."""

_LEAST_BURSTS = 4
"""With a smaller prefetch messages are received one by one."""

_BURSTS = pulsar.ConsumerBatchReceivePolicy(BURST, BURST_BYTES, 1)
"""The last is the time that a burst which is not full waits for more, in milliseconds."""

_LEAST_PER_PARTITION = 4
"""Further partitions share in the total bound, and the client works with no queue of 0."""

_QUEUES_FULL = 2
"""What the queue of a topic with partitions comes to when they are delivered again behind it."""

_MOST_IN_BATCHES = 10_000
"""No more are expected of all partitions together, since the id of each would be kept."""


class Subscribed(NamedTuple):
    """The consumers of both topics.

    Attributes:
        arrivals: of each consumer.
        behind: see `Parts`.
    """

    consumers: dict[TopicName, pulsar.Consumer]
    arrivals: list[Arrivals]
    behind: int


class SubscribeError(RedriveError):
    """The broker refused a subscription that the policy asks for."""

    reason = "SubscribeFailed"


def check_prefetch(prefetch: int) -> None:
    """Check how many messages may wait in a consumer.

    Raises:
        InvalidSpecError: it is below 1.
    """
    if prefetch < 1:
        raise InvalidSpecError(
            "at least one message waits in a consumer",
            got=prefetch,
            remedy="give prefetch= 1 or more, or leave it out",
        )


def subscribe(client: pulsar.Client, policy: Policy, subscribing: Subscribing) -> Subscribed:
    """Subscribe the source and the retry topic of *policy*, both or neither.

    Warns where the type of the source's subscription promises what a retry can't keep.

    Raises:
        SubscribeError: the broker refused one of them.
    """
    kinds = {topic: _CONSUMER_TYPES[kind] for topic, kind in policy.subscription_types.items()}
    if not policy.subscription_type.honours_delays:
        _log.warning(
            "%s is consumed as %s, its retries as Shared: their order is lost, and a broker that "
            "honours delays on no such subscription may deliver them at once",
            policy.topic, policy.subscription_type,
        )  # fmt: skip
    consumers, arrivals, behind = {}, list[Arrivals](), 0
    bursts = subscribing.prefetch >= _LEAST_BURSTS * BURST
    # A burst waits here too: it is taken out of the queue.
    waiting = subscribing.prefetch - BURST if bursts else subscribing.prefetch
    with contextlib.ExitStack() as undo:
        for topic, kind in kinds.items():
            options = {
                "consumer_type": kind,
                "consumer_name": subscribing.name,
                "properties": _told(policy),
                "negative_ack_redelivery_delay_ms": subscribing.nack_delay
                // timedelta(milliseconds=1),
                "schema": subscribing.schema,
                **for_consumer(subscribing.crypto),
            }
            with _refusals_explained(topic, policy.subscription):
                partitions = client.get_topic_partitions(str(topic))
                most = max(waiting, _LEAST_PER_PARTITION * len(partitions))
                consumers[topic] = client.subscribe(
                    str(topic),
                    policy.subscription,
                    receiver_queue_size=waiting,
                    max_pending_chunked_message=MAX_PENDING_CHUNKED,
                    max_total_receiver_queue_size_across_partitions=most,
                    batch_receive_policy=_BURSTS if bursts else None,
                    **options,
                )
            undo.callback(consumers[topic].close)
            partitioned = partitions != [str(topic)]
            queue = min(waiting, most // len(partitions)) if partitioned else 0
            early = EarlyRetries(SystemClock()) if topic == policy.retry_topic else None
            arrivals.append(Arrivals(str(topic), queue, in_bursts=bursts, early=early))
            if partitioned:
                behind += _QUEUES_FULL * max(
                    most, min(LARGEST_BATCH * len(partitions), _MOST_IN_BATCHES)
                )
        undo.pop_all()
    return Subscribed(consumers, arrivals, behind)


def _told(policy: Policy) -> dict[str, str]:
    """Return what the broker's statistics show of a consumer as its metadata.

    The policy is the one it begins with: the client can't change this later.
    """
    return {"redrive.policy": policy.name, "redrive.generation": str(policy.generation)}


@contextlib.contextmanager
def _refusals_explained(topic: TopicName, subscription: str) -> Iterator[None]:
    try:
        yield
    except pulsar.Interrupted:
        raise  # the client's word for KeyboardInterrupt
    except pulsar.exceptions.PulsarException as error:
        raise SubscribeError(
            f"could not subscribe to {topic} as {subscription}",
            got=str(error),
            remedy="check that the RetryPolicy is Ready and lists this consumer's role, "
            "that the role may consume the source topic, that the subscription exists (not all "
            "brokers create one for a consumer), that a schema given fits those of the source and "
            "retry topic, and that the broker answers",
        ) from error
