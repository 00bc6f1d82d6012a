"""Poll of topic statistics.

`Health` reads the topics of each provisioned policy once a minute, and at once when requested. The
calls to one broker are limited to ten a second, to all brokers to 75; with more policies than that
allows, the interval grows. With few policies each poll also reads the settings of topics, with many
it reads two, see `Health._settings_of_a_poll`. Policies that are no longer ready are polled, too:
their messages still wait.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, AdminNotFoundError
from redrive.admin.internal_stats import AckPersistence
from redrive.admin.model import TopicStats
from redrive.admin.policies import BY_AGE, LIMITS, MAX_PRODUCERS, age_limit, size_limit
from redrive.api import Body
from redrive.api.conditions import StatusWarning, find, is_ready
from redrive.api.replay_status import FINAL
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.cache import needs_reconcile
from redrive.kube.connections import broker_in, connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Key, PolicyKey
from redrive.policy.model import OUTAGE, Policy
from redrive.policy.naming import TopicName
from redrive.provision.checks import ADMISSION
from redrive.provision.claims import resolve
from redrive.provision.findings import (
    Findings,
    are_keys_worth_writing,
    blocked_keys_of,
    figures_patch,
    is_backlog_worth_writing,
    read_backlog,
)
from redrive.provision.health_checks import CHECKS, THRESHOLDS, Reading, Thresholds
from redrive.provision.metrics import TopicMetrics
from redrive.provision.poller import BrokerPoller, RateLimit, RateLimits
from redrive.provision.request import Request
from redrive.reasons import Reason

INTERVAL_SECONDS = 60.0
CALLS_PER_SECOND = 10.0
"""To one broker."""
CALLS_PER_SECOND_IN_ALL = 75.0
"""To all brokers."""
SHARE = 0.75
"""Share of these rates that polls take at most while settings of topics are read often."""
CALLS_PER_POLL = 3
"""Calls for the statistics of a policy. Few policies need more."""
TICK_SECONDS = 1.0
AT_A_TIME = 20
"""Policies polled before new and requested ones come first again."""
REST_SECONDS = 15.0
"""Pause after a failed call to a broker."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Health:
    """Reads the topics of all provisioned policies; requires a running event loop.

    It writes `status.backlog` and `status.blockedKeys`, which no other component does, and no
    condition. When a warning begins or ends, it enqueues the policy, and the reconcile publishes
    the warnings.

    Args:
        enqueue: enqueues a reconcile of a policy.
        interval: minimum seconds between two polls of a topic.
        limits: thresholds of the checks.
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
        self._brokers = ctx.connections.index(broker_in)
        self._looked: dict[str, float] = {}
        self._requested: set[str] = set()
        self._request_of = WeakValueDictionary[Key, asyncio.Event]()
        self._findings: dict[str, Findings] = {}
        self._paces = RateLimits(1 / CALLS_PER_SECOND)
        self._pace_of_all = RateLimit(1 / CALLS_PER_SECOND_IN_ALL)
        ctx.policies.listen(self._policy_changed)
        ctx.replays.listen(self._replay_changed)
        polls = {"statistics of BrokerConnection": self._walk}
        self._poller = BrokerPoller(ctx.connections, polls)

    async def stop(self) -> None:
        """Cancel all polls, and wait for their end."""
        await self._poller.stop()
        self._metrics.close()

    def warnings(self, body: Body) -> tuple[StatusWarning, ...]:
        """Return the warnings about a policy's topics from the last poll.

        Before the first poll they come from its conditions: a restart ends no warning.
        """
        findings = self._findings.get(_uid(body))
        return _published(body) if findings is None else findings.warnings

    def request(self, body: Body) -> None:
        """Poll a policy's topics at once, and write its backlog even if it is unchanged."""
        self._requested.add(_uid(body))
        if requested := self._request_of.get(connection_of(body)):
            requested.set()

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if before is not None and (after is None or _uid(before) != _uid(after)):
            self._forget(key, _uid(before))
        if after is None or not is_ready(after):
            return
        if needs_reconcile(before, after) or not is_ready(before or {}):
            self.request(after)

    def _forget(self, key: Key, uid: str) -> None:
        """Drop the data of a policy that was deleted."""
        self._metrics.remove(key)
        self._requested.discard(uid)
        for by_uid in (self._looked, self._findings):
            by_uid.pop(uid, None)

    def _replay_changed(self, _: Key, before: Body | None, after: Body | None) -> None:
        if after is None or _is_final(before or {}) or not _is_final(after):
            return
        reference = PolicyKey.of(after)
        policy = self._ctx.policies.get(reference.key)
        if policy is not None and reference.kind == resources.POLICIES.kind:
            self.request(policy)

    async def _walk(self, connection: Key, broker: str | None) -> AsyncGenerator[float]:
        reader = Reader(self._interval, (self._paces.of(broker), self._pace_of_all))
        # Set by each request. A tick of each of thousands of connections would delay all others.
        requested = self._request_of[connection] = asyncio.Event()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_of(connection)):
                    await requested.wait()
            requested.clear()
            due = self._due(connection)
            pause = 0.0 if len(due) == AT_A_TIME else min(TICK_SECONDS, self._interval)
            settings = self._settings_of_a_poll(broker) if due else SELDOM
            for body in due:
                if requested.is_set():
                    pause = 0.0
                    break
                looked = self._looked.get(_uid(body), float("-inf"))
                is_late = _now() - looked > 2 * self._interval  # or was never polled
                reader.settings_of_a_poll = SELDOM if is_late else settings
                if self._current(body) is not None:
                    self._looked[_uid(body)] = _now()
                    if not await self._poll_may_continue(body, reader):
                        pause = REST_SECONDS
                        break
            reader.tidy()
            yield pause

    def _since(self, body: Body) -> float:
        """Return when a policy was polled; before all others if that was requested."""
        uid, never = _uid(body), float("-inf")
        return never if uid in self._requested else self._looked.get(uid, never)

    def _pause_of(self, connection: Key) -> float:
        """Return the seconds until a policy is due; a new one may come within the interval."""
        polled = map(self._since, self._provisioned.get(connection))
        return max(0.0, min(polled, default=_now()) + self._interval - _now())

    def _due(self, connection: Key) -> list[Body]:
        """Return policies that are due; the longest waiting comes first."""
        latest, provisioned = _now() - self._interval, self._provisioned.get(connection)
        due = (body for body in provisioned if self._since(body) <= latest)
        return heapq.nsmallest(AT_A_TIME, due, key=self._since)

    def _settings_of_a_poll(self, broker: str | None) -> int:
        """Return the number of settings that each poll of a policy at *broker* may read.

        With it the polls of all policies, once in an interval, take `SHARE` of both rates at most.
        If that is less than `MIN_OFTEN`, settings are read seldom, as by the first poll of a policy
        and by one that is late: statistics have priority.
        """
        calls = SHARE * self._interval
        total = len(self._ctx.policies) - self._provisioned.count(None)
        settings = int(calls * CALLS_PER_SECOND_IN_ALL / (total or 1)) - CALLS_PER_POLL
        if settings >= MIN_OFTEN:  # only then visit the connections: a broker may have thousands
            here = sum(map(self._provisioned.count, self._brokers.keys(broker)))
            settings = min(settings, int(calls * CALLS_PER_SECOND / (here or 1)) - CALLS_PER_POLL)
        return settings if settings >= MIN_OFTEN else SELDOM

    def _current(self, body: Body) -> Body | None:
        """Return the policy as it is now; None if it was deleted, or replaced by another."""
        current = self._ctx.policies.get(Key.of(body))
        return current if current is not None and _uid(current) == _uid(body) else None

    async def _poll_may_continue(self, body: Body, reader: Reader) -> bool:
        """Poll one policy; return False if the next one would fail, too."""
        try:
            await self._poll(body, reader)
        except AdminNotFoundError as error:
            # The poll of namespace facts detects and repairs this drift.
            logger.info("RetryPolicy %s: no statistics: %s", Key.of(body), error)
        except RedriveError as error:
            # The status of a policy that is not ready shows the error.
            level = logging.WARNING if is_ready(body) else logging.DEBUG
            logger.log(level, "RetryPolicy %s: no statistics: %s", Key.of(body), error)
            return not (isinstance(error, AdminError) and error.meets_all)
        except Exception:
            logger.exception("RetryPolicy %s: reading statistics failed", Key.of(body))
        return True

    async def _poll(self, body: Body, reader: Reader) -> None:
        """Read the topics of one policy."""
        requested = _uid(body) in self._requested
        self._requested.discard(_uid(body))
        asked = resolve(body, self._ctx)
        ADMISSION.check(asked)
        policy = asked.policy
        connection = await self._ctx.brokers.resolve(asked.spec.connection_ref, asked.key.namespace)
        admin = connection.admin
        begun, seconds = self._ctx.clock(), _now()
        publishes = policy.ordered or policy.outage_breaker is not None
        retry = await reader.read(admin, policy.retry_topic, own=True, producers=publishes)
        persistence, acknowledged = await self._acknowledgements(policy, retry, admin, reader)
        dead_letter = TopicStats({}, {})
        if policy.dead_letters:
            dead_letter = await reader.read(admin, policy.dead_letter_topic, own=True)
        reading = Reading(
            policy=policy,
            begun=begun,
            seconds=seconds,
            requested=requested,
            quota=await self._quota(asked, dead_letter, admin, reader),
            source=await reader.read(admin, policy.topic),
            retry=retry,
            dead_letter=dead_letter,
            published=dead_letter.published,
            persistence=persistence,
            acknowledged=acknowledged,
            outages=tuple(
                sorted(producer[OUTAGE] for producer in retry.producers if OUTAGE in producer)
            ),
            blocked_keys=blocked_keys_of(retry.producers),
            **await self._refusals(asked, admin, reader),
        )
        is_owner = is_ready(body) and not asked.only_observes
        if is_owner and not _is_subscribed(policy, retry, dead_letter):
            self._enqueue(asked.key)
        if (latest := self._current(body)) is not None:
            await self._publish(latest, reading)

    async def _quota(
        self, asked: Request, dead_letter: TopicStats, admin: Admin, reader: Reader
    ) -> int | None:
        """Return the backlog quota of the dead-letter topic; None if it is unlimited or not read.

        An empty topic is not read. If the broker refuses the call, the other statistics still
        count.
        """
        policy, quota = asked.policy, asked.spec.dead_letter.backlog_quota
        if quota is not None:
            return quota.bytes
        own = dead_letter.get(policy.dead_letter_subscription)
        if own is None or not own.bytes:
            return None
        reading = reader.quota(admin, policy.dead_letter_topic)
        return await _if_permitted(reading, asked.key, "quota of dead letters")

    async def _refusals(self, asked: Request, admin: Admin, reader: Reader) -> dict[str, Any]:
        """Return the fields of `Reading` about what topics refuse; without those not read."""
        policy = asked.policy
        own = [policy.retry_topic]
        own += [policy.dead_letter_topic] if policy.dead_letters else []
        ages = [(topic, BY_AGE) for topic in own]
        own += [policy.sequences_topic] if policy.sequenced else []
        ledger, to_read = [], [*policy.subscription_types]
        if policy.dead_letters:
            replay, inspection = asked.connection.replay, asked.connection.inspection
            ledger += [policy.ledger_topic] if replay else []
            to_read += [policy.dead_letter_topic] if replay or inspection else []

        properties = [(topic, _TERMINATED) for topic in [*own, *ledger]]
        properties += [(topic, limit) for limit in LIMITS for topic in [*own, policy.topic]]
        properties += [(topic, _TYPES) for topic in to_read]
        properties += ages
        values = await reader.properties(admin, properties)
        limits: dict[TopicName, dict[str, int]] = {}
        for (topic, name), value in values.items():
            if name in {*LIMITS, BY_AGE} and value is not None:  # it could be read
                limits.setdefault(topic, {})[name] = value

        async def read_producers() -> dict[TopicName, int]:
            topics = [topic for topic in own if limits.get(topic, {}).get(MAX_PRODUCERS)]
            return {topic: await reader.producers(admin, topic) for topic in topics}

        subject = "producers of its topics"
        states = {topic: is_ for (topic, name), is_ in values.items() if name == _TERMINATED}
        return {
            "refusals_known": len(values) == len(properties),
            "terminated": tuple(topic for topic, is_terminated in states.items() if is_terminated),
            "types": {topic: types for (topic, name), types in values.items() if name == _TYPES},
            "limits": limits,
            "producers": await _if_permitted(read_producers(), asked.key, subject) or {},
        }

    async def _acknowledgements(
        self, policy: Policy, retry: TopicStats, admin: Admin, reader: Reader
    ) -> tuple[AckPersistence, int]:
        """Read the limit of persisted acknowledgements, and the number of messages that need it.

        The number takes another call, so it is read only if the number of ranges is not sufficient.
        """
        persistence = (await admin.read_settings()).persistence
        own = retry.get(policy.subscription)
        most = self._limits.ack_share * persistence.limit
        if own is None or not persistence.whole_ledgers or not 0 < own.ack_holes < most:
            return persistence, 0
        topic = policy.retry_topic
        return persistence, await reader.acknowledged(admin, topic, policy.subscription)

    async def _publish(self, body: Body, reading: Reading) -> None:
        """Publish new data: warnings by a reconcile, figures as metrics and status."""
        key, uid = Key.of(body), _uid(body)
        status = body.get("status") or {}
        written = read_backlog(status)
        before = self._findings.get(uid)
        findings = Findings.of(reading, before, self.warnings(body), self._limits)
        if before is None:
            findings = findings.resumed(reading, written)
        self._findings[uid] = findings
        if is_ready(body) and set(findings.warnings) != set(_published(body)):
            self._enqueue(key)
        self._metrics.show(key, reading, findings)
        backlog = reading.backlog
        if backlog.dead_letter is not None:
            backlog = backlog.model_copy(update={"dead_letters_last_hour": findings.last_hour})
        patch = figures_patch(backlog, reading.blocked_keys)
        if (
            reading.requested
            or is_backlog_worth_writing(written, backlog)
            or are_keys_worth_writing(status, patch)
        ):
            after = await self._ctx.kubernetes.patch_status(resources.POLICIES, key, patch)
            self._ctx.policies.renew(after)


async def _if_permitted(reading: Awaitable[T], policy: Key, subject: str) -> T | None:
    """Return the result of a call without which the other statistics still count; None if refused.

    Raises:
        AdminError: other calls to the broker would fail, too.
    """
    try:
        return await reading
    except AdminError as error:
        if error.meets_all:
            raise
        logger.warning("RetryPolicy %s: %s is unknown: %s", policy, subject, error)
        return None


def _provisioned_at(body: Body) -> Key | None:
    """Return the connection of a policy with topics that is not being deleted, else None."""
    made = "retryTopic" in (body.get("status") or {}) or is_ready(body)  # it may observe
    return connection_of(body) if made and "deletionTimestamp" not in body["metadata"] else None


def _is_subscribed(policy: Policy, retry: TopicStats, dead_letter: TopicStats) -> bool:
    """Return True if each partition of a policy's topics has the policy's subscription."""
    return policy.subscription in retry.complete and (
        not policy.dead_letters or policy.dead_letter_subscription in dead_letter.complete
    )


def _is_final(replay: Body) -> bool:
    return (replay.get("status") or {}).get("phase") in FINAL


def _published(body: Body) -> tuple[StatusWarning, ...]:
    """Return the health warnings that the conditions of a policy show."""
    conditions = (find(body, reason) for reason in sorted(CHECKS))
    return tuple(StatusWarning(c.type, c.message) for c in conditions if c is not None)


def _uid(body: Body) -> str:
    uid: str = body["metadata"]["uid"]
    return uid


def _now() -> float:
    return asyncio.get_running_loop().time()


FORGET_AFTER_SECONDS = 6 * 3_600.0
"""Longer than a round: 10,000 policies of one broker take more than an hour."""
SETTINGS_SECONDS = 900.0
"""Maximum age of cached settings that are read seldom."""
SELDOM = 2
"""Settings that a poll reads if many policies share the rates."""
MIN_OFTEN = 8
"""Settings that a poll may read, at least, if few do: four states of topics, and four others."""
_TERMINATED, _TYPES, _QUOTA = "terminated", "subscriptionTypesEnabled", "quota"


@dataclass(frozen=True)
class _Answer:
    at: float
    partitioned: bool
    stats: TopicStats


class _Property(NamedTuple):
    at: float
    value: Any


_UNREAD = _Property(float("-inf"), None)


class Reader:
    """Reads topic statistics, of a source topic at most once in *interval* seconds.

    Within that time, policies of one source topic share one answer.

    Args:
        interval: in seconds.
        paces: rate limits of the calls to its broker, and to all brokers.

    Attributes:
        settings_of_a_poll: maximum number of settings that `properties` reads.
    """

    def __init__(self, interval: float, paces: Sequence[RateLimit]) -> None:
        self._interval = interval
        self._paces = paces
        self.settings_of_a_poll = SELDOM
        self._answers: dict[TopicName, _Answer] = {}
        self._properties: dict[tuple[TopicName, str], _Property] = {}
        self._asked: dict[TopicName, float] = {}
        self._tidied = _now()

    async def read(
        self, admin: Admin, topic: TopicName, *, own: bool = False, producers: bool = False
    ) -> TopicStats:
        """Return the statistics of *topic*.

        Args:
            admin: client of the broker.
            topic: any topic.
            own: True for a topic of one policy: it is read even within the interval, with the
                publish time of the oldest unacknowledged message.
            producers: True reads the metadata of producers, too, by which consumers publish
                outages.

        Raises:
            AdminNotFoundError: the topic does not exist.
            AdminError: the call failed.
        """
        self._asked[topic] = _now()
        cached = self._answers.get(topic)
        if cached is not None and not own and cached.at + self._interval > _now():
            return cached.stats
        ask = partial(self._ask, admin, topic, oldest=own, producers=producers)
        # Topics hardly ever change between partitioned and not partitioned.
        guess = self._is_partitioned(topic)
        try:
            return await ask(partitioned=guess)
        except AdminNotFoundError:
            return await ask(partitioned=not guess)

    async def acknowledged(self, admin: Admin, topic: TopicName, subscription: str) -> int:
        """Return the result of `Admin.acknowledged` for a topic that was read before.

        Raises:
            AdminNotFoundError: the topic does not exist.
            AdminError: the call failed.
        """
        await self._pace()
        partitioned = self._is_partitioned(topic)
        return await admin.acknowledged(topic, partitioned=partitioned, subscription=subscription)

    async def properties(
        self, admin: Admin, wanted: Sequence[tuple[TopicName, str]]
    ) -> dict[tuple[TopicName, str], Any]:
        """Return the known ones of the *wanted* properties of topics.

        At most `settings_of_a_poll` are read, the oldest first: more would delay the statistics of
        other policies. If that is `SELDOM`, only those that are unknown or older than 15 minutes
        are; else the states of topics come before all others.

        Raises:
            AdminError: other calls to the broker would fail, too.
        """
        self._asked |= {topic: _now() for topic, _ in wanted}
        read, often = self._properties, self.settings_of_a_poll > SELDOM
        latest = _now() if often else _now() - SETTINGS_SECONDS
        due = [pair for pair in wanted if read.get(pair, _UNREAD).at <= latest]
        due.sort(key=lambda pair: (often and pair[1] != _TERMINATED, read.get(pair, _UNREAD).at))
        for topic, name in due[: self.settings_of_a_poll]:
            value = read.get((topic, name), _UNREAD).value
            await self._pace()
            try:
                value = await self._property(admin, topic, name)
            except AdminError as error:
                if error.meets_all and error.reason != Reason.BROKER_FAILED:
                    raise
                logger.info("a property of a topic is unknown: %s", error)
            read[topic, name] = _Property(_now(), value)
        return {pair: read[pair].value for pair in wanted if pair in read}

    async def _property(self, admin: Admin, topic: TopicName, name: str) -> Any:  # noqa: ANN401
        if name == _TERMINATED:
            return await admin.is_terminated(topic, partitioned=self._is_partitioned(topic))
        if name == _TYPES:
            return await admin.subscription_types(topic)
        if name == BY_AGE:
            return age_limit(await admin.quotas_in_force(topic, max_age=self._max_age()))
        return await admin.limit(topic, name, max_age=self._max_age())

    async def producers(self, admin: Admin, topic: TopicName) -> int:
        """Return the number of producers of a topic that was read before, or of a partition.

        Raises:
            AdminNotFoundError: the topic does not exist.
            AdminError: the call failed.
        """
        await self._pace()
        partitioned = self._is_partitioned(topic)
        return (await admin.usage(topic, partitioned=partitioned, subscription="")).producers

    async def quota(self, admin: Admin, topic: TopicName) -> int | None:
        """Return the backlog quota of *topic* in bytes; None means unlimited.

        The quota of the topic, its namespace or the broker applies, in this order. It is read every
        15 minutes, or every two polls while settings are read often.

        Raises:
            AdminNotFoundError: the topic does not exist.
            AdminError: the call failed.
        """
        cached = self._properties.get((topic, _QUOTA), _UNREAD)
        if cached.at + self._max_age() <= _now():
            await self._pace()
            quotas = await admin.quotas_in_force(topic, max_age=self._max_age())
            cached = self._properties[topic, _QUOTA] = _Property(_now(), size_limit(quotas))
        limit: int | None = cached.value
        return limit

    def _max_age(self) -> float:
        return self._interval if self.settings_of_a_poll > SELDOM else SETTINGS_SECONDS

    def tidy(self) -> None:
        """Forget topics that no poll has asked for in six hours; called often."""
        recent = _now() - FORGET_AFTER_SECONDS
        if self._tidied > recent:
            return
        self._tidied = _now()
        self._asked = asked = {t: at for t, at in self._asked.items() if at > recent}
        self._properties = {p: have for p, have in self._properties.items() if p[0] in asked}
        self._answers = {t: answer for t, answer in self._answers.items() if t in asked}

    def _is_partitioned(self, topic: TopicName) -> bool:
        return topic in self._answers and self._answers[topic].partitioned

    async def _ask(
        self, admin: Admin, topic: TopicName, *, partitioned: bool, oldest: bool, producers: bool
    ) -> TopicStats:
        await self._pace()
        stats = await admin.stats(
            topic, partitioned=partitioned, oldest=oldest, producers=producers
        )
        self._answers[topic] = _Answer(_now(), partitioned, stats)
        return stats

    async def _pace(self) -> None:
        """Wait for a call within the rate limits."""
        for pace in self._paces:
            await pace.acquire()
