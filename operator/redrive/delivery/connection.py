"""The parts of a consumer at a broker: two subscriptions, their stream, and producers.

Renewal of a subscription whose consumer has lost its permits:

A broker sends as many messages as the client permits, and counts an entry as the number of messages
that its metadata states. Of an entry that it can't decompress the client returns one permit, and of
one that it can't decrypt none. So a single entry that states 60,000 messages takes the permits of a
consumer, which receives nothing from then on. Another consumer of the client has all permits again.

An entry that can't be decrypted stays unacknowledged, and comes first again. A renewed consumer is
therefore given these entries as they are. One that states more messages than clients put in a batch
is dead-lettered; the permits of the others are added to those of the consumer. With partitions it
is not given them, and such entries stop it again.

The client shows neither its permits nor the entries that it drops. So the consumer is renewed while
it receives nothing, and the topic has later messages: after a minute, and then at intervals that
double up to an hour, since other consumers of the subscription may have received those.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

import pulsar

from redrive.delivery.arrivals import (
    BURST,
    BURST_BYTES,
    LARGEST_BATCH,
    Arrivals,
    EarlyRetries,
    Place,
    place_of,
)
from redrive.delivery.concurrency import Timer, log_of
from redrive.delivery.fetcher import Fetcher
from redrive.delivery.forking import release_at_exit
from redrive.delivery.forwarder import Producers
from redrive.delivery.parts import (
    BrokerConnection,
    CrashLog,
    Parts,
    SequenceLog,
    Subscribing,
    SystemClock,
    for_consumer,
)
from redrive.delivery.reporting import OutageProducer
from redrive.errors import RedriveError
from redrive.messages import id_text
from redrive.policy.model import Policy, SubscriptionType
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION, TopicName

_log = log_of(__name__)

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
            self._sequence_log(policy, subscribing.crash_log),
            subscribed.behind,
        )

    def _sequence_log(self, policy: Policy, crash_log: CrashLog | None) -> SequenceLog | None:
        if not policy.sequenced:
            return None
        # Imported late: it takes long, and few policies need it.
        from redrive.delivery.middleware.sequencing import SequenceTopic  # noqa: PLC0415

        open_reader = None
        if crash_log is not None and (crash_log.token or crash_log.certificate):
            try:
                from redrive.delivery.inspection import open_record_reader  # noqa: PLC0415
            except ImportError as error:
                _log.warning(
                    "a malformed record of dead letters by key would end this process; got %s; "
                    "pip install 'redrive[crash-log]'", error,
                )  # fmt: skip
            else:
                open_reader = functools.partial(open_record_reader, self.client, crash_log)
        return SequenceTopic(self.client, policy.sequences_topic, open_reader)


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

_BURSTS_AHEAD = 4
"""A burst is so many times smaller than the prefetch at least."""
_LEAST_BURST = 128
"""Instead of smaller bursts, messages are received one by one."""
_BURST_MS = 1
"""Time in milliseconds for which an incomplete burst waits."""

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
    "maxConsumersPerSubscription of the topic, its namespace and the broker",
    pulsar.NotAllowedError: "allow the subscription type, and Shared for the retry topic: "
    "pulsar-admin namespaces set-subscription-types-enabled; or raise maxSubscriptionsPerTopic of "
    "the topic, its namespace and the broker",
}
"""Refusals that a setting causes; the client does not say which."""


class SubscribeError(RedriveError):
    """The broker refused a subscription of the policy."""

    reason = "SubscribeFailed"


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
    burst = min(BURST, subscribing.prefetch // _BURSTS_AHEAD)
    bursts = burst >= _LEAST_BURST
    receives = pulsar.ConsumerBatchReceivePolicy(burst, BURST_BYTES, _BURST_MS) if bursts else None
    # A burst waits in the consumer, in addition to the queue.
    waiting = subscribing.prefetch - burst if bursts else subscribing.prefetch
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
                "batch_receive_policy": receives,
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


MAX_HELD_PERMITS = 10_000
"""Highest number of permits of entries of another key for which the consumer has others."""
_FIRST_PAUSE, _LONGEST_PAUSE = 60.0, 3_600.0
"""Seconds until the first renewal, and after one without effect; twice as many after each."""
_EFFECT_SECONDS = 1.5
"""A renewal had an effect if a message comes within so long."""


class Renewal:
    """Opens the subscription of a consumer of the client again. `withholds` is for any thread.

    Args:
        consumer: others refer to it, so it stays the same object.
        arrivals: those of the consumer.
        subscribe: opens the subscription with so many more permits.
        overlaps: True if it is opened again before the consumer is closed: of a subscription
            without consumers the broker forgets its delayed messages.
        takes_turns: True if one of several consumers is active. One that has received nothing may
            be inactive, and is not renewed.
        permits: of a consumer, or of each partition.

    Attributes:
        remove: called with each entry that is to be removed, and the messages that it states.
    """

    def __init__(  # noqa: PLR0913 - parts and traits of one subscription
        self,
        consumer: pulsar.Consumer,
        arrivals: Arrivals,
        subscribe: Callable[[int], pulsar.Consumer],
        *,
        overlaps: bool,
        takes_turns: bool,
        permits: int,
    ) -> None:
        self._consumer = consumer
        self._arrivals = arrivals
        self._subscribe = subscribe
        self._overlaps = overlaps
        self._takes_turns = takes_turns
        self._permits = permits
        self.remove: Callable[[pulsar.Message, int], None] = lambda *_: None
        self._held: set[Place] = set()  # entries of another key
        # Permits that these take, those added for them, and those taken since the last renewal.
        self._of_held = self._added = self._taken = 0
        self._pause, self._renewed_at = _FIRST_PAUSE, float("-inf")
        self._next = time.monotonic() + self._pause

    @property
    def is_short(self) -> bool:
        """Return True if undecryptable entries have taken most permits of a renewed consumer."""
        return self._taken > (self._permits + self._added) // 2

    def is_due(self) -> bool:
        """Return True if the consumer, which receives nothing, is to be renewed."""
        if self.is_short:
            return True
        highest = self._arrivals.highest
        if time.monotonic() < self._next or (self._takes_turns and highest[0] < 0):
            return False
        try:
            last = self._consumer.get_last_message_id()
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.PulsarException:  # not supported with partitions
            return True
        return place_of(last)[:2] > highest[:2]

    def renew(self, is_closing: Callable[[], bool], wait: Callable[[], None]) -> None:
        """Renew the consumer. One that was closed for that is opened until *is_closing*.

        Args:
            wait: called each second meanwhile.
        """
        if not self._overlaps:
            self._close()
        while not self._replace() and not self._overlaps and not is_closing():
            wait()
            time.sleep(1)
        if is_closing():  # which may have closed the one before
            self._close()

    def _replace(self) -> bool:
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        added = 2 * self._of_held  # the client sends permits once it has half of its own
        try:
            spare = self._subscribe(added)
        except pulsar.Interrupted:
            raise  # the client's word for KeyboardInterrupt
        except pulsar.PulsarException as error:
            _log.warning(
                "the subscription of %s was not renewed: %s", self._consumer.topic(), error
            )
            return False
        # Others refer to the client's object for Python, which refers to the one of C++.
        mine, theirs = vars(self._consumer), vars(spare)
        mine["_consumer"], theirs["_consumer"] = theirs["_consumer"], mine["_consumer"]
        with contextlib.suppress(pulsar.PulsarException):
            spare.close()
        self._added, self._taken, self._renewed_at = added, 0, time.monotonic()
        return True

    def had_effect(self) -> bool:
        """Return True if a message that has come now did so by a renewal; then the next is soon."""
        had_effect = time.monotonic() - self._renewed_at < _EFFECT_SECONDS
        if had_effect:
            self._pause, self._next = _FIRST_PAUSE, 0.0
        return had_effect

    def _close(self) -> None:
        with contextlib.suppress(pulsar.PulsarException):
            vars(self._consumer)["_consumer"].close()

    def withholds(self, message: pulsar.Message) -> bool:
        """Return True if *message* is an entry that can't be decrypted, and hold or remove it."""
        context = message.encryption_context()
        if context is None or not context.is_decryption_failed():
            return False
        messages = context.batch_size()
        taken = max(0, messages - 1)  # the client has returned one
        place = place_of(message.message_id())
        if messages > LARGEST_BATCH:
            self._taken += taken
            self.remove(message, messages)
            return True
        if not self._held:
            _log.warning(
                "entries of %s can't be decrypted, and stay unacknowledged, first of them %s; "
                "check that crypto= has the key of their producer",
                message.topic_name(), id_text(message.message_id()),
            )  # fmt: skip
        if place not in self._held and self._of_held + taken <= MAX_HELD_PERMITS:
            self._held.add(place)
            self._of_held += taken
        if place in self._held:
            self._taken += taken
        return True
