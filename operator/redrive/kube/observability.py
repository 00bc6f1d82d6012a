"""Metrics of work queues, conditions and leader election, and heartbeats of the operator.

`docs/reference/metrics.md` lists the metrics.

The event loop and every watch send heartbeats to `Liveness`. The endpoint of the command reads them
in its own thread, so it answers even while the event loop hangs.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from redrive.api.conditions import ConditionStatus, written_ready
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.resources import Key, Resource
from redrive.kube.status import STATES
from redrive.reasons import Reason

LEASE_HELD = Gauge(
    "redrive_lease_held", "1 while this operator holds the lease and may write, otherwise 0."
)
OBJECTS = "redrive_objects"
OTHER = "Other"
"""Label value for texts in conditions that redrive never writes."""
_STATUSES = frozenset(map(str, ConditionStatus))
_LABELS = ("kind", "condition", "status", "reason")
POLICY_READY = "redrive_policy_ready"
POLICY_CONDITION = "redrive_policy_condition"
POLICY_LABELS = ("policy", "policy_namespace", "source_topic", "subscription")
"""The metrics of consumers have the same labels. Scrapers overwrite a label `namespace`."""
RECONCILES = Counter(
    "redrive_reconciles_total",
    "Reconciles, by kind and by result: success, requeue or error.",
    ("kind", "result"),
)
RECONCILE_SECONDS = Histogram(
    "redrive_reconcile_duration_seconds",
    "Duration of reconciles, without the time in the queue.",
    ("kind",),
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
QUEUE_DEPTH = Gauge(
    "redrive_reconcile_queue_depth",
    "Objects that wait in the queue until their reconcile begins.",
    ("kind",),
)
QUEUE_SECONDS = Histogram(
    "redrive_reconcile_queue_duration_seconds",
    "Time that objects waited in the queue until their reconcile began.",
    ("kind",),
    buckets=(0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900),
)
LOOP_DELAY = Histogram(
    "redrive_event_loop_delay_seconds",
    "Delay of the event loop: the time between a timer's due time and its callback, in seconds.",
    buckets=(0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)
BREAKER_OPEN = Gauge(
    "redrive_breaker_open",
    "1 while the circuit breaker of the connection is open, otherwise 0.",
    ("connection_namespace", "connection"),
)


class LeaseMetrics(Collector):
    """Leader changes as recorded in the Lease; equal at each replica.

    Attributes:
        transitions: None until the Lease was read.
    """

    transitions: int | None = None

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return the counter."""
        family = CounterMetricFamily(
            "redrive_lease_transitions_total", "Changes of the leader, as the Lease records them."
        )
        if self.transitions is not None:
            family.add_metric((), self.transitions)
        yield family


LEASE = LeaseMetrics()
REGISTRY.register(LEASE)


class ConditionMetrics(Collector):
    """Conditions of objects: their number by kind, and the conditions of each policy."""

    def __init__(self, caches: Mapping[Resource, Cache]) -> None:
        self._caches = caches

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count the current conditions."""
        family = GaugeMetricFamily(
            OBJECTS, "Objects of redrive, by each condition in their status.", labels=_LABELS
        )
        reasons = frozenset[str](Reason)
        types = reasons | STATES
        counts = collections.Counter(
            (
                resource.kind,
                _known(condition.get("type"), types),
                _known(condition.get("status"), _STATUSES),
                _known(condition.get("reason"), reasons),
            )
            for resource, cache in self._caches.items()
            for body in cache
            for condition in (body.get("status") or {}).get("conditions") or ()
        )
        for labels, count in counts.items():
            family.add_metric(labels, count)
        yield family
        yield self._readiness()
        yield self._warnings(types)
        yield self._dead_letters()

    def _warnings(self, types: frozenset[str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            POLICY_CONDITION,
            "1 while a RetryPolicy has a condition that warns; absent without it.",
            labels=("policy", "policy_namespace", "type"),
        )
        for body in self._caches.get(resources.POLICIES, ()):
            conditions = (body.get("status") or {}).get("conditions") or ()
            present = {
                _known(condition.get("type"), types)
                for condition in conditions
                if condition.get("status") == ConditionStatus.TRUE
            }
            key = Key.of(body)
            for kind in sorted(present - STATES):
                family.add_metric((key.name, key.namespace, kind), 1)
        return family

    def _readiness(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            POLICY_READY, "1 while a RetryPolicy is Ready, otherwise 0.", labels=POLICY_LABELS
        )
        for body in self._caches.get(resources.POLICIES, ()):
            spec, key = body["spec"], Key.of(body)
            labels = (key.name, key.namespace, spec["topic"], spec["subscription"])
            family.add_metric(labels, written_ready(body).get("status") == ConditionStatus.TRUE)
        return family

    def _dead_letters(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "redrive_rocketmq_dead_letters",
            "Dead letters of a RocketMQRetryPolicy that the masters keep.",
            labels=POLICY_LABELS,
        )
        for body in self._caches.get(resources.ROCKETMQ_POLICIES, ()):
            spec, key = body["spec"], Key.of(body)
            count = (body.get("status") or {}).get("deadLetters")
            if count is not None:
                family.add_metric((key.name, key.namespace, spec["topic"], spec["group"]), count)
        return family


def _known(text: str | None, texts: frozenset[str]) -> str:
    """Return *text* if it is in *texts*: each text of a user would be a new time series."""
    return text if text in texts else OTHER


@contextmanager
def counting_objects(caches: Mapping[Resource, Cache]) -> Iterator[None]:
    """Export the conditions of the objects in *caches* while the block runs."""
    collector = ConditionMetrics(caches)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


STALL_SECONDS = 60.0
"""A part has stalled if it sent no heartbeat for longer."""
BEAT_SECONDS = 1.0
LATE_SECONDS = 5.0
"""Delay from which the event loop sends no heartbeat: it would not renew the lease in time."""
EVENT_LOOP = "event loop"


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Do *work* in a task of its own while the block runs, then cancel it."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Liveness:
    """Latest heartbeat of each part; thread-safe.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[str, float] = {}
        self.ready = False

    def beat(self, part: str) -> None:
        """Record a heartbeat of *part*; the next must follow within `STALL_SECONDS`."""
        self._beats[part] = self._clock()

    def forget(self, part: str) -> None:
        """Expect no further heartbeats of *part*."""
        self._beats.pop(part, None)

    def silent_for(self) -> dict[str, float]:
        """Return the seconds since the latest heartbeat of each part."""
        now = self._clock()
        return {part: now - at for part, at in tuple(self._beats.items())}

    def has_stalled(self) -> bool:
        """Return True if a part has stalled."""
        return any(silent > STALL_SECONDS for silent in self.silent_for().values())

    def beating(self) -> AbstractAsyncContextManager[None]:
        """Send heartbeats of the event loop while the block runs, unless the loop is late."""
        return in_background(self._beat_event_loop(), "heartbeat")

    async def _beat_event_loop(self) -> None:
        self.beat(EVENT_LOOP)
        while True:
            due = self._clock() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            delay = max(self._clock() - due, 0.0)
            LOOP_DELAY.observe(delay)
            if delay < LATE_SECONDS:
                self.beat(EVENT_LOOP)
