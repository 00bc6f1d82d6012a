"""Statistics of one connection's topics, asked for no more often than a broker should be."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.model import SubscriptionStats
from redrive.admin.policies import BY_SIZE, KeepsBacklog, size_limit
from redrive.policy.naming import TopicName
from redrive.policy.outage import BEACON
from redrive.provision.rate_limit import RateLimit
from redrive.provision.topic_policies import quotas_in_force

FORGET_AFTER_SECONDS = 3_600.0
QUOTA_SECONDS = 900.0
"""How old what is known of a quota may be: as old as a namespace between two resyncs."""

TopicStats = Mapping[str, SubscriptionStats]


@dataclass(frozen=True)
class _Answer:
    at: float
    partitioned: bool
    stats: TopicStats


class Reader:
    """Reads topics one after the other, a source topic at most once in *interval* seconds.

    Within that time, policies of one source topic get the same answer.

    Args:
        interval: in seconds.
        paces: of the calls to its broker, and to all.
    """

    def __init__(self, interval: float, paces: Sequence[RateLimit]) -> None:
        self._interval = interval
        self._paces = paces
        self._answers: dict[tuple[TopicName, bool], _Answer] = {}
        self._quotas: dict[TopicName, tuple[float, int | None]] = {}

    async def read(
        self, admin: Admin, topic: TopicName, *, oldest: bool = False, fresh: bool = False
    ) -> TopicStats:
        """Return how the subscriptions of *topic* stand, and the oldest messages if asked.

        Args:
            admin: leads to the broker.
            topic: any topic.
            oldest: whether to read when the oldest unacknowledged message was published.
            fresh: whether to read it even if it was read within the interval, as the topics of a
                single policy are.

        Raises:
            AdminNotFoundError: there is no such topic.
            AdminError: it can't be read.
        """
        known = self._answers.get((topic, oldest))
        if known is not None and not fresh and known.at + self._interval > _now():
            return known.stats
        # What it was is tried first: a topic hardly ever turns into one of the other kind.
        guess = known is not None and known.partitioned
        try:
            return await self._ask(admin, topic, partitioned=guess, oldest=oldest)
        except AdminNotFoundError:
            return await self._ask(admin, topic, partitioned=not guess, oldest=oldest)

    async def acknowledged(self, admin: Admin, topic: TopicName, subscription: str) -> int:
        """Return what `Admin.acknowledged` does, of a topic that was read before.

        Raises:
            AdminNotFoundError: there is no such topic.
            AdminError: it can't be read.
        """
        for pace in self._paces:
            await pace.turn()
        partitioned = self._is_partitioned(topic)
        return await admin.acknowledged(topic, partitioned=partitioned, subscription=subscription)

    async def causes_of_outages(self, admin: Admin, topic: TopicName) -> tuple[str, ...]:
        """Return what consumers have paused for that show it by a producer on *topic*, in order.

        Args:
            admin: leads to the broker.
            topic: a retry topic that was read before.

        Raises:
            AdminNotFoundError: there is no such topic.
            AdminError: it can't be read.
        """
        for pace in self._paces:
            await pace.turn()
        producers = await admin.producers(topic, partitioned=self._is_partitioned(topic))
        return tuple(sorted(each[BEACON] for each in producers if BEACON in each))

    async def quota(self, admin: Admin, topic: TopicName) -> int | None:
        """Return the bytes of backlog that *topic* may hold; None is any.

        What is set on it, or else on its namespace, or else at the broker; read every 15 minutes.

        Raises:
            AdminNotFoundError: there is no such topic.
            AdminError: it can't be read.
        """
        known = self._quotas.get(topic)
        if known is None or known[0] + QUOTA_SECONDS <= _now():
            for pace in self._paces:
                await pace.turn()
            own = await admin.topic_policy(topic, KeepsBacklog())
            around = await admin.namespace(topic.namespace_name, max_age=QUOTA_SECONDS)
            quotas = quotas_in_force(own, around)
            if BY_SIZE in quotas:  # a limit, or none whatever the broker's default
                limit = size_limit(quotas)
            else:
                limit = await admin.default_backlog_quota()
            known = _now(), limit
            self._quotas[topic] = known
        return known[1]

    def tidy(self) -> None:
        """Forget topics that were not asked for in an hour."""
        recent = _now() - FORGET_AFTER_SECONDS
        self._quotas = {topic: known for topic, known in self._quotas.items() if known[0] > recent}
        self._answers = {t: found for t, found in self._answers.items() if found.at > recent}

    def _is_partitioned(self, topic: TopicName) -> bool:
        known = (each.partitioned for (of, _), each in self._answers.items() if of == topic)
        return next(known, False)

    async def _ask(
        self, admin: Admin, topic: TopicName, *, partitioned: bool, oldest: bool
    ) -> TopicStats:
        for pace in self._paces:
            await pace.turn()
        stats = await admin.stats(topic, partitioned=partitioned, oldest=oldest)
        self._answers[topic, oldest] = _Answer(_now(), partitioned, stats)
        return stats


def _now() -> float:
    return asyncio.get_running_loop().time()
