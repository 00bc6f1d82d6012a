"""Backlogs, ages and deliveries of policies as metrics, there until a policy is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from redrive.api.retrypolicy_status import Backlog
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.provision import metrics
from redrive.provision.health.deliveries import Deliveries

SOURCE, RETRY, DEAD_LETTER = "source", "retry", "dead-letter"
"""The role that a topic has for a policy."""

Labels = tuple[str, str, str, str]
"""Values of `metrics.POLICY_LABELS`."""


class Gauges:
    """Shows what the looks at policies have found.

    Args:
        clock: read when the age of a dead letter is scraped.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._shown: dict[Key, Labels] = {}

    def show(self, key: Key, policy: Policy, backlog: Backlog, deliveries: Deliveries) -> None:
        """Show what waits in a policy's topics, and count what was delivered meanwhile."""
        labels = (key.name, key.namespace, str(policy.topic), policy.subscription)
        if self._shown.setdefault(key, labels) != labels:
            _remove(self._shown[key])  # of another policy, which had this name
            self._shown[key] = labels
        first, retries = deliveries.last
        metrics.DELIVERIES.labels(*labels, SOURCE).inc(first)
        metrics.DELIVERIES.labels(*labels, RETRY).inc(retries)
        metrics.BACKLOG.labels(*labels, RETRY).set(backlog.retry)
        if backlog.dead_letter is None:
            _remove_dead_letters(labels)
            return
        metrics.BACKLOG.labels(*labels, DEAD_LETTER).set(backlog.dead_letter)
        oldest = backlog.oldest_dead_letter
        metrics.OLDEST_DEAD_LETTER.labels(*labels).set_function(lambda: self._age(oldest))

    def remove(self, policy: Key) -> None:
        """Remove the metrics of a policy that is gone."""
        if policy in self._shown:
            _remove(self._shown.pop(policy))

    def clear(self) -> None:
        """Remove all metrics: nothing is looked at any more."""
        for policy in tuple(self._shown):
            self.remove(policy)

    def _age(self, oldest: datetime | None) -> float:
        return 0.0 if oldest is None else max(0.0, (self._clock() - oldest).total_seconds())


def _remove(labels: Labels) -> None:
    metrics.DELIVERIES.remove(*labels, SOURCE)
    metrics.DELIVERIES.remove(*labels, RETRY)
    metrics.BACKLOG.remove(*labels, RETRY)
    _remove_dead_letters(labels)


def _remove_dead_letters(labels: Labels) -> None:
    metrics.BACKLOG.remove(*labels, DEAD_LETTER)
    metrics.OLDEST_DEAD_LETTER.remove(*labels)
