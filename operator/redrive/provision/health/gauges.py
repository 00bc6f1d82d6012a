"""Backlogs, ages and deliveries of policies as metrics, there only while a policy is ready."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from datetime import datetime

from redrive.api.retrypolicy import Backlog
from redrive.kube.resources import Key
from redrive.provision import metrics
from redrive.provision.health.deliveries import Deliveries

SOURCE, RETRY, DEAD_LETTER = "source", "retry", "dead-letter"


class Gauges:
    """Shows what the looks at policies have found.

    Args:
        clock: tells how old a dead letter is whenever somebody reads that.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._shown: set[Key] = set()

    def show(self, policy: Key, backlog: Backlog, deliveries: Deliveries) -> None:
        """Show what waits in a policy's topics, and count what was delivered meanwhile."""
        self._shown.add(policy)
        first, retries = deliveries.last
        metrics.DELIVERIES.labels(*policy, SOURCE).inc(first)
        metrics.DELIVERIES.labels(*policy, RETRY).inc(retries)
        metrics.BACKLOG.labels(*policy, RETRY).set(backlog.retry)
        if backlog.dead_letter is None:
            _remove_dead_letters(policy)
            return
        metrics.BACKLOG.labels(*policy, DEAD_LETTER).set(backlog.dead_letter)
        oldest = backlog.oldest_dead_letter
        metrics.OLDEST_DEAD_LETTER.labels(*policy).set_function(lambda: self._age(oldest))

    def keep(self, policies: AbstractSet[Key]) -> None:
        """Show no others any more."""
        for policy in self._shown - policies:
            metrics.DELIVERIES.remove(*policy, SOURCE)
            metrics.DELIVERIES.remove(*policy, RETRY)
            metrics.BACKLOG.remove(*policy, RETRY)
            _remove_dead_letters(policy)
        self._shown &= policies

    def _age(self, oldest: datetime | None) -> float:
        return 0.0 if oldest is None else max(0.0, (self._clock() - oldest).total_seconds())


def _remove_dead_letters(policy: Key) -> None:
    metrics.BACKLOG.remove(*policy, DEAD_LETTER)
    metrics.OLDEST_DEAD_LETTER.remove(*policy)
