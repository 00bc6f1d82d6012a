"""Drift detection: polls for drift and for stalled policies, within a rate limit per broker.

A broker has no watch, so policies are compared with it periodically. `BrokerPoller` runs one loop
for each kind of poll and each connection or broker. There are three kinds beside topic statistics:

- *Namespace facts*: topics and grants of a whole Pulsar namespace take three calls every minute.
  If these have changed, all policies are compared with them, otherwise only those policies that
  have changed. Each connection has its own facts.
- *Rotation*: subscriptions, partitions and topic policies need calls for each topic, unless the
  operator is a super-user. So one policy after the other is reconciled. The more policies there
  are, at one broker or in total, the longer a rotation takes. Each broker has one rotation for all
  its connections: many connections do not call it too often, and a connection with few policies
  does not slow down one with many.
- *Stalled policies*: a policy may be stalled by a fact of the broker, or by a ConfigMap of another
  owner. The poll reads only that fact, in at most three calls beside those for the Pulsar
  namespace, which policies share. A policy whose fact has changed is reconciled.

A slow broker delays only its own policies. While many policies are being provisioned, the rotation
of their broker is suspended: for each call about a topic policy a broker reads the list of all
topics of a namespace, which is expensive at that time. Other policies that are not ready are
reconciled after a change, or after a back-off. An operator that starts needs only the facts to
detect drift.

Connections to one broker share a `RateLimit`, which the poll of topic statistics uses, too.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, AdminNotFoundError, BrokerUnreachableError
from redrive.admin.model import NamespaceState
from redrive.api import Body, conditions
from redrive.api.conditions import is_progressing, is_settled, reason
from redrive.errors import RedriveError
from redrive.kube.cache import Cache
from redrive.kube.connections import broker_in, connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision import checks, observe
from redrive.provision.claims import Conflicts, precede, resolve
from redrive.provision.desired import Desired, Observed, TopicState, config_map_of, desired
from redrive.provision.diff import config_map_actions, diff
from redrive.provision.request import Request
from redrive.reasons import Reason

FACTS_SECONDS = 60.0
ROTATION_SECONDS = 15.0
"""Minimum duration of a rotation in seconds."""
CALLS_PER_SECOND = 20.0
"""Calls of a rotation to one broker."""
CALLS_PER_SECOND_IN_ALL = 75.0
"""Calls of all rotations together. The load of the operator grows with its policies, not with the
brokers.
"""
CALLS_PER_RECONCILE = 18
"""Maximum calls of a reconcile without actions.

A schema that the broker refuses is tried again, once for each of the two topics. With 18 calls each
of a thousand policies is reconciled every 900 s.
"""
CALLS_PER_CHECK = 3
"""Maximum calls of the check of a stalled policy.

With 3 calls each of a thousand stalled policies is checked every 150 s. Reads of a Pulsar
namespace, which its policies share, are not counted.
"""
FAILED_SECONDS = 15.0
"""Pause after a poll that failed by a defect."""
MANY_BEGUN = 20
"""The rotation of a broker is suspended while so many of its policies wait for their first
reconcile.

As many calls as this run concurrently to one broker; from here on policies wait for each other.
"""

logger = logging.getLogger(__name__)


class PollOrder:
    """Least recently polled first, so that no subject waits for two rounds."""

    def __init__(self) -> None:
        self._queue: dict[Key, None] = {}

    def next(self, keys: Iterable[Key]) -> Key | None:
        """Return the subject among *keys* to poll next; None if there are none.

        New subjects come last, because they were reconciled just now. At the start their order is
        random, because an operator that restarts often must not always begin with the same ones.
        """
        current = set(keys)
        newcomers = sorted(current - self._queue.keys())
        earlier = [key for key in self._queue if key in current]
        self._queue = dict.fromkeys([*earlier, *random.sample(newcomers, len(newcomers))])
        if not self._queue:
            return None
        first = next(iter(self._queue))
        self._queue[first] = self._queue.pop(first)
        return first


Polls = Callable[[Key, str | None], AsyncGenerator[float]]
"""Polls a connection and its broker. After each poll it yields the seconds until the next one."""


_Loop = tuple[str, str | None]
"""The beginning of the log entries of a loop, and its broker."""


class BrokerPoller:
    """Runs one loop for each kind of poll and each place; requires a running event loop.

    Args:
        connections: the connections to poll.
        by_connection: polls of each connection, by the beginning of their log entries.
        by_broker: polls of each broker. They get any of its connections.
    """

    def __init__(
        self,
        connections: Cache,
        by_connection: Mapping[str, Polls],
        by_broker: Mapping[str, Polls] = MappingProxyType({}),
    ) -> None:
        self._by_connection = by_connection
        self._by_broker = by_broker
        self._users = Counter[_Loop]()
        self._loops: dict[_Loop, asyncio.Task[None]] = {}
        for body in connections:
            self._follow(Key.of(body), None, body)
        connections.listen(self._follow)

    async def stop(self) -> None:
        """Cancel all polls, and wait for their end."""
        for loop in self._loops.values():
            loop.cancel()
        await asyncio.gather(*self._loops.values(), return_exceptions=True)

    def _follow(self, key: Key, before: Body | None, after: Body | None) -> None:
        """Start and cancel loops, so that each connection and each broker has its own.

        It visits no other connection: one tenant may have thousands, which change often.
        """
        former, polls = self._polls(key, before), self._polls(key, after)
        self._users.update(polls.keys())
        self._users.subtract(former.keys())
        for loop in former:
            if not self._users[loop]:
                del self._users[loop]
                self._loops.pop(loop).cancel()
        for loop, poll in polls.items():
            if loop not in self._loops:
                self._loops[loop] = asyncio.create_task(repeat(loop[0], poll), name=loop[0])

    def _polls(
        self, key: Key, connection: Body | None
    ) -> dict[_Loop, Callable[[], AsyncGenerator[float]]]:
        """Return the polls of a connection and of its broker; none if it does not exist."""
        if connection is None:
            return {}
        broker = broker_in(connection)
        return {
            (f"{name} {place}", broker): partial(polls, key, broker)
            for place, kinds in ((key, self._by_connection), (broker, self._by_broker))
            for name, polls in kinds.items()
        }


async def repeat(name: str, polls: Callable[[], AsyncGenerator[float]]) -> None:
    """Poll until cancelled; after a failure begin again.

    Args:
        name: the beginning of its log entry.
        polls: polls, and yields the seconds until the next poll.
    """
    while True:
        try:
            async with aclosing(polls()) as pauses:
                async for pause in pauses:
                    await asyncio.sleep(pause)
        except Exception:
            logger.exception("%s: failed", name)
        await asyncio.sleep(FAILED_SECONDS)


class DriftPoller(BrokerPoller):
    """Polls for drift and for stalled policies.

    Args:
        facts: finds settled policies that have drifted.
        stalls: finds stalled policies that may resume.
        enqueue: enqueues a reconcile of a policy.
        enqueue_connection: enqueues a reconcile of a connection: no watch reports that its Secret
            or a right was deleted.
    """

    def __init__(
        self,
        facts: NamespaceFacts,
        stalls: StallChecks,
        enqueue: Callable[[Key], None],
        enqueue_connection: Callable[[Key], None],
    ) -> None:
        self._facts = facts
        self._stalls = stalls
        self._policies = facts.ctx.policies
        self._settled = self._policies.index(_connection_if(is_settled))
        self._progressing = self._policies.index(_connection_if(is_progressing))
        self._checked = self._policies.index(_connection_if(is_checked))
        self._enqueue = enqueue
        self._enqueue_connection = enqueue_connection
        self._brokers = facts.ctx.connections.index(broker_in)
        self._checks = RateLimits(CALLS_PER_CHECK / CALLS_PER_SECOND)
        by_connection = {
            "namespace facts of BrokerConnection": self._compare,
            "stalled policies of BrokerConnection": self._check,
        }
        super().__init__(facts.ctx.connections, by_connection, {"rotation at": self._rotate})

    async def _compare(self, connection: Key, _: str | None) -> AsyncGenerator[float]:
        while True:
            try:
                for key in await self._facts.drifted(connection, self._settled.get(connection)):
                    self._enqueue(key)
            except RedriveError as error:
                logger.info("namespace facts of BrokerConnection %s: %s", connection, error)
            except Exception:
                logger.exception("namespace facts of BrokerConnection %s: failed", connection)
            yield FACTS_SECONDS
            # After the pause, because a new connection is reconciled anyway.
            self._enqueue_connection(connection)

    async def _rotate(self, _: Key, broker: str | None) -> AsyncGenerator[float]:
        order = PollOrder()
        while True:
            connections = self._brokers.keys(broker)
            keys = [key for conn in connections for key in self._settled.keys(conn)]
            begun = sum(self._progressing.count(key) for key in connections)
            key = None if begun >= MANY_BEGUN else order.next(keys)
            settled = len(self._policies) - self._settled.count(None)
            yield pause(len(keys), CALLS_PER_RECONCILE, total=settled)
            if key is not None:
                self._enqueue(key)

    async def _check(self, connection: Key, broker: str | None) -> AsyncGenerator[float]:
        order, limit, keys = PollOrder(), self._checks.of(broker), tuple[Key, ...]()
        while True:
            stalled = len(self._policies) - self._checked.count(None)
            yield pause(len(keys), CALLS_PER_CHECK, total=stalled)
            # After the pause, so that policies that stalled meanwhile are included.
            keys = self._checked.keys(connection)
            if (key := order.next(keys)) is not None:
                await limit.acquire()
                if await self._is_over(key):
                    self._enqueue(key)

    async def _is_over(self, key: Key) -> bool:
        body = self._policies.get(key)
        try:
            return body is not None and await self._stalls.is_over(body)
        except Exception:
            logger.exception("RetryPolicy %s: check of a stalled policy failed", key)
            return False


def pause(policies: int, calls: int, *, total: int) -> float:
    """Return the seconds between two polls of a rotation.

    Args:
        policies: policies in the rotation.
        calls: calls of one poll.
        total: policies in all rotations.
    """
    whole = max(ROTATION_SECONDS, total * calls / CALLS_PER_SECOND_IN_ALL)
    return max(whole / (policies or 1), calls / CALLS_PER_SECOND)


def _connection_if(holds: Callable[[Body], bool]) -> Callable[[Body], Key | None]:
    """Return a function that returns the connection of a policy for which *holds* is True."""
    return lambda body: connection_of(body) if holds(body) else None


class RateLimit:
    """Grants slots in the order of requests, *between* seconds apart."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._free = 0.0

    async def acquire(self) -> None:
        """Wait for a slot."""
        now = asyncio.get_running_loop().time()
        begin = max(self._free, now)
        self._free = begin + self._between
        await asyncio.sleep(begin - now)


class RateLimits:
    """One `RateLimit` for each broker, while it is in use."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._paces = WeakValueDictionary[str | None, RateLimit]()

    def of(self, broker: str | None) -> RateLimit:
        """Return the limit of all calls to *broker*, as `connections.broker_of` names it."""
        return self._paces.setdefault(broker, RateLimit(self._between))


class Compared(NamedTuple):
    """State of a Pulsar namespace, and what was compared with it: policies that had not drifted."""

    namespace: NamespaceState
    policies: dict[Key, tuple[Request, Body, Body | None]]


@dataclass(frozen=True)
class NamespaceFacts:
    """Compares policies with the watches and with lists of the brokers.

    Attributes:
        conflicts: index of the names that policies claim.
        compared: the last comparison by name of the namespace. While the state of a namespace is
            the same, only policies that have changed are compared again.
    """

    ctx: Context
    conflicts: Conflicts
    compared: WeakKeyDictionary[Admin, dict[str, Compared]] = field(
        default_factory=WeakKeyDictionary, init=False
    )

    async def drifted(self, connection: Key, bodies: Iterable[Body]) -> list[Key]:
        """Return the policies among *bodies*, settled ones of *connection*, that have drifted.

        Policies that observe are left to the rotation, because they may differ permanently. Each
        Pulsar namespace costs three calls, regardless of the number of its policies.

        Raises:
            RedriveError: the connection cannot be used, or its broker cannot be reached.
        """
        drifted: list[Key] = []
        namespaces: dict[str, list[tuple[Request, Body]]] = defaultdict(list)
        for body in bodies:
            await asyncio.sleep(0)  # let other tasks run: a thousand policies take a while
            request = self._unrefused(Key.of(body))
            if request is None:
                drifted.append(Key.of(body))
            elif not request.only_observes:
                namespaces[request.policy.topic.namespace_name].append((request, body))
        if namespaces:
            admin = (await self.ctx.brokers.open(connection)).admin
            compared = self.compared.setdefault(admin, {})
            for name in compared.keys() - namespaces.keys():
                del compared[name]
            for name, policies in namespaces.items():
                drifted.extend(await self._drifted_in(name, policies, admin))
        return drifted

    def lacks_config_map(self, body: Body) -> bool:
        """Return True if a settled policy must be reconciled for its ConfigMap."""
        request = self._unrefused(Key.of(body))
        if request is None:
            return True
        if request.only_observes:
            return False
        wanted = self._desired(request, body).config_map
        return any(config_map_actions(wanted, self.ctx.config_maps.get(Key.of(wanted))))

    def _unrefused(self, key: Key) -> Request | None:
        """Return the request of a policy; None if it is inadmissible, or a rival has priority."""
        request = self.conflicts.admissible(key, self.ctx)
        try:
            if request is not None:
                precede(request, self.ctx, self.conflicts)
        except RedriveError:
            return None
        return request

    def _desired(self, request: Request, body: Body) -> Desired:
        return desired(request, body, self.ctx.settings.cluster_id)

    async def _drifted_in(
        self, name: str, policies: Iterable[tuple[Request, Body]], admin: Admin
    ) -> list[Key]:
        try:
            namespace = await admin.namespace(name)
        except BrokerUnreachableError:
            raise
        except AdminError as error:
            logger.info("namespace facts of %s: %s", name, error)
            # A permanent error is for the status of each policy; others may be over soon.
            is_permanent = Reason.of(error).stalls or isinstance(error, AdminNotFoundError)
            return [request.key for request, _ in policies] if is_permanent else []
        before = self.compared[admin].get(name)
        undrifted = before.policies if before is not None and before.namespace == namespace else {}
        now = self.compared[admin][name] = Compared(namespace, {})
        drifted = []
        for request, body in policies:
            await asyncio.sleep(0)
            config_map = self.ctx.config_maps.get(config_map_of(body))
            current = request, body, config_map
            last = undrifted.get(request.key)
            is_unchanged = last is not None and all(map(operator.is_, last, current))
            if is_unchanged or not has_drifted(self._desired(request, body), namespace, config_map):
                now.policies[request.key] = current
            else:
                drifted.append(request.key)
        return drifted


def has_drifted(wanted: Desired, namespace: NamespaceState, config_map: Body | None) -> bool:
    """Return True if the listed state of a policy that was ready differs from the desired one."""
    try:
        have = observe.in_namespace(wanted, namespace, config_map)
    except RedriveError:
        return True
    return checks.has_other_partitioning(wanted, have) or bool(diff(wanted, have))


LISTED_SECONDS = 15.0
"""Maximum age in seconds of namespace data, which all policies of the namespace share."""

Read = Callable[[Desired, Body, Context], Awaitable[Observed]]


async def _owners(want: Desired, body: Body, ctx: Context) -> Observed:
    admin = await _admin(body, ctx)

    states = [(topic.role, await _marked(topic.name, admin)) for topic in want.topics]
    return Observed(topics={role: state for role, state in states if state is not None})


async def _source(want: Desired, body: Body, ctx: Context) -> Observed:
    topic = await _marked(want.policy.topic, await _admin(body, ctx))
    return Observed(source_properties=None if topic is None else topic.properties)


async def _marked(topic: TopicName, admin: Admin) -> TopicState | None:
    try:
        metadata = await admin.metadata(topic, partitioned=False)
    except AdminNotFoundError:
        return None
    return TopicState(0, properties=metadata.properties)


async def _listed(want: Desired, body: Body, ctx: Context) -> Observed:
    admin, name = await _admin(body, ctx), want.policy.topic.namespace_name
    namespace = await admin.namespace(name, max_age=LISTED_SECONDS)
    return observe.in_namespace(want, namespace, None)


async def _config_map(want: Desired, _: Body, ctx: Context) -> Observed:
    key = Key.of(want.config_map)
    return Observed(config_map=await observe.config_map(key, ctx, recent=True))


async def _admin(body: Body, ctx: Context) -> Admin:
    return (await ctx.brokers.open(connection_of(body))).admin


CHECKS: Mapping[str, tuple[Read, checks.Checks[checks.Evidence]]] = {
    Reason.OWNER_CONFLICT: (_owners, checks.Checks(checks.topic_has_another_owner)),
    Reason.BROKER_CHANGED: (_owners, checks.Checks(checks.topics_are_elsewhere)),
    Reason.CHAINED_POLICY: (_source, checks.Checks(checks.source_is_of_redrive)),
    Reason.TOPIC_EXISTS: (_owners, checks.Checks(checks.topic_is_not_redrives)),
    Reason.ADOPTION_NOT_ALLOWED: (_owners, checks.Checks(checks.topic_is_not_redrives)),
    Reason.PARTITIONS_DIFFER: (_listed, checks.Checks(
        checks.retry_topic_has_other_partitioning, checks.dead_letter_topic_lacks_partitions,
    )),
    Reason.SUBSCRIPTION_EXPIRY: (_listed, checks.Checks()),
    Reason.CONFIG_MAP_NOT_OURS: (_config_map, checks.Checks(checks.config_map_is_not_ours)),
}  # fmt: skip
"""Reason of a stalled policy → the read of its fact, and the checks of it."""


def is_checked(body: Body) -> bool:
    """Return True if only the poll of stalled policies detects the end of the policy's stall."""
    return reason(body) in CHECKS and "deletionTimestamp" not in body["metadata"]


@dataclass(frozen=True)
class StallChecks:
    """Checks the one fact that stalls a policy according to its status."""

    ctx: Context

    async def is_over(self, body: Body) -> bool:
        """Return True if a policy for which `is_checked` holds must be reconciled.

        Also if another error now keeps it from being ready.
        """
        reason = conditions.reason(body)
        read, chain = CHECKS[reason]
        try:
            request = resolve(body, self.ctx)
            want = desired(request, body, self.ctx.settings.cluster_id)
            have = await read(want, body, self.ctx)
            chain.check(checks.Evidence(body, want, have, request))
        except RedriveError as error:
            return error.reason != reason
        return True
