"""Drift: changes at a broker, which has no watch, are found by comparing again and again.

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
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable

from redrive.errors import RedriveError
from redrive.kube import status
from redrive.kube.connections import broker_of, connection_of
from redrive.kube.resources import Body, Key
from redrive.provision.namespace_facts import NamespaceFacts
from redrive.provision.rate_limit import RateLimits
from redrive.provision.stall_checks import StallChecks, is_checked

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
                logger.info("namespace facts of PulsarConnection %s: %s", connection, error)
            except Exception:
                logger.exception("namespace facts of PulsarConnection %s: failed", connection)
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
    return connection_of(body) if status.is_settled(body) else None


def _progressing_at(body: Body) -> Key | None:
    """Return the connection of a policy that waits for its first reconcile."""
    return connection_of(body) if status.is_progressing(body) else None


def _checked_at(body: Body) -> Key | None:
    """Return the connection of a policy that `stall_checks` asks about."""
    return connection_of(body) if is_checked(body) else None
