"""The parts of a consumer at a broker: two subscriptions, their stream, and producers."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import pulsar

from redrive.delivery.arrivals import BURST, BURST_BYTES, LARGEST_BATCH, Arrivals, EarlyRetries
from redrive.delivery.concurrency import Timer, release_at_exit
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
from redrive.delivery.renewal import Renewal
from redrive.delivery.reporting import OutageProducer
from redrive.errors import InvalidSpecError, RedriveError
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName

_log = logging.getLogger(__name__)

_LINGER_SECONDS = 0.1
"""Time in which further messages may arrive after a first one."""


class ClientConnection(BrokerConnection):
    """Connection by *client*, which stays open."""

    def __init__(self, client: pulsar.Client) -> None:
        self.clock = SystemClock()
        self.client = client
        release_at_exit(client)

    def open(self, policy: Policy, subscribing: Subscribing) -> Parts:
        """Subscribe to both topics of *policy*, or neither; warn if dead letters may be lost."""
        if policy.dead_letters and not policy.name:  # made in a program, without an operator
            _log.warning(
                "%s keeps dead letters only if it has a subscription, which a client can't "
                "check: create one (pulsar-admin topics create-subscription -s %s …), or use the "
                "policy of a RetryPolicy",
                policy.dead_letter_topic, DEAD_LETTER_SUBSCRIPTION,
            )  # fmt: skip
        subscribed = subscribe(self.client, policy, subscribing)
        return Parts(
            self.clock,
            subscribed.consumers,
            Fetcher(list(subscribed.consumers.values()), subscribed.arrivals, subscribed.renewals),
            Producers(self.client, name=subscribing.name, crypto=subscribing.crypto),
            Timer,
            operator.methodcaller("until_stopped"),
            _LINGER_SECONDS,
            OutageProducer(self.client, policy),
            subscribing.nack_delay.total_seconds(),
            subscribing.max_in_flight_bytes,
            self._sequence_log(policy),
            subscribed.behind,
        )

    def _sequence_log(self, policy: Policy) -> SequenceLog | None:
        if not policy.sequenced:
            return None
        # Imported late: it takes long, and few policies need it.
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
"""Number of chunked messages of a partition that the client assembles at a time: one for each
active producer. It keeps their chunks in memory beyond the prefetch. With more of them it drops the
oldest, which `TopicFetcher` recovers."""

_LEAST_BURSTS = 4
"""With a prefetch of fewer bursts, messages are received one by one."""

_BURSTS = pulsar.ConsumerBatchReceivePolicy(BURST, BURST_BYTES, 1)
"""The last argument is the time in milliseconds for which an incomplete burst waits."""

_LEAST_PER_PARTITION = 4
"""Smallest queue of a partition. Partitions share the total, and the client needs a queue."""

_QUEUES_FULL = 2
"""Factor of the queue of a partitioned topic whose messages are redelivered behind it."""

_MOST_IN_BATCHES = 10_000
"""Highest number expected of all partitions together, because each id is kept."""


class Subscribed(NamedTuple):
    """The consumers of both topics.

    Attributes:
        arrivals: of each consumer.
        renewals: of each consumer.
        behind: see `Parts`.
    """

    consumers: dict[TopicName, pulsar.Consumer]
    arrivals: list[Arrivals]
    renewals: list[Renewal]
    behind: int


_CHECK_POLICY = (
    "check that the RetryPolicy is Ready and lists this consumer's role, that the role may consume "
    "the source topic, that the subscription exists (not all brokers create one for a consumer), "
    "that a schema given fits those of the source and retry topic, and that the broker answers"
)
_REMEDIES: Mapping[type[Exception], str] = {
    pulsar.ConsumerBusy: "stop the consumers of another subscription type, or change "
    "subscriptionType of the RetryPolicy to theirs; or raise maxConsumersPerTopic and "
    "maxConsumersPerSubscription of the Pulsar namespace",
    pulsar.NotAllowedError: "allow the subscription type, and Shared for the retry topic: "
    "pulsar-admin namespaces set-subscription-types-enabled; or raise maxSubscriptionsPerTopic of "
    "the Pulsar namespace",
}
"""Refusals that a setting causes; the client does not say which."""


class SubscribeError(RedriveError):
    """The broker refused a subscription of the policy."""

    reason = "SubscribeFailed"


def check_prefetch(prefetch: int) -> None:
    """Check the option `prefetch`.

    Raises:
        InvalidSpecError: it is below 1.
    """
    if prefetch < 1:
        raise InvalidSpecError(
            "prefetch must be at least 1",
            got=prefetch,
            remedy="set prefetch= to 1 or more, or omit it",
        )


def subscribe(client: pulsar.Client, policy: Policy, subscribing: Subscribing) -> Subscribed:
    """Subscribe to the source and the retry topic of *policy*, both or neither.

    Warns about types of the source's subscription whose order retries cannot keep.

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
    consumers, arrivals, renewals, behind = {}, list[Arrivals](), list[Renewal](), 0
    bursts = subscribing.prefetch >= _LEAST_BURSTS * BURST
    # A burst waits in the consumer, in addition to the queue.
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
                "max_pending_chunked_message": MAX_PENDING_CHUNKED,
                "batch_receive_policy": _BURSTS if bursts else None,
                **for_consumer(subscribing.crypto),
            }
            with _refusals_explained(topic, policy.subscription):
                partitions = client.get_topic_partitions(str(topic))
                most = max(waiting, _LEAST_PER_PARTITION * len(partitions))
                open_with = _permitting(
                    functools.partial(client.subscribe, str(topic), policy.subscription, **options),
                    waiting, most,
                )  # fmt: skip
                consumers[topic] = open_with(0)
            undo.callback(consumers[topic].close)
            queue = min(waiting, most // len(partitions))
            partitioned = partitions != [str(topic)]
            early = EarlyRetries(SystemClock()) if topic == policy.retry_topic else None
            arriving = Arrivals(
                str(topic), queue if partitioned else 0, in_bursts=bursts, early=early
            )
            arrivals.append(arriving)
            renewals.append(Renewal(
                consumers[topic], arriving,
                open_with if partitioned else functools.partial(open_with, **_UNDECRYPTED),
                overlaps=policy.subscription_types[topic].honours_delays,
                takes_turns=kind is pulsar.ConsumerType.Failover, permits=queue,
            ))  # fmt: skip
            if partitioned:
                behind += _QUEUES_FULL * max(
                    most, min(LARGEST_BATCH * len(partitions), _MOST_IN_BATCHES)
                )
        undo.pop_all()
    return Subscribed(consumers, arrivals, renewals, behind)


_UNDECRYPTED = {"crypto_failure_action": pulsar.ConsumerCryptoFailureAction.CONSUME}
"""Not with partitions: the client would queue a call for each message that the entry states."""


def _permitting(
    subscribe: Callable[..., pulsar.Consumer], waiting: int, most: int
) -> Callable[..., pulsar.Consumer]:
    """Return a function that subscribes with so many further permits."""

    def with_added(added: int, **more: object) -> pulsar.Consumer:
        return subscribe(
            receiver_queue_size=waiting + added,
            max_total_receiver_queue_size_across_partitions=most + added,
            **more,
        )

    return with_added


def _told(policy: Policy) -> dict[str, str]:
    """Return the metadata of a consumer for the broker's statistics.

    It contains the first policy, because the client cannot change metadata later.
    """
    return {"redrive.policy": policy.name, "redrive.generation": str(policy.generation)}


@contextlib.contextmanager
def _refusals_explained(topic: TopicName, subscription: str) -> Iterator[None]:
    try:
        yield
    except pulsar.Interrupted:
        raise  # the client's KeyboardInterrupt
    except pulsar.exceptions.PulsarException as error:
        raise SubscribeError(
            f"could not subscribe to {topic} as {subscription}",
            got=str(error),
            remedy=_REMEDIES.get(type(error), _CHECK_POLICY),
        ) from error
