"""Metrics of provisioning and of the topics of policies, for Prometheus.

`docs/reference/metrics.md` lists them. The series of a policy's topics show the last poll of their
statistics, and exist until the policy is deleted. They cost no calls to a broker beside those of
the poll.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from redrive.kube.observability import POLICY_LABELS
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.provision.findings import Findings
from redrive.provision.health_checks import Reading

REPAIRS = Counter(
    "redrive_drift_repairs_total",
    "Actions that repaired drift of a policy that was ready.",
    ("kind",),
)

SOURCE, RETRY, DEAD_LETTER = "source", "retry", "dead-letter"
"""Role of a topic for a policy."""

Labels = tuple[str, str, str, str]
"""Values of `POLICY_LABELS`."""


@dataclass
class _Topics:
    """The topics of one policy: their last reading, and counts of all readings.

    Attributes:
        first: messages that were delivered from the source topic.
        retries: messages that were delivered from the retry topic.
        dead_letters: messages that were stored in the dead-letter topic.
    """

    labels: Labels
    reading: Reading
    first: int = 0
    retries: int = 0
    dead_letters: int = 0


def _seconds_since(moment: datetime | None, now: datetime) -> float:
    return 0.0 if moment is None else max(0.0, (now - moment).total_seconds())


def _backlog(topics: _Topics, _: datetime) -> Mapping[str, float | None]:
    backlog = topics.reading.backlog
    return {RETRY: backlog.retry, DEAD_LETTER: backlog.dead_letter}


def _due(topics: _Topics, _: datetime) -> Mapping[str, float | None]:
    own = {SOURCE: topics.reading.own_source, RETRY: topics.reading.retries}
    return {role: None if stats is None else stats.due for role, stats in own.items()}


def _oldest_retry(topics: _Topics, now: datetime) -> float:
    retry = topics.reading.retries
    return _seconds_since(None if retry is None else retry.oldest, now)


def _of_dead_letters(
    value: Callable[[_Topics, datetime], float | None],
) -> Callable[[_Topics, datetime], float | None]:
    """Return a function that has no value for policies that discard messages."""
    return lambda topics, now: value(topics, now) if topics.reading.policy.dead_letters else None


_BY_ROLE: tuple[
    tuple[str, str, Callable[[_Topics, datetime], Mapping[str, float | None]]], ...
] = (
    ("redrive_backlog_messages",
     "Messages of a policy's retry or dead-letter topic that are not acknowledged.", _backlog),
    ("redrive_due_messages",
     "Messages that consumers can process now: the backlog without delayed messages.", _due),
    ("redrive_deliveries_total",
     "Messages delivered to the consumers of a policy's subscription, as the operator saw them.",
     lambda topics, _: {SOURCE: topics.first, RETRY: topics.retries}),
)  # fmt: skip
_SERIES: tuple[tuple[str, str, Callable[[_Topics, datetime], float | None]], ...] = (
    ("redrive_oldest_retry_age_seconds",
     "Age of the oldest message in a policy's retry topic; 0 without any.", _oldest_retry),
    ("redrive_longest_delay_seconds", "The longest delay that a policy has between two attempts.",
     lambda topics, _: topics.reading.policy.longest_delay.total_seconds()),
    ("redrive_oldest_dead_letter_age_seconds",
     "Age of the oldest message in a policy's dead-letter topic; 0 without any.",
     _of_dead_letters(lambda topics, now: _seconds_since(
         topics.reading.backlog.oldest_dead_letter_time, now))),
    ("redrive_dead_letters_total",
     "Messages stored in a policy's dead-letter topic, as the operator saw them.",
     _of_dead_letters(lambda topics, _: topics.dead_letters)),
    ("redrive_dead_letter_bytes",
     "Size of the dead letters in the fullest partition, to which the quota applies.",
     _of_dead_letters(lambda topics, _: topics.reading.dead_letter_bytes)),
    ("redrive_dead_letter_quota_bytes",
     "Bytes that a partition of the dead-letter topic may hold; absent without a limit.",
     _of_dead_letters(lambda topics, _: topics.reading.quota)),
    ("redrive_statistics_timestamp_seconds",
     "Time at which the statistics of a policy's topics were read.",
     lambda topics, _: topics.reading.begun.timestamp()),
)  # fmt: skip


class TopicMetrics(Collector):
    """Statistics of the topics of policies; registered from its creation until `close`.

    Args:
        clock: read at each scrape, for ages.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._policies: dict[Key, _Topics] = {}
        REGISTRY.register(self)

    def show(self, policy: Key, reading: Reading, findings: Findings) -> None:
        """Show a reading, and add what was delivered and stored since the reading before it."""
        labels = _labels(policy, reading.policy)
        topics = self._policies.get(policy)
        if topics is None or topics.labels != labels:  # another policy had this name
            topics = self._policies[policy] = _Topics(labels, reading)
        first, retries = findings.deliveries.last
        topics.reading = reading
        topics.first += first
        topics.retries += retries
        topics.dead_letters += findings.dead_letters

    def remove(self, policy: Key) -> None:
        """Remove the series of a policy that was deleted."""
        self._policies.pop(policy, None)

    def close(self) -> None:
        """Remove all series: nothing is polled any more."""
        with suppress(KeyError):  # closed before
            REGISTRY.unregister(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Return the series of all policies."""
        policies, now = tuple(self._policies.values()), self._clock()
        for name, text, values in _BY_ROLE:
            family = _family(name, text, (*POLICY_LABELS, "role"))
            for topics in policies:
                for role, number in values(topics, now).items():
                    if number is not None:
                        family.add_metric((*topics.labels, role), number)
            yield family
        for name, text, value in _SERIES:
            family = _family(name, text, POLICY_LABELS)
            for topics in policies:
                if (number := value(topics, now)) is not None:
                    family.add_metric(topics.labels, number)
            yield family


def _labels(policy: Key, values: Policy) -> Labels:
    return policy.name, policy.namespace, str(values.topic), values.subscription


def _family(
    name: str, text: str, labels: tuple[str, ...]
) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, text, labels=labels)
