"""Claims of policies on topics, and the resolution of a request.

Which policies want the same topic: an index over all of them, kept up to date by changes.

One (topic, subscription) has one policy, see `standing`; and two policies must not share a retry or
dead-letter topic, which derived names make possible: topic `orders-eu` with subscription `billing`
and topic `orders` with `eu-billing` meet in one name. So do all topics of a namespace that share
a subscription's name under a scheme that leaves the topic out. Nor may a name that is given be that
of another policy's source topic, which would be kept as if it held retries.

Names are those of one broker: the same policies in development and in production have nothing to do
with each other, although one cluster may hold both.

A RetryPolicy → what it asks for, read and checked; no calls to a broker.

Used by all that looks at policies: reconcile, resync, finalize and health.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from redrive.admin.model import broker_at
from redrive.api import Body
from redrive.api.connection import BrokerConnectionSpec
from redrive.errors import InvalidSpecError, RedriveError
from redrive.kube import connections
from redrive.kube.cache import Cache, needs_reconcile
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
from redrive.provision.outcome import dead_letters_now, ignores_outages
from redrive.provision.ownership import named_in
from redrive.provision.request import Request, Standing, is_proven, proof_of

logger = logging.getLogger(__name__)

_Name = tuple[str, str]
"""A broker, and a name there."""


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of one policy.

    Attributes:
        age: sorts policies, the oldest first.
        broker: where its topics are.
        own: the topics that are for this policy alone.
    """

    age: tuple[str, str]
    broker: str
    topic: TopicName
    subscription: str
    own: tuple[TopicName, ...]

    def claimed(self) -> Iterator[_Name]:
        """Give what it is found by."""
        yield self.broker, f"source of {self.topic}"
        yield from self._common()

    def met(self) -> Iterator[_Name]:
        """Give what those claim that it meets: not two for retrying the same topic."""
        yield self.broker, str(self.topic)
        for topic in self.own:
            yield self.broker, f"source of {topic}"
        yield from self._common()

    def _common(self) -> Iterator[_Name]:
        # No topic has the name of an identity, or of a source.
        yield self.broker, f"{self.topic}/{self.subscription}"
        for topic in self.own:
            yield self.broker, str(topic)


class _Claimant(NamedTuple):
    """A policy that claims a name; sorts by age, the oldest first."""

    age: tuple[str, str]
    key: Key


class _Judged(NamedTuple):
    """The request of a policy if it is admissible, else None, and what it was read from."""

    policy: Body
    connection: Body | None
    request: Request | None


class Conflicts:
    """Every name that a policy claims at a broker → the policies that claim it.

    A policy that is blocked by a rival is enqueued again when that rival changes, and by no other.
    One whose reconcile is due is not enqueued by rivals. So of N policies with one name, N are
    enqueued when the first one is deleted, and one when another is created.

    Args:
        policies: all that there are.
        connections: the same; a policy without one claims nothing, unless it has lost it.
        enqueue: called with each policy that lost or gained a rival, or whose rival has a new spec
            or another connection, or stands otherwise: whether a rival may be obeyed decides about
            others too.
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
            self.unblock(Key.of(body))  # until its next reconcile, which may be far away
        policies.listen(self._policy_changed)
        connections.listen(self._connection_changed)

    def rivals(self, key: Key) -> frozenset[Key]:
        """Return the policies that claim a name which *key* claims too.

        Those whose source topic is a retry or dead-letter topic of *key* are among them, and those
        that its own source topic is one of.
        """
        return frozenset(self.oldest_first(key))

    def oldest_first(self, key: Key) -> Iterator[Key]:
        """Return the same, by age, without visiting more of them than the caller reads."""
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
        """Record the rival that keeps a policy from its topics; the log names both."""
        if self._blocker.get(key) != rival:
            logger.info("RetryPolicy %s waits for RetryPolicy %s", key, rival)
        self._forget_decision(key)
        self._blocker[key] = rival
        self._blocked_by[rival].add(key)

    def unblock(self, key: Key) -> None:
        """Record that no rival keeps a policy from its topics."""
        self._forget_decision(key)
        names = self._names.get(key)
        for name in () if names is None else names.claimed():
            self._unblocked[name].add(key)

    def _forget_decision(self, key: Key) -> None:
        """Forget whether a policy is blocked: its own reconcile is due, and decides again."""
        rival, names = self._blocker.pop(key, None), self._names.get(key)
        if rival is not None:
            _discard(self._blocked_by, rival, key)
        for name in () if names is None else names.claimed():
            _discard(self._unblocked, name, key)

    def forget(self) -> None:
        """Forget which policies are admissible: the labels of namespaces have changed."""
        self._judged.clear()

    def admissible(self, key: Key, ctx: Context) -> Request | None:
        """Return the request of a policy, read once for each state of it and its connection.

        Returns:
            None where it is not there, or may not be obeyed: its own status shows that.
        """
        body = ctx.policies.get(key)
        if body is None:
            return None
        connection = ctx.connections.get(connection_of(body))
        judged = self._judged.get(key)
        if judged is None or judged.policy is not body or judged.connection is not connection:
            judged = self._judged[key] = _Judged(body, connection, _admitted(body, ctx))
        return judged.request

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            self._changed(key, after)
        elif _stands_otherwise(before, after):
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
        """Return the rivals about which a change of *key* may decide."""
        names = self._names.get(key)
        met = () if names is None else names.met()
        unblocked = {rival for name in met for rival in self._unblocked.get(name, ())}
        return (unblocked | self._blocked_by.get(key, set())) - {key}

    def _claim(self, key: Key, body: Body | None) -> None:
        """Put the names of *body* in place of those that *key* claimed; None for none."""
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
        if body is not None and _is_deleting(body):
            self.unblock(key)

    def _unclaim(self, key: Key, names: _Names) -> None:
        for name in names.claimed():
            claimants = self._claimants[name]
            del claimants[bisect_left(claimants, _Claimant(names.age, key))]
            if not claimants:
                del self._claimants[name]

    def _names_of(self, body: Body) -> _Names | None:
        """Return what a policy claims; one that can't be obeyed claims nothing.

        One that is being deleted still claims what it may be about to delete, and at the broker
        where that is, if its connection went first.
        """
        before = self._names.get(Key.of(body))
        connection = connection_of(body)
        known = None if before is None else before.broker
        broker = broker_of(connection, self._connections) or known
        defaults = defaults_of(connection, self._connections)
        try:
            spec = effective_spec(body, self._policies, defaults)
        except InvalidSpecError:
            return None  # its own reconcile says so in its status
        if broker is None:
            return None
        return _Names(age_of(body), broker, spec.topic, spec.subscription, spec.own_topics)


def _discard(sets: dict[Any, set[Key]], name: Hashable, key: Key) -> None:
    """Remove *key* from the set of *name*, and the set once it is empty."""
    keys = sets.get(name, set())
    keys.discard(key)
    if not keys:
        sets.pop(name, None)


def _is_deleting(body: Body) -> bool:
    """Return True if a policy is being deleted."""
    return "deletionTimestamp" in body["metadata"]


def age_of(body: Body) -> tuple[str, str]:
    """Return the creation time and uid, which sort policies, the oldest first."""
    return body["metadata"]["creationTimestamp"], body["metadata"]["uid"]


def _stands_otherwise(before: Body | None, after: Body | None) -> bool:
    if before is None or after is None:
        return before is not after
    was, now = ((Standing.of(body), proof_of(body)) for body in (before, after))
    return was != now


def resolve(body: Body, ctx: Context) -> Request:
    """Read a RetryPolicy, and the BrokerConnection it refers to.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: the connection can't be used; see `redrive.kube.connections.find`.
    """
    ref = spec_of(body, ctx.policies).connection_ref
    namespace = Key.of(body).namespace
    connection = connections.find(ref, namespace, ctx.connections, ctx.namespaces)
    return resolve_through(body, connection, ctx)


def resolve_through(body: Body, connection: BrokerConnectionSpec, ctx: Context) -> Request:
    """Read a RetryPolicy that uses *connection*.

    Raises:
        InvalidSpecError: the policy's spec can't be obeyed.
        RedriveError: what the connection permits can't be found out.
    """
    key = Key.of(body)
    spec = effective_spec(body, ctx.policies, connection.policy_defaults)
    policy = policy_of(body, ctx.policies, spec)
    if ignores_outages(body, ctx.clock()):
        policy = replace(policy, ignore_outages=True)
    if policy.dead_letters and (origins := dead_letters_now(body, ctx.clock())):
        policy = replace(policy, dead_letter_now=origins)
    through = connections.connection_of(body)
    return Request(
        key=key,
        age=age_of(body),
        spec=spec,
        policy=policy,
        connection=connection,
        permissions=connections.permissions(connection, through, key.namespace, ctx.namespaces),
        standing=Standing.of(body),
        is_proven=is_proven(body, through, broker_at(connection.pulsar.admin_url)),
        takes_over=named_in(body),
    )


def admit(request: Request, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Check whether *request* may be obeyed; return its rivals, as `rivals` does.

    Raises:
        RedriveError: its connection does not allow it, or a rival comes first.
    """
    ADMISSION.check(request)
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
    """Check that the namespace has not more policies than its connection allows.

    Policies that were provisioned come first, then the older ones. So a new policy never displaces
    one in use, and any number of them leaves others of the namespace alone.

    Raises:
        LimitExceeded: as many come before this one.
    """
    most, through = request.permissions.limits.policies, request.through
    peers = ctx.policies.index(_namespace_and_connection).get((request.key.namespace, through))
    body = ctx.policies.get(request.key)
    if len(peers) <= most or body is None:
        return
    own = _seniority(body)
    before = sum(1 for _ in islice((p for p in peers if _seniority(p) < own), most))
    if before == most:
        raise too_many_policies(request, len(peers))


def _namespace_and_connection(body: Body) -> tuple[str, Key]:
    return Key.of(body).namespace, connection_of(body)


def _seniority(body: Body) -> tuple[bool, str, str]:
    metadata = body["metadata"]
    is_provisioned = "retryTopic" in (body.get("status") or {})
    return not is_provisioned, metadata["creationTimestamp"], metadata["uid"]


def rivals(key: Key, ctx: Context, conflicts: Conflicts) -> tuple[Request, ...]:
    """Return what the admissible policies ask for that claim a name which *key* claims too.

    A policy that is gone claims nothing any more: any other may be its rival.
    """
    gone = ctx.policies.get(key) is None
    others: Iterable[Key] = map(Key.of, ctx.policies) if gone else conflicts.oldest_first(key)
    requests = (conflicts.admissible(other, ctx) for other in others)
    return tuple(request for request in requests if request is not None)


def _admitted(body: Body, ctx: Context) -> Request | None:
    """Return the request of a policy; None if it may not be obeyed."""
    try:
        request = resolve(body, ctx)
        ADMISSION.check(request)
    except RedriveError:
        return None
    return request
