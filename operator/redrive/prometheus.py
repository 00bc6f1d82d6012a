"""Metrics of consumers for Prometheus; redrive imports this module nowhere else.

    from redrive import prometheus

    with RetryConsumer(
        client, PolicyFile(), on_event=prometheus.count, middleware=[prometheus.HandlerMetrics()]
    ) as consumer:
        prometheus.follow(consumer)
        consumer.run(handle)

Needs the extra `prometheus`. The metrics are process-wide sums over consumers, by policy, topic and
subscription, in the default registry. docs/reference/consumer-metrics.md documents them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence, Sized
from typing import Protocol, runtime_checkable

import pulsar
from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from redrive.delivery.forking import InheritedError
from redrive.delivery.middleware.chain import (
    BoundConsumer,
    Handle,
    Middleware,
    Outcome,
    Settle,
    Settlement,
)
from redrive.delivery.reporting import Event, Name
from redrive.errors import InvalidSpecError
from redrive.policy.model import Policy
from redrive.policy.verdict import Done

_WHERE = ("policy", "policy_namespace", "source_topic", "subscription")
"""The same labels as on the series of the operator, so that both can be joined."""


def _counters(rows: Iterable[tuple[Name, str, str]], *labels: str) -> dict[Name, Counter]:
    """Return the counters of *rows*: an event, and the name and the text of its counter."""
    return {event: Counter(name, text, (*_WHERE, *labels)) for event, name, text in rows}


_COUNTERS = _counters((
    (Name.RETRIED, "redrive_consumer_retried_messages",
     "Messages that the broker has stored in the retry topic."),
    (Name.RETRIED_IN_PLACE, "redrive_consumer_retried_in_place_messages",
     "Failed messages of ordered policies that wait in their consumer for the next attempt."),
    (Name.COPY_DROPPED, "redrive_consumer_dropped_copies",
     "Messages delivered again while in flight or soon after they were settled; not handled."),
    (Name.LATE_SUCCESS, "redrive_consumer_late_successes",
     "Messages handled well, but after their time-out; they may be handled again."),
    (Name.TAKING_STOPPED, "redrive_consumer_taking_stopped",
     "How often a consumer stopped to take messages, because too many waited to be sent."),
    (Name.TAKING_RESUMED, "redrive_consumer_taking_resumed",
     "How often it resumed after that."),
    (Name.DISCONNECTED, "redrive_consumer_disconnects",
     "Lost connections of a topic that lasted for the consumer's disconnect_timeout."),
    (Name.RECONNECTED, "redrive_consumer_reconnects",
     "Connections that came back after such a loss."),
    (Name.RECOVERED, "redrive_consumer_recoveries",
     "How often messages were redelivered whose chunks the client had dropped."),
    (Name.CLOCK_AHEAD, "redrive_consumer_clocks_ahead",
     "How often a consumer found the clock of its host ahead of the broker's; at most hourly."),
    (Name.LEFT_UNSETTLED, "redrive_consumer_left_unsettled_messages",
     "In-flight messages when their consumer was closed; the broker delivers them again."),
))  # fmt: skip
_SUCCEEDED = Counter(
    "redrive_consumer_succeeded_attempts",
    "Attempts that succeeded: their messages are acknowledged.",
    _WHERE,
)
_SECONDS = Histogram(
    "redrive_consumer_handler_duration_seconds",
    "Duration of calls of a handler, whatever their result; a batch is one call.",
    _WHERE,
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300),
)
_COUNTERS_BY_REASON = _counters((
    (Name.ATTEMPT_FAILED, "redrive_consumer_failed_attempts",
     "Attempts by a handler that failed; the reason is the class of the exception."),
    (Name.DEAD_LETTERED, "redrive_consumer_dead_lettered_messages",
     "Messages that the broker has stored in the dead-letter topic."),
    (Name.DISCARDED, "redrive_consumer_discarded_messages",
     "Messages discarded without a dead letter, as the policy defines."),
    (Name.DROPPED, "redrive_consumer_dropped_messages",
     "Messages whose handler failed, of a consumer that broadcasts; never handled again."),
    (Name.HELD, "redrive_consumer_held_attempts",
     "Failures of a handler in an outage, which use up no retry; the reason is the cause of it."),
    (Name.OUTAGE_BEGAN, "redrive_consumer_outages_begun",
     "Outages for which a consumer has paused; the reason is the cause of most failures."),
    (Name.OUTAGE_ENDED, "redrive_consumer_outages_ended",
     "Outages that have ended, because a message was handled."),
    (Name.OUTAGE_IGNORED, "redrive_consumer_outages_ignored",
     "Outages during which a consumer resumes: they last too long, or are overridden."),
    (Name.NEGATIVELY_ACKNOWLEDGED, "redrive_consumer_negatively_acknowledged_messages",
     "Messages returned to the broker; the reason is the class of the cause, or empty."),
    (Name.UNSENT, "redrive_consumer_unsent_messages",
     "Sends without a receipt from the next topic, which are repeated."),
), "reason")  # fmt: skip


def count(event: Event) -> None:
    """Count *event*: pass this function as `on_event`."""
    where = _where(event.policy, event.source, event.subscription)
    if event.event in _COUNTERS:
        _COUNTERS[event.event].labels(*where).inc(event.count)
    else:
        _COUNTERS_BY_REASON[event.event].labels(*where, event.reason).inc()


def _where(policy: str, source: str, subscription: str) -> tuple[str, str, str, str]:
    """Return the values of `_WHERE`; a *policy* of a program may name no resource."""
    namespace, _, name = policy.partition("/")
    if not (namespace and name) or "/" in name:
        namespace = name = ""
    return name, namespace, source, subscription


class HandlerMetrics(Middleware):
    """Counts successful attempts, and measures calls of handlers; consumers may share it.

    Together with the failed attempts of `count`, this gives the failure rate.
    """

    def bind(self, consumer: BoundConsumer) -> Middleware:
        """Return the middleware of *consumer*."""
        return _ConsumerMetrics(consumer)


class _ConsumerMetrics(Middleware):
    """Measurements of one consumer, whose policy keeps its name and topics."""

    def __init__(self, consumer: BoundConsumer) -> None:
        self._consumer = consumer

    def handle(self, handle: Handle) -> Handle:
        """Measure each call."""

        def handle_measured(messages: Sequence[pulsar.Message]) -> Sequence[Outcome]:
            with self._seconds.time():
                return handle(messages)

        return handle_measured

    def settle(self, settle: Settle) -> Settle:
        """Count messages that are acknowledged as handled."""

        def settle_counted(settlement: Settlement) -> pulsar.MessageId | None:
            receipt = settle(settlement)
            if isinstance(settlement.verdict, Done):
                self._succeeded.inc()
            return receipt

        return settle_counted

    @functools.cached_property
    def _seconds(self) -> Histogram:
        return _SECONDS.labels(*self._where)

    @functools.cached_property
    def _succeeded(self) -> Counter:
        return _SUCCEEDED.labels(*self._where)

    @property
    def _where(self) -> tuple[str, str, str, str]:
        policy = self._consumer.policy
        return _where(policy.name, str(policy.topic), policy.subscription)


@runtime_checkable
class FollowedReader(Protocol):
    """State of a broadcasting consumer for gauges."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def topic(self) -> str:
        """Return the topic that it reads."""

    @property
    def connected(self) -> bool:
        """Return True if it has a connection to the broker."""


class FollowedConsumer(Protocol):
    """State of a consumer of a policy for gauges."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def connected(self) -> bool:
        """Return True if it has a connection to the broker for both topics."""

    @property
    def policy(self) -> Policy:
        """Return the policy in force."""

    @property
    def outages(self) -> Sized:
        """Return the outages for which it has paused automatically."""

    @property
    def dead_keys(self) -> int:
        """Return the number of keys whose messages follow a dead letter."""

    @property
    def in_flight(self) -> int:
        """Return the number of its in-flight messages."""


_GAUGES = {
    "redrive_consumer_policy_generation": "Generation of the RetryPolicy in force; 0 if a program "
    "created the policy.",
    "redrive_consumer_outages": "Number of outages for which the consumer has paused; 0 if it has "
    "not.",
    "redrive_consumer_in_flight_messages": "Messages that the consumer has taken and not settled.",
    "redrive_consumer_connected": "1 if the consumer has a connection to the broker for each of "
    "its topics, otherwise 0.",
    "redrive_consumer_dead_keys": "Keys whose messages follow a dead letter; the same for all "
    "consumers of a policy.",
}


class _Followed(Collector):
    """Gauges of consumers, read at each scrape.

    A scrape also reads a changed policy file, as the next failing message would.
    """

    def __init__(self) -> None:
        self.consumers: weakref.WeakSet[FollowedConsumer | FollowedReader] = weakref.WeakSet()

    def describe(self) -> Iterable[GaugeMetricFamily]:
        for name, meaning in _GAUGES.items():
            yield GaugeMetricFamily(name, meaning, labels=(*_WHERE, "consumer"))

    def collect(self) -> Iterable[GaugeMetricFamily]:
        generations, outages, in_flight, connected, dead_keys = self.describe()
        for consumer in list(self.consumers):
            try:
                name, is_connected = consumer.name, consumer.connected
                if isinstance(consumer, FollowedReader):
                    connected.add_metric((*_where("", consumer.topic, ""), name), is_connected)
                    continue
            except (InvalidSpecError, InheritedError):
                # An asynchronous consumer that is not entered yet, or one of the parent process.
                continue
            policy = consumer.policy
            labels = (*_where(policy.name, str(policy.topic), policy.subscription), name)
            connected.add_metric(labels, is_connected)
            generations.add_metric(labels, policy.generation)
            outages.add_metric(labels, len(consumer.outages))
            in_flight.add_metric(labels, consumer.in_flight)
            if policy.sequenced:
                dead_keys.add_metric(labels, consumer.dead_keys)
        yield from (generations, outages, in_flight, connected, dead_keys)


_followed = _Followed()
REGISTRY.register(_followed)


def follow(consumer: FollowedConsumer | FollowedReader) -> None:
    """Export *consumer*'s connection, messages, outages and policy as metrics, while it exists.

    Of a broadcasting consumer only the connection is exported; its labels except the topic are
    empty. An asynchronous consumer may be followed before it is entered, and is exported from then.
    """
    _followed.consumers.add(consumer)
