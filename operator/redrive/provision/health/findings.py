"""One reading of a policy's statistics, and what was found before → what is found now; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from redrive.admin.acknowledgements import BY_DEFAULT, AckPersistence
from redrive.admin.model import SubscriptionStats
from redrive.api.retrypolicy_status import Backlog
from redrive.kube.status import StatusWarning
from redrive.policy.model import Policy
from redrive.provision.health import backlog
from redrive.provision.health.checks import CheckInput, Thresholds, check
from redrive.provision.health.deliveries import Deliveries
from redrive.provision.health.reader import TopicStats


@dataclass(frozen=True)
class Reading:
    """The statistics of a policy's three topics.

    Attributes:
        begun: the moment before the first of them was read.
        seconds: the same of a clock that never goes back.
        requested: whether the reading was requested, maybe right after another.
        dead_letter: empty where the policy discards.
        quota: see `CheckInput`.
        persistence: see `CheckInput`.
        acknowledged: see `CheckInput`.
        outages: see `CheckInput`.
    """

    policy: Policy
    begun: datetime
    seconds: float
    requested: bool
    quota: int | None
    source: TopicStats
    retry: TopicStats
    dead_letter: TopicStats
    persistence: AckPersistence = BY_DEFAULT
    acknowledged: int = 0
    outages: tuple[str, ...] = ()

    @property
    def subscriptions(self) -> tuple[SubscriptionStats | None, SubscriptionStats | None]:
        """Return the policy's subscription on the source topic and on the retry topic."""
        name = self.policy.subscription
        return self.source.get(name), self.retry.get(name)

    @property
    def backlog(self) -> Backlog:
        """Return what waits in the policy's own subscriptions."""
        return backlog.backlog_of(
            self.retry.get(self.policy.subscription),
            self.dead_letter.get(self.policy.dead_letter_subscription),
            discards=not self.policy.dead_letters,
            now=self.begun,
        )


@dataclass(frozen=True)
class Findings:
    """What the readings of one policy have found so far.

    Attributes:
        unconsumed: see `CheckInput`; at the last reading.
    """

    deliveries: Deliveries
    unconsumed: bool
    warnings: tuple[StatusWarning, ...]

    @classmethod
    def of(
        cls,
        reading: Reading,
        before: Findings | None,
        published: Iterable[StatusWarning],
        limits: Thresholds,
    ) -> Findings:
        """Return what is found by now.

        Args:
            reading: the latest one.
            before: what was found until then; None if this is the first reading.
            published: the policy's warnings so far.
            limits: from where on a check warns.
        """
        source, retry = reading.subscriptions
        counters = [None if found is None else found.delivered for found in (source, retry)]
        window = (
            Deliveries.begin(reading.seconds, *counters)
            if before is None
            else before.deliveries.seen(reading.seconds, *counters)
        )
        given = CheckInput(
            policy=reading.policy,
            source=source,
            retry=reading.retry,
            dead_letter=reading.dead_letter,
            deliveries=window,
            # A requested reading may come right after another: too early for a second finding.
            unconsumed_before=before is not None and before.unconsumed and not reading.requested,
            published={warning.reason: warning for warning in published},
            now=reading.begun,
            quota=reading.quota,
            persistence=reading.persistence,
            acknowledged=reading.acknowledged,
            outages=reading.outages,
        )
        return cls(window, given.unconsumed, check(given, limits))
