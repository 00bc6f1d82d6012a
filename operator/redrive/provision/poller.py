"""Drift detection: polls for drift and for stalled policies, within a rate limit per broker.

Drift is a change at a broker, which has no watch, so policies are compared with it periodically.

Topics and grants of a whole Pulsar namespace come in three calls, its *namespace facts*, which are
compared with all policies every minute. For subscriptions, partitions and topic policies a broker
has no call for many topics at once below the super-user, so a *rotation* has one policy after the
other reconciled: the more policies, at its broker or at all together, the longer it takes. A
connection has facts of its own, and a broker one rotation for all connections that lead to it, so
that neither many of them call it too often, nor one with few policies slows down one with many. A
slow broker delays only its own policies. While many policies are being provisioned, the rotation of
their broker rests: for each call about a topic policy a broker reads the list of all topics of a
namespace, which is expensive just then.

Policies that are not ready are no part of that: they are reconciled when something changes, or
after a back-off. Those that are stalled by what is at a broker, or by a ConfigMap with another
owner, have a rotation for each connection, in which `stall_checks` asks whether that is over.

So an operator that starts needs the facts once to know that all is well.

How often one broker is called: connections that lead to it share a `RateLimit`.

Used by `resync` and by the reader of statistics.

Which settled policies have drifted, as far as one read of a Pulsar namespace shows for all.

Called by `resync`, and when a ConfigMap changes. A policy that is found here is reconciled, which
reads again what it repairs.

Whether what stalls a policy is over, where it ends at a broker or in an object without a watch.

A broker shows no changes, and a reconcile takes many calls to find all as it was. Here only the one
thing is read that the policy is stalled by, in three calls to the broker at most, beside those for
its Pulsar namespace, which policies share. Called by `resync`, for one policy after the other; a
policy for which it is over is reconciled.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from redrive import errors
from redrive.admin.client import Admin
from redrive.admin.errors import AdminError, AdminNotFoundError, BrokerUnreachableError
from redrive.admin.model import NamespaceState
from redrive.api import Body, conditions
from redrive.api.conditions import is_progressing, is_settled, reason
from redrive.errors import RedriveError
from redrive.kube.connections import broker_of, connection_of
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision import observe
from redrive.provision.checks import (
    Checks,
    PreflightFacts,
    config_map_is_not_ours,
    dead_letter_topic_lacks_partitions,
    is_of_the_other_kind,
    retry_topic_is_of_the_other_kind,
    source_is_of_redrive,
    topic_has_another_owner,
    topic_is_not_redrives,
    topics_are_elsewhere,
)
from redrive.provision.claims import Conflicts, admit, resolve
from redrive.provision.desired import Desired, DesiredTopic, Observed, TopicState, desired
from redrive.provision.diff import config_map_actions, diff
from redrive.provision.request import Request
from redrive.reasons import Reason

FACTS_SECONDS = 60.0
ROTATION_SECONDS = 15.0
"""How long a rotation takes, unless that were too fast for the broker."""
CALLS_PER_SECOND = 20.0
"""The most that a rotation has of calls to its broker."""
CALLS_PER_SECOND_IN_ALL = 75.0
"""The most that all rotations have together: what the operator needs grows with the policies that
it has, not with the brokers.
"""
CALLS_PER_LOOK = 18
"""How many reads at the broker a reconcile takes at most where nothing has to be done.

A schema that the broker refuses is tried again, once for each of the two topics. With 18 a thousand
policies have their turn every 900 s.
"""
CALLS_PER_QUESTION = 3
"""How many calls it takes at most to ask whether what stalls a policy is over.

With 3 a thousand stalled policies have their turn every 150 s. Not counted is what is read of a
Pulsar namespace, for all policies in it.
"""
MANY_BEGUN = 20
"""With so many policies of a broker that wait for their first reconcile, its rotation rests.

As many as there are connections to a broker: from there on policies wait for each other.
"""

logger = logging.getLogger(__name__)


class Turns:
    """Whose turn it is: the one whose last turn was longest ago, so none waits for two rounds."""

    def __init__(self) -> None:
        self._queue: dict[Key, None] = {}

    def next(self, keys: Iterable[Key]) -> Key | None:
        """Return whose turn it is among *keys*, all that there are now; None without any.

        New ones come last: they were reconciled just now. At the start all are, in random order:
        an operator that is restarted often must not begin with the same ones.
        """
        there = set(keys)
        newcomers = sorted(there - self._queue.keys())
        known = [key for key in self._queue if key in there]
        self._queue = dict.fromkeys([*known, *random.sample(newcomers, len(newcomers))])
        if not self._queue:
            return None
        first = next(iter(self._queue))
        self._queue[first] = self._queue.pop(first)
        return first


class Resync:
    """Compares and rotates the policies of all connections; needs a running event loop.

    Args:
        facts: finds which settled policies have drifted.
        stalls: finds which stalled policies may go on.
        enqueue: has a policy reconciled.
        enqueue_connection: has a connection reconciled: that its Secret is deleted, or a right, is
            shown by no watch either.
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
        self._settled = self._policies.index(_settled_at)
        self._progressing = self._policies.index(_progressing_at)
        self._checked = self._policies.index(_checked_at)
        self._connections = facts.ctx.connections
        self._enqueue = enqueue
        self._enqueue_connection = enqueue_connection
        self._questions = RateLimits(CALLS_PER_QUESTION / CALLS_PER_SECOND)
        self._tasks: dict[Key | str, list[asyncio.Task[None]]] = {}
        self._follow()
        self._connections.listen(lambda *_: self._follow())

    async def stop(self) -> None:
        """End all of them."""
        tasks = [task for about in tuple(self._tasks) for task in self._end(about)]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self) -> None:
        """Have tasks for the connections that there are now, and for their brokers."""
        keys = {Key.of(body) for body in self._connections}
        brokers = {broker for key in keys if (broker := broker_of(key, self._connections))}
        for gone in self._tasks.keys() - keys - brokers:
            self._end(gone)
        for key in keys - self._tasks.keys():
            self._tasks[key] = [
                asyncio.create_task(self._compare_for_ever(key), name=f"namespace facts {key}"),
                asyncio.create_task(self._ask_for_ever(key), name=f"questions {key}"),
            ]
        for broker in brokers - self._tasks.keys():
            rotation = asyncio.create_task(self._rotate_for_ever(broker), name=f"rotation {broker}")
            self._tasks[broker] = [rotation]

    def _end(self, about: Key | str) -> list[asyncio.Task[None]]:
        tasks = self._tasks.pop(about)
        for task in tasks:
            task.cancel()
        return tasks

    async def _compare_for_ever(self, connection: Key) -> None:
        while True:
            try:
                for key in await self._facts.drifted(connection, self._settled.get(connection)):
                    self._enqueue(key)
            except RedriveError as error:
                logger.info("namespace facts of BrokerConnection %s: %s", connection, error)
            except Exception:
                logger.exception("namespace facts of BrokerConnection %s: failed", connection)
            await asyncio.sleep(FACTS_SECONDS)
            # Not before the pause: a new connection is reconciled anyway.
            self._enqueue_connection(connection)

    async def _rotate_for_ever(self, broker: str) -> None:
        turns = Turns()
        while True:
            try:
                connections = self._connections_to(broker)
                begun = sum(self._progressing.count(each) for each in connections)
                rests = begun >= MANY_BEGUN
                keys = [key for each in connections for key in self._settled.keys(each)]
            except Exception:
                logger.exception("rotation at %s: failed", broker)
                rests, keys = False, []
            key = None if rests else turns.next(keys)
            settled = len(self._policies) - self._settled.count(None)
            await asyncio.sleep(pause(len(keys), CALLS_PER_LOOK, of=settled))
            if key is not None:
                self._enqueue(key)

    def _connections_to(self, broker: str) -> list[Key]:
        keys = (Key.of(body) for body in self._connections)
        return [key for key in keys if broker_of(key, self._connections) == broker]

    async def _ask_for_ever(self, connection: Key) -> None:
        turns, here = Turns(), 0
        while True:
            stalled = len(self._policies) - self._checked.count(None)
            await asyncio.sleep(pause(here, CALLS_PER_QUESTION, of=stalled))
            shared = self._questions.of(broker_of(connection, self._connections))
            # After the pause: what is stalled since then need not wait for another one.
            keys = self._checked.keys(connection)
            key, here = turns.next(keys), len(keys)
            if key is None:
                continue
            await shared.turn()
            if await self._is_over(key):
                self._enqueue(key)

    async def _is_over(self, key: Key) -> bool:
        body = self._policies.get(key)
        try:
            return body is not None and await self._stalls.is_over(body)
        except Exception:
            logger.exception("RetryPolicy %s: whether it goes on could not be found out", key)
            return False


def pause(policies: int, calls: int, *, of: int) -> float:
    """Return the seconds between two turns in a rotation.

    Args:
        policies: how many are in it.
        calls: how many calls a turn takes.
        of: how many policies there are in all rotations together.
    """
    whole = max(ROTATION_SECONDS, of * calls / CALLS_PER_SECOND_IN_ALL)
    return max(whole / (policies or 1), calls / CALLS_PER_SECOND)


def _settled_at(body: Body) -> Key | None:
    """Return the connection of a settled policy."""
    return connection_of(body) if is_settled(body) else None


def _progressing_at(body: Body) -> Key | None:
    """Return the connection of a policy that waits for its first reconcile."""
    return connection_of(body) if is_progressing(body) else None


def _checked_at(body: Body) -> Key | None:
    """Return the connection of a policy that `stall_checks` asks about."""
    return connection_of(body) if is_checked(body) else None


class RateLimit:
    """Gives turns in the order in which they are asked for, *between* seconds apart."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._free = 0.0

    async def turn(self) -> None:
        """Wait for one."""
        now = asyncio.get_running_loop().time()
        begin = max(self._free, now)
        self._free = begin + self._between
        await asyncio.sleep(begin - now)


class RateLimits:
    """A `RateLimit` for each broker, for as long as it is in use."""

    def __init__(self, between: float) -> None:
        self._between = between
        self._paces = WeakValueDictionary[str | None, RateLimit]()

    def of(self, broker: str | None) -> RateLimit:
        """Return the one for all calls to *broker*, as `connections.broker_of` names it."""
        return self._paces.setdefault(broker, RateLimit(self._between))


@dataclass(frozen=True)
class NamespaceFacts:
    """Compares policies with what the watches and lists of the brokers show.

    Attributes:
        conflicts: which policies claim the same names.
    """

    ctx: Context
    conflicts: Conflicts

    async def drifted(self, connection: Key, bodies: Iterable[Body]) -> list[Key]:
        """Return those of *bodies*, settled policies of *connection*, that have drifted.

        Policies that only observe are left to the rotation: they may differ for ever.

        Three calls to the broker for each Pulsar namespace, however many policies are in it.

        Raises:
            RedriveError: the connection can't be used, or its broker can't be reached.
        """
        found: list[Key] = []
        namespaces: dict[str, list[tuple[Request, Body]]] = defaultdict(list)
        for body in bodies:
            await asyncio.sleep(0)  # others come in between: a thousand policies take a while
            request = self._unrefused(body)
            if request is None:
                found.append(Key.of(body))
            elif not request.only_observes:
                namespaces[request.policy.topic.namespace_name].append((request, body))
        if namespaces:
            admin = (await self.ctx.brokers.open(connection)).admin
            for namespace, each in namespaces.items():
                found.extend(await self._drifted_in(namespace, each, admin))
        return found

    def lacks_config_map(self, body: Body) -> bool:
        """Whether a settled policy has to be reconciled for its ConfigMap."""
        request = self._unrefused(body)
        if request is None:
            return True
        if request.only_observes:
            return False
        wanted = self._desired(request, body).config_map
        return any(config_map_actions(wanted, self.ctx.config_maps.get(Key.of(wanted))))

    def _unrefused(self, body: Body) -> Request | None:
        """Return what a policy asks for, or None if it is to be refused."""
        try:
            request = resolve(body, self.ctx)
            admit(request, self.ctx, self.conflicts)
        except RedriveError:
            return None
        return request

    def _desired(self, request: Request, body: Body) -> Desired:
        return desired(request, body, self.ctx.settings.cluster_id)

    async def _drifted_in(
        self, namespace: str, each: Iterable[tuple[Request, Body]], admin: Admin
    ) -> list[Key]:
        try:
            there = await admin.namespace(namespace)
        except BrokerUnreachableError:
            raise
        except AdminError as error:
            logger.info("resync of Pulsar namespace %s: %s", namespace, error)
            # What stays so is for each policy's status; the rest may be over by the next time.
            stays = error.stalls or isinstance(error, AdminNotFoundError)
            return [request.key for request, _ in each] if stays else []
        found = []
        for request, body in each:
            await asyncio.sleep(0)
            wanted = self._desired(request, body)
            config_map = self.ctx.config_maps.get(Key.of(wanted.config_map))
            if has_drifted(wanted, there, config_map):
                found.append(request.key)
        return found


def has_drifted(wanted: Desired, namespace: NamespaceState, config_map: Body | None) -> bool:
    """Whether what is listed of a policy that was ready is not as it needs it."""
    try:
        have = observe.in_namespace(wanted, namespace, config_map)
    except RedriveError:
        return True
    return is_of_the_other_kind(wanted, have) or bool(diff(wanted, have))


LISTED_SECONDS = 15.0
"""How old what is known of a Pulsar namespace may be: it is read for all of its policies."""

Read = Callable[[Desired, Body, Context], Awaitable[Observed]]


async def _owners(want: Desired, body: Body, ctx: Context) -> Observed:
    admin = await _admin(body, ctx)

    async def marked(topic: DesiredTopic | None) -> TopicState | None:
        return None if topic is None else await _marked(topic.name, admin)

    return Observed(
        retry=await marked(want.retry),
        dead_letter=await marked(want.dead_letter),
        ledger=await marked(want.ledger),
        sequences=await marked(want.sequences),
    )


async def _source(want: Desired, body: Body, ctx: Context) -> Observed:
    found = await _marked(want.policy.topic, await _admin(body, ctx))
    return Observed(source_properties=None if found is None else found.properties)


async def _marked(topic: TopicName, admin: Admin) -> TopicState | None:
    try:
        found = await admin.metadata(topic, partitioned=False)
    except AdminNotFoundError:
        return None
    return TopicState(0, properties=found.properties)


async def _listed(want: Desired, body: Body, ctx: Context) -> Observed:
    admin, name = await _admin(body, ctx), want.policy.topic.namespace_name
    namespace = await admin.namespace(name, max_age=LISTED_SECONDS)
    return observe.in_namespace(want, namespace, None)


async def _config_map(want: Desired, _: Body, ctx: Context) -> Observed:
    key = Key.of(want.config_map)
    return Observed(config_map=await observe.config_map(key, ctx, recent=True))


async def _admin(body: Body, ctx: Context) -> Admin:
    return (await ctx.brokers.open(connection_of(body))).admin


CHECKS: Mapping[str, tuple[Read, Checks[PreflightFacts]]] = {
    errors.OwnerConflictError.reason: (_owners, Checks(topic_has_another_owner)),
    Reason.BROKER_CHANGED: (_owners, Checks(topics_are_elsewhere)),
    Reason.CHAINED_POLICY: (_source, Checks(source_is_of_redrive)),
    Reason.TOPIC_EXISTS: (_owners, Checks(topic_is_not_redrives)),
    Reason.ADOPTION_NOT_ALLOWED: (
        _owners,
        Checks(topic_is_not_redrives),
    ),
    Reason.PARTITIONS_DIFFER: (
        _listed,
        Checks(
            retry_topic_is_of_the_other_kind,
            dead_letter_topic_lacks_partitions,
        ),
    ),
    Reason.SUBSCRIPTION_EXPIRY: (_listed, Checks()),
    Reason.CONFIG_MAP_NOT_OURS: (
        _config_map,
        Checks(config_map_is_not_ours),
    ),
}
"""Reason of a stalled policy → how what it is about is read, and checked by what it needs."""


def is_checked(body: Body) -> bool:
    """Whether a policy is stalled by something that only this module finds the end of."""
    return reason(body) in CHECKS and "deletionTimestamp" not in body["metadata"]


@dataclass(frozen=True)
class StallChecks:
    """Checks stalled policies, each for the one thing that its status names."""

    ctx: Context

    async def is_over(self, body: Body) -> bool:
        """Whether a policy for which `is_checked` holds has to be reconciled.

        So it is too where something else now keeps it from being ready.
        """
        reason = conditions.reason(body)
        read, checks = CHECKS[reason]
        try:
            request = resolve(body, self.ctx)
            want = desired(request, body, self.ctx.settings.cluster_id)
            have = await read(want, body, self.ctx)
            checks.check(PreflightFacts(body, want, have, request))
        except RedriveError as error:
            return error.reason != reason
        return True
