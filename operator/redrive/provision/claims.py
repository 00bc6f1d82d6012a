"""Claims of policies on topics, and the resolution of a request.

`Conflicts` is an index of all policies by the names that they claim. It follows changes of policies
and connections.

A topic and a subscription have one policy. Two policies must not share a retry or dead-letter topic
either, which derived names make possible: topic `orders-eu` with subscription `billing` and topic
`orders` with `eu-billing` result in one name. A naming scheme without the topic does the same for
all topics of a namespace that have a subscription of the same name. A given name must not be the
source topic of another policy, which would be changed as if it held retries. `request` has the
priority among rivals.

Names belong to one broker: a cluster may have the same policies for development and production.

`resolve` reads and checks a RetryPolicy and its connection without calls to a broker.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import connections
from redrive.kube.cache import Cache, Turn, needs_reconcile
from redrive.kube.connections import (
    broker_of,
    connection_of,
    defaults_of,
    effective_spec,
    policy_of,
    spec_of,
    users,
)
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.policy.naming import TopicName
from redrive.provision.checks import ADMISSION, prior_claim, too_many_policies
from redrive.provision.outcome import Overrides, overrides
from redrive.provision.ownership import named_in
from redrive.provision.request import Priority, Request, is_proven, proof_of

logger = logging.getLogger(__name__)

_Name = tuple[str, str]
"""A broker, and a name there."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of one policy.

    Attributes:
        age: sort key; the oldest policy comes first.
        broker: the broker of its topics.
        own: the topics that belong to this policy only.
    """

    age: tuple[str, str]
    broker: str
    topic: TopicName
    subscription: str
    own: tuple[TopicName, ...]

    def claimed(self) -> Iterator[_Name]:
        """Yield the names under which the index holds this policy."""
        yield self.broker, f"source of {self.topic}"
        yield from self._common()

    def met(self) -> Iterator[_Name]:
        """Yield the names that rivals claim; two policies may share a source topic."""
        yield self.broker, str(self.topic)
        for topic in self.own:
            yield self.broker, f"source of {topic}"
        yield from self._common()

    def _common(self) -> Iterator[_Name]:
        # No topic has the form of `topic/subscription`, or of `source of topic`.
        yield self.broker, f"{self.topic}/{self.subscription}"
        for topic in self.own:
            yield self.broker, str(topic)


class _Claimant(NamedTuple):
    """Policy that claims a name; sorts by age, the oldest first."""

    age: tuple[str, str]
    key: Key


class _Judged(NamedTuple):
    """Request of a policy, None if it is inadmissible, and the objects it was read from."""

    policy: Body
    connection: Body | None
    override: Overrides
    request: Request | None

    def is_of(self, policy: Body, connection: Body | None, override: Overrides) -> bool:
        """Return True if later versions of the objects have the same request."""
        if self.override != override:
            return False
        if self.policy is policy and self.connection is connection:
            return True
        return not (
            needs_reconcile(self.policy, policy)
            or needs_reconcile(self.connection, connection)
            or _priority_changed(self.policy, policy)
        )


class Conflicts:
    """Index of the policies that claim each name at a broker.

    A change of a rival enqueues only the policies that this rival blocks. A policy whose reconcile
    is due is not enqueued again. Among N policies with one name, the deletion of the first enqueues
    N, and the creation of another enqueues one.

    Args:
        policies: all RetryPolicies.
        connections: all BrokerConnections. A policy without one claims nothing, unless its
            connection was deleted.
        enqueue: called with each policy that lost or gained a rival, or whose rival changed its
            spec, its connection or its priority. Whether a rival is admissible affects others, too.
    """

    def __init__(self, policies: Cache, connections: Cache, enqueue: Callable[[Key], None]) -> None:
        self._policies = policies
        self._connections = connections
        self._enqueue = enqueue
        self._claimants: dict[_Name, list[_Claimant]] = defaultdict(list)
        self._unblocked: dict[_Name, set[Key]] = defaultdict(set)
        self._names: dict[Key, _Names] = {}
        self._blocker: dict[Key, Key] = {}
        self._blocked_by: dict[Key, set[Key]] = defaultdict(set)
        self._judged: dict[Key, _Judged] = {}
        for body in policies:
            self._claim(Key.of(body), body)
            self.unblock(Key.of(body))  # until its next reconcile, which may be much later
        policies.listen(self._policy_changed)
        connections.listen(self._connection_changed)

    def oldest_first(self, key: Key) -> Iterator[Key]:
        """Yield the rivals by age: the policies that claim a name which *key* claims, too.

        They include policies whose source topic is a retry or dead-letter topic of *key*, and
        policies that have the source topic of *key* as such a topic. No more of them are visited
        than the caller reads.
        """
        names = self._names.get(key)
        met = () if names is None else names.met()
        before = None
        for claimant in heapq.merge(*(tuple(self._claimants.get(name, ())) for name in met)):
            if claimant != before and claimant.key != key:
                yield claimant.key
            before = claimant

    def has_rivals(self, key: Key) -> bool:
        """Return True if another policy claims a name which *key* claims too."""
        return next(self.oldest_first(key), None) is not None

    def block(self, key: Key, rival: Key) -> None:
        """Record that *rival* blocks a policy; the log names both."""
        if self._blocker.get(key) != rival:
            logger.info("RetryPolicy %s waits for RetryPolicy %s", key, rival)
        self._forget_decision(key)
        self._blocker[key] = rival
        self._blocked_by[rival].add(key)

    def unblock(self, key: Key) -> None:
        """Record that no rival blocks a policy."""
        self._forget_decision(key)
        names = self._names.get(key)
        for name in () if names is None else names.claimed():
            self._unblocked[name].add(key)

    def _forget_decision(self, key: Key) -> None:
        """Forget the decision about a policy: its own reconcile is due, and decides again."""
        rival, names = self._blocker.pop(key, None), self._names.get(key)
        if rival is not None:
            _discard(self._blocked_by, rival, key)
        for name in () if names is None else names.claimed():
            _discard(self._unblocked, name, key)

    def forget(self) -> None:
        """Forget which policies are admissible, because labels of namespaces changed."""
        self._judged.clear()

    def admissible(self, key: Key, ctx: Context) -> Request | None:
        """Return the request of a policy; resolve it again only if a change may affect it.

        The status of a policy changes often, each reconcile of the first of thousands of rivals
        reads all of them, and all policies are compared with their broker every minute.

        Returns:
            None if the policy does not exist or is inadmissible, as its own status shows.
        """
        body = ctx.policies.get(key)
        if body is None:
            return None
        connection = ctx.connections.get(connection_of(body))
        judged, override = self._judged.get(key), overrides(body, ctx.clock())
        if judged is None or not judged.is_of(body, connection, override):
            judged = _Judged(body, connection, override, _admitted(body, ctx))
        # With the last versions: to compare the same ones again takes no time.
        self._judged[key] = judged._replace(policy=body, connection=connection)
        return judged.request

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            self._changed(key, after)
        elif _priority_changed(before, after):
            for rival in self.affected(key):
                self._enqueue(rival)

    def _connection_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            for body in users(key, self._policies):
                self._changed(Key.of(body), body)

    def _changed(self, key: Key, after: Body | None) -> None:
        affected = self.affected(key)
        self._claim(key, after)
        for rival in affected | self.affected(key):
            self._enqueue(rival)

    def affected(self, key: Key) -> set[Key]:
        """Return the rivals that a change of *key* may affect."""
        names = self._names.get(key)
        met = () if names is None else names.met()
        unblocked = {rival for name in met for rival in self._unblocked.get(name, ())}
        return (unblocked | self._blocked_by.get(key, set())) - {key}

    def _claim(self, key: Key, body: Body | None) -> None:
        """Replace the names that *key* claims by those of *body*; None claims nothing."""
        names = None if body is None else self._names_of(body)
        self._forget_decision(key)
        before = self._names.pop(key, None)
        if before is not None:
            self._unclaim(key, before)
        if body is None:
            self._judged.pop(key, None)
        if names is None:
            return
        self._names[key] = names
        for name in names.claimed():
            insort(self._claimants[name], _Claimant(names.age, key))
        if body is not None and "deletionTimestamp" in body["metadata"]:
            self.unblock(key)

    def _unclaim(self, key: Key, names: _Names) -> None:
        for name in names.claimed():
            claimants = self._claimants[name]
            del claimants[bisect_left(claimants, _Claimant(names.age, key))]
            if not claimants:
                del self._claimants[name]

    def _names_of(self, body: Body) -> _Names | None:
        """Return the names that a policy claims; None for an invalid spec.

        A policy that is being deleted still claims the topics that it may delete. If its connection
        was deleted first, it claims them at the broker of before.
        """
        before = self._names.get(Key.of(body))
        connection = connection_of(body)
        former = None if before is None else before.broker
        broker = broker_of(connection, self._connections) or former
        defaults = defaults_of(connection, self._connections)
        try:
            spec = effective_spec(body, self._policies, defaults)
        except InvalidSpecError:
            return None  # the status of the policy shows the error
        if broker is None:
            return None
        return _Names(age_of(body), broker, spec.topic, spec.subscription, spec.own_topics)


def _discard(sets: dict[Any, set[Key]], name: Hashable, key: Key) -> None:
    """Remove *key* from the set of *name*, and the set once it is empty."""
    keys = sets.get(name, set())
    keys.discard(key)
    if not keys:
        sets.pop(name, None)


def age_of(body: Body) -> tuple[str, str]:
    """Return creation time and uid as sort key; the oldest policy comes first."""
    return body["metadata"]["creationTimestamp"], body["metadata"]["uid"]


def _priority_changed(before: Body | None, after: Body | None) -> bool:
    if before is None or after is None:
        return before is not after
    was, now = ((Priority.of(body), proof_of(body)) for body in (before, after))
    return was != now


def resolve(body: Body, ctx: Context) -> Request:
    """Resolve a RetryPolicy and its BrokerConnection.

    Raises:
        InvalidSpecError: the spec is invalid.
        RedriveError: the connection cannot be used; see `redrive.kube.connections.find`.
    """
    ref = spec_of(body, ctx.policies).connection_ref
    namespace = Key.of(body).namespace
    connection = connections.find(ref, namespace, ctx.connections, ctx.namespaces)
    return resolve_through(body, connection, ctx)


def resolve_through(body: Body, connection: BrokerConnectionSpec, ctx: Context) -> Request:
    """Resolve a RetryPolicy that uses *connection*.

    Raises:
        InvalidSpecError: the spec is invalid.
        RedriveError: the permissions of the connection cannot be determined.
    """
    key = Key.of(body)
    spec = effective_spec(body, ctx.policies, connection.policy_defaults)
    policy = policy_of(body, ctx.policies, spec)
    override = overrides(body, ctx.clock())
    if override.ignores_outages:
        policy = replace(policy, ignore_outages=True)
    if policy.dead_letters and (origins := override.dead_letters):
        policy = replace(policy, dead_letter_now=origins)
    through = connections.connection_of(body)
    return Request(
        key=key,
        age=age_of(body),
        spec=spec,
        policy=policy,
        connection=connection,
        permissions=connections.permissions(connection, through, key.namespace, ctx.namespaces),
        priority=Priority.of(body),
        is_proven=is_proven(body, through, broker_at(connection.pulsar.admin_url)),
        takes_over=named_in(body),
    )


def admit(request: Request, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Check that *request* is admissible and has priority; return its admissible rivals.

    Raises:
        RedriveError: the connection does not allow it, or a rival has priority.
    """
    ADMISSION.check(request)
    return precede(request, ctx, conflicts)


def precede(request: Request, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Check that *request*, which is admissible, has priority; return its admissible rivals.

    Raises:
        RedriveError: a rival has priority, or the namespace has too many policies.
    """
    check_number(request, ctx)
    rivals = []
    for key in conflicts.oldest_first(request.key):
        rival = conflicts.admissible(key, ctx)
        if rival is None:
            continue
        contested = prior_claim(request, rival)
        if contested is not None:
            conflicts.block(request.key, key)
            raise contested
        rivals.append(rival)
    conflicts.unblock(request.key)
    return tuple(rivals)


def check_number(request: Request, ctx: Context) -> None:
    """Check that the namespace does not exceed the number of policies that the connection allows.

    Provisioned policies come first, then older ones. So a new policy never displaces one in use,
    and excess policies do not affect others of the namespace.

    Raises:
        LimitExceeded: the limit is reached by policies before this one.
    """
    most, body = request.permissions.limits.policies, ctx.policies.get(request.key)
    if body is not None and (count := excess(body, ctx.policies, most)):
        raise too_many_policies(request.key.namespace, request.through, most, count)


def excess(body: Body, policies: Cache, most: int) -> int:
    """Return 0 if a policy is among the first *most* of its namespace and connection.

    For another one, return the number of them all.
    """
    peers, turn = policies.turns(_turn_among_peers), _turn_among_peers(body)
    return peers.count(turn.queue) if peers.before(turn) >= most else 0


def _turn_among_peers(body: Body) -> Turn:
    """Return the turn of a policy among those of its namespace and connection."""
    metadata = body["metadata"]
    is_provisioned = "retryTopic" in (body.get("status") or {})
    rank = not is_provisioned, metadata["creationTimestamp"], metadata["uid"]
    return Turn((Key.of(body).namespace, connection_of(body)), rank)


def rivals(key: Key, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Return the admissible policies that claim a name which *key* claims, too.

    A deleted policy claims nothing, so all other policies are returned for it.
    """
    gone = ctx.policies.get(key) is None
    others: Iterable[Key] = map(Key.of, ctx.policies) if gone else conflicts.oldest_first(key)
    requests = (conflicts.admissible(other, ctx) for other in others)
    return tuple(request for request in requests if request is not None)


def _admitted(body: Body, ctx: Context) -> Request | None:
    """Return the request of a policy; None if it is inadmissible."""
    try:
        request = resolve(body, ctx)
        ADMISSION.check(request)
    except RedriveError:
        return None
    return request
