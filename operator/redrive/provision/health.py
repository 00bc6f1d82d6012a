"""Poll of topic statistics.

Looks at the topics of every provisioned policy once a minute, and at once when requested.

Made by `queues`, beside the controllers. For each connection one task asks the broker, all that
lead to one broker at most ten times a second, and all together 75 times: with more policies
than that is enough for, a look comes later than every minute. A policy that is not ready any more
is looked at all the same: its messages still wait.

Statistics of one connection's topics, asked for no more often than a broker should be.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, AdminNotFoundError
from redrive.admin.model import AckPersistence, TopicStats
from redrive.admin.policies import BY_SIZE, KeepsBacklog, size_limit
from redrive.api import Body
from redrive.api.conditions import StatusWarning, find, is_ready
from redrive.api.replay_status import FINAL
from redrive.api.retrypolicy import Backlog
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.cache import needs_reconcile
from redrive.kube.connections import broker_of, connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.model import BEACON, Policy
from redrive.policy.naming import TopicName
from redrive.provision.checks import ADMISSION
from redrive.provision.claims import resolve
from redrive.provision.desired import quotas_in_force
from redrive.provision.health_checks import (
    REASONS,
    THRESHOLDS,
    Findings,
    Reading,
    Thresholds,
    backlog_patch,
    is_backlog_worth_writing,
    read_backlog,
)
from redrive.provision.metrics import TopicMetrics
from redrive.provision.poller import RateLimit, RateLimits
from redrive.provision.request import Request

INTERVAL_SECONDS = 60.0
CALLS_PER_SECOND = 10.0
"""To one broker."""
CALLS_PER_SECOND_IN_ALL = 75.0
"""To all brokers together."""
TICK_SECONDS = 1.0
AT_A_TIME = 20
"""After so many policies, those that are new or requested come first again."""
REST_SECONDS = 15.0
"""A broker that fails is left alone for so long."""

logger = logging.getLogger(__name__)


class Health:
    """Reads the topics of all provisioned policies; must be made in a running event loop.

    It writes `status.backlog`, which nothing else does, and no condition: a reconcile, enqueued
    when a warning came or went, takes them from here.

    Args:
        enqueue: has a policy reconciled.
        interval: how many seconds lie between two looks at a topic, at least.
        limits: from where on a check warns.
    """

    def __init__(
        self,
        ctx: Context,
        enqueue: Callable[[Key], None],
        interval: float = INTERVAL_SECONDS,
        limits: Thresholds = THRESHOLDS,
    ) -> None:
        self._ctx = ctx
        self._enqueue = enqueue
        self._interval = interval
        self._limits = limits
        self._metrics = TopicMetrics(ctx.clock)
        self._provisioned = ctx.policies.index(_provisioned_at)
        self._looked: dict[str, float] = {}
        self._requested: set[str] = set()
        self._findings: dict[str, Findings] = {}
        self._paces = RateLimits(1 / CALLS_PER_SECOND)
        self._pace_of_all = RateLimit(1 / CALLS_PER_SECOND_IN_ALL)
        self._readers: dict[tuple[Key, str | None], Reader] = {}
        self._walks: dict[Key, asyncio.Task[None]] = {}
        ctx.policies.listen(self._policy_changed)
        ctx.replays.listen(self._replay_changed)
        self._task = asyncio.create_task(self._watch(), name="health")

    async def stop(self) -> None:
        """End all looks, and wait until they have ended."""
        tasks = [self._task, *self._walks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._metrics.close()

    def warnings(self, body: Body) -> tuple[StatusWarning, ...]:
        """Return the warnings about a policy's topics, by the last look at them.

        Before the first one, these are its conditions: a restart ends no warning.
        """
        findings = self._findings.get(_uid(body))
        return _published(body) if findings is None else findings.warnings

    def request(self, body: Body) -> None:
        """Have a policy's topics read at once, and its backlog written even if unchanged."""
        self._requested.add(_uid(body))

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if before is not None and (after is None or _uid(before) != _uid(after)):
            self._forget(key, _uid(before))
        if after is None or not is_ready(after):
            return
        if needs_reconcile(before, after) or not is_ready(before or {}):
            self.request(after)

    def _forget(self, key: Key, uid: str) -> None:
        """Drop what is known of a policy that is gone."""
        self._metrics.remove(key)
        self._requested.discard(uid)
        for known in (self._looked, self._findings):
            known.pop(uid, None)

    def _replay_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if after is None or _is_final(before or {}) or not _is_final(after):
            return
        policy = self._ctx.policies.get(Key(key.namespace, after["spec"]["policyRef"]["name"]))
        if policy is not None:
            self.request(policy)

    async def _watch(self) -> None:
        while True:
            try:
                self._begin_walks()
            except Exception:
                logger.exception("health: finding the policies to look at failed")
            await asyncio.sleep(min(TICK_SECONDS, self._interval))

    def _begin_walks(self) -> None:
        connections = [Key.of(body) for body in self._ctx.connections]
        for at in self._readers.keys() - {self._at(connection) for connection in connections}:
            del self._readers[at]
        for connection in connections:
            if connection not in self._walks and (due := self._due(connection)):
                self._walks[connection] = asyncio.create_task(
                    self._walk(connection, due), name=f"health {connection}"
                )

    def _due(self, connection: Key) -> list[Body]:
        """Return some that are to be looked at, what waits for longest first."""
        never, latest = float("-inf"), _now() - self._interval

        def since(body: Body) -> float:
            uid = _uid(body)
            return never if uid in self._requested else self._looked.get(uid, never)

        due = (body for body in self._provisioned.get(connection) if since(body) <= latest)
        return heapq.nsmallest(AT_A_TIME, due, key=since)

    def _at(self, connection: Key) -> tuple[Key, str | None]:
        return connection, broker_of(connection, self._ctx.connections)

    async def _walk(self, connection: Key, due: Sequence[Body]) -> None:
        at = self._at(connection)
        paces = (self._paces.of(at[1]), self._pace_of_all)
        reader = self._readers.setdefault(at, Reader(self._interval, paces))
        reader.tidy()
        try:
            for body in due:
                if not self._is_there(body):
                    continue
                self._looked[_uid(body)] = _now()
                if not await self._is_answered(body, reader):
                    await asyncio.sleep(REST_SECONDS)
                    return
        finally:
            del self._walks[connection]

    def _is_there(self, body: Body) -> bool:
        known = self._ctx.policies.get(Key.of(body))
        return known is not None and _uid(known) == _uid(body)

    async def _is_answered(self, body: Body, reader: Reader) -> bool:
        """Look at one policy; return whether it makes sense to go on to the next."""
        try:
            await self._look(body, reader)
        except AdminNotFoundError as error:
            # A resync finds that as drift, and says what it does about it.
            logger.info("RetryPolicy %s: no statistics: %s", Key.of(body), error)
        except RedriveError as error:
            # Of one that is not ready, its status says why.
            level = logging.WARNING if is_ready(body) else logging.DEBUG
            logger.log(level, "RetryPolicy %s: no statistics: %s", Key.of(body), error)
            return not (isinstance(error, AdminError) and error.meets_all)
        except Exception:
            logger.exception("RetryPolicy %s: reading statistics failed", Key.of(body))
        return True

    async def _look(self, body: Body, reader: Reader) -> None:
        """Read the topics of one policy."""
        requested = _uid(body) in self._requested
        self._requested.discard(_uid(body))
        asked = resolve(body, self._ctx)
        ADMISSION.check(asked)
        policy = asked.policy
        connection = await self._ctx.brokers.resolve(asked.spec.connection_ref, asked.key.namespace)
        admin = connection.admin
        begun, seconds = self._ctx.clock(), _now()
        retry = await reader.read(admin, policy.retry_topic, oldest=True, fresh=True)
        persistence, acknowledged = await self._acknowledgements(policy, retry, admin, reader)
        rests = TopicStats({}, {})
        if policy.dead_letters:
            rests = await reader.read(admin, policy.dead_letter_topic, oldest=True, fresh=True)
        reading = Reading(
            policy=policy,
            begun=begun,
            seconds=seconds,
            requested=requested,
            quota=await self._quota(asked, rests, admin, reader),
            source=await reader.read(admin, policy.topic),
            retry=retry,
            dead_letter=rests,
            published=rests.published,
            persistence=persistence,
            acknowledged=acknowledged,
            outages=(
                await reader.causes_of_outages(admin, policy.retry_topic)
                if policy.outage_breaker is not None
                else ()
            ),
        )
        latest = self._ctx.policies.get(asked.key)
        if latest is not None and _uid(latest) == _uid(body):
            await self._publish(latest, reading)

    async def _quota(
        self, asked: Request, rests: TopicStats, admin: Admin, reader: Reader
    ) -> int | None:
        """Return what the dead-letter topic may hold: of an empty one that is not read.

        Nor where the broker refuses to tell: what else is read of the policy is worth more.
        """
        policy, quota = asked.policy, asked.spec.dead_letter.backlog_quota
        if quota is not None:
            return quota.bytes
        own = rests.get(policy.dead_letter_subscription)
        if own is None or not own.bytes:
            return None
        try:
            return await reader.quota(admin, policy.dead_letter_topic)
        except AdminError as error:
            if error.meets_all:
                raise
            logger.warning(
                "RetryPolicy %s: the quota of dead letters is not known: %s", asked.key, error
            )
            return None

    async def _acknowledgements(
        self, policy: Policy, retry: TopicStats, admin: Admin, reader: Reader
    ) -> tuple[AckPersistence, int]:
        """Read what the broker remembers of acknowledgements, and what there is to remember.

        The latter only where the number of ranges does not tell: it is another call.
        """
        persistence = await admin.ack_persistence()
        own = retry.get(policy.subscription)
        most = self._limits.ack_share * persistence.limit
        if own is None or not persistence.whole_ledgers or not 0 < own.ack_holes < most:
            return persistence, 0
        topic = policy.retry_topic
        return persistence, await reader.acknowledged(admin, topic, policy.subscription)

    async def _publish(self, body: Body, reading: Reading) -> None:
        """Pass on what is new: warnings to a reconcile, figures to metrics and the status."""
        key, uid = Key.of(body), _uid(body)
        findings = Findings.of(reading, self._findings.get(uid), self.warnings(body), self._limits)
        self._findings[uid] = findings
        if is_ready(body) and set(findings.warnings) != set(_published(body)):
            self._enqueue(key)
        self._metrics.show(key, reading, findings)
        found = reading.backlog
        written = read_backlog(body.get("status") or {})
        if reading.requested or is_backlog_worth_writing(written, found):
            await self._write(key, found)

    async def _write(self, policy: Key, found: Backlog) -> None:
        after = await self._ctx.kubernetes.patch_status(
            resources.POLICIES, policy, backlog_patch(found)
        )
        self._ctx.policies.renew(after)


def _provisioned_at(body: Body) -> Key | None:
    """Return the connection of a policy whose topics were made, and that is not going."""
    made = "retryTopic" in (body.get("status") or {}) or is_ready(body)  # it may observe
    return connection_of(body) if made and "deletionTimestamp" not in body["metadata"] else None


def _is_final(replay: Body) -> bool:
    return (replay.get("status") or {}).get("phase") in FINAL


def _published(body: Body) -> tuple[StatusWarning, ...]:
    """Return what a policy's conditions say of its topics' health."""
    found = (find(body, reason) for reason in sorted(REASONS))
    return tuple(StatusWarning(c.type, c.message) for c in found if c is not None)


def _uid(body: Body) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _now() -> float:
    return asyncio.get_running_loop().time()


FORGET_AFTER_SECONDS = 3_600.0
QUOTA_SECONDS = 900.0
"""How old what is known of a quota may be: as old as a namespace between two resyncs."""


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
