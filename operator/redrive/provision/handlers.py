"""Work queues of policies and connections, and the changes of caches that fill them.

kopf's watches fill the caches, see `cli/operator.py`. `Queues` enqueues the objects that a change
of a cache may affect. It decides nothing about them: the `Controller`s reconcile.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from redrive.admin.errors import AuthenticationFailedError
from redrive.admin.guards import PROBE_PAUSE
from redrive.api import Body
from redrive.api.conditions import ObjectEvent, is_new, is_progressing, is_ready, is_settled, reason
from redrive.kube import resources
from redrive.kube.cache import needs_reconcile
from redrive.kube.connections import connection_at, connection_of, users
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Key
from redrive.kube.status import Publisher
from redrive.provision import connection
from redrive.provision.claims import Conflicts
from redrive.provision.connection import has_target_rights, is_protection_due
from redrive.provision.desired import config_map_of
from redrive.provision.finalize import made
from redrive.provision.groups import GroupClaims
from redrive.provision.health import Health
from redrive.provision.poller import DriftPoller, NamespaceFacts, StallChecks
from redrive.provision.reconciler import OrphanedPolicies, PolicyReconciler
from redrive.provision.rocketmq import RocketMQQueue
from redrive.reasons import Reason


class Stoppable(Protocol):
    """Background task."""

    async def stop(self) -> None:
        """Stop the task, and wait for its end."""


def start(ctx: Context) -> tuple[Stoppable, ...]:
    """Follow the caches of this journey, and enqueue the objects that need a reconcile.

    Returns:
        The tasks that the caller must stop.
    """
    queues = Queues(ctx)
    queues.listen()
    queues.enqueue_unsettled()
    poller = DriftPoller(
        queues.facts, queues.stalls, queues.policies.enqueue, queues.connections.enqueue
    )
    rocketmq = RocketMQQueue(ctx, GroupClaims(ctx), queues.connections.enqueue)
    return (
        poller,
        queues.health,
        rocketmq,
        queues.policies,
        queues.connections,
        *queues.deletion_events,
    )


class Queues:
    """Work queues of policies and connections, and the listeners that fill them."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.policies = Controller(
            "RetryPolicy",
            lambda key: self._reconciler.reconcile(key, failures=self.policies.failures(key)),
            mark_progressing=lambda key: self._reconciler.mark_progressing(key),  # noqa: PLW0108  set below
            partition_key=partial(connection_at, objects=ctx.policies),
        )
        self.connections = Controller(
            "BrokerConnection",
            lambda key: connection.reconcile(key, ctx),
            partition_key=lambda key: key,
            longest_back_off=PROBE_PAUSE.total_seconds(),  # at random down to half of it
        )
        self._conflicts = Conflicts(ctx.policies, ctx.connections, self.policies.enqueue)
        self._orphans = OrphanedPolicies(ctx.policies, ctx.clock)
        self.facts = NamespaceFacts(ctx, self._conflicts)
        self.stalls = StallChecks(ctx)
        self.health = Health(ctx, self.policies.enqueue)
        self._reconciler = PolicyReconciler(ctx, self._conflicts, self.health, self._orphans)
        self.deletion_events = tuple(
            DeletionEvents(Publisher(ctx.kubernetes, kind, ctx.caches[kind], ctx.clock))
            for kind in resources.POLICY_KINDS.values()
        )

    def listen(self) -> None:
        """Enqueue the objects that later changes affect."""
        self._ctx.policies.listen(self._policy_changed)
        self._ctx.connections.listen(self._connection_changed)
        self._ctx.config_maps.listen(self._config_map_changed)
        self._ctx.brokers.listen(self._breaker_changed)
        self._ctx.namespaces.listen(self._labels_changed)
        self._ctx.job_templates.listen(self._job_templates_changed)

    def enqueue_unsettled(self) -> None:
        """Enqueue unsettled objects. The first poll checks settled policies."""
        for body in self._ctx.policies:
            orphaned = self._ctx.connections.get(connection_of(body)) is None
            if orphaned or not is_settled(body) or self._conflicts.has_rivals(Key.of(body)):
                self.policies.enqueue(Key.of(body))
        for body in self._ctx.connections:
            self.connections.enqueue(Key.of(body))
            if is_new(body):
                self._enqueue_users(Key.of(body))

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            self.policies.enqueue(key)
        refs = {connection_of(body) for body in (before, after) if body is not None}
        if before is None or after is None or len(refs) > 1:
            for connection in refs:
                self._users_changed(connection)
        if after is not None and _is_rejected(after) and not _is_rejected(before or {}):
            # The token is no longer valid: the connection must show that.
            self.connections.enqueue(connection_of(after))

    def _users_changed(self, connection: Key) -> None:
        body = self._ctx.connections.get(connection)
        used = self._ctx.policies.index(connection_of).count(connection) > 0
        if body is not None and is_protection_due(body, used=used):
            self.connections.enqueue(connection)

    def _connection_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            self.connections.enqueue(key)
            self._enqueue_users(key)
        elif has_target_rights(before or {}) is not has_target_rights(after or {}):
            self.connections.enqueue(key)  # its deletion may be blocked or unblocked
        elif _is_of_another_release(before, after):
            self._enqueue_users(key)
        elif after is not None and is_ready(after) and not is_ready(before or {}):
            self._enqueue_failed_users(key)

    def _enqueue_failed_users(self, connection: Key) -> None:
        """Enqueue policies that may have failed for the same cause as the connection."""
        for body in users(connection, self._ctx.policies):
            if not is_ready(body) and not is_progressing(body):
                self.policies.enqueue(Key.of(body))

    def _breaker_changed(self, connection: Key) -> None:
        self.connections.enqueue(connection)
        self._enqueue_users(connection)

    def _labels_changed(self, namespace: str) -> None:
        self._conflicts.forget()
        for body in self._ctx.policies:
            key = Key.of(body)
            if key.namespace == namespace:
                self._enqueue_with_rivals(key)

    def _job_templates_changed(self) -> None:
        for body in self._ctx.connections:
            self.connections.enqueue(Key.of(body))

    def _config_map_changed(self, key: Key, _before: Body | None, after: Body | None) -> None:
        for body in self._ctx.policies.index(config_map_of).get(key):
            is_freed = after is None and reason(body) == Reason.CONFIG_MAP_NOT_OURS
            if is_freed or (is_settled(body) and self.facts.lacks_config_map(body)):
                self.policies.enqueue(Key.of(body))

    def _enqueue_users(self, connection: Key) -> None:
        for body in users(connection, self._ctx.policies):
            self._enqueue_with_rivals(Key.of(body))

    def _enqueue_with_rivals(self, policy: Key) -> None:
        self.policies.enqueue(policy)
        for rival in self._conflicts.affected(policy):
            self.policies.enqueue(rival)


def _is_of_another_release(before: Body | None, after: Body | None) -> bool:
    """Return True if the broker of a connection was upgraded, which may change topic policies."""
    versions = [((body or {}).get("status") or {}).get("brokerVersion") for body in (before, after)]
    return None not in versions and versions[0] != versions[1]


def _is_rejected(policy: Body) -> bool:
    """Return True if the broker rejected the token (401) at the last reconcile."""
    return reason(policy) == AuthenticationFailedError.reason


class DeletionEvents:
    """Emits an Event about each policy that is deleted at once; requires a running event loop.

    The deletion of a policy with `deletionPolicy: Retain` waits for nothing. Its Event comes after
    it, if the operator runs then.
    """

    def __init__(self, out: Publisher) -> None:
        self._out = out
        self._tasks: set[asyncio.Task[None]] = set()
        out.table.listen(self._note)

    async def stop(self) -> None:
        """Drop the Events that are not emitted yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until the Events of all policies deleted so far are emitted."""
        await asyncio.gather(*self._tasks)

    def _note(self, _: Key, before: Body | None, after: Body | None) -> None:
        if after is not None or before is None or "deletionTimestamp" in before["metadata"]:
            return  # `finalize` emits the Event of a policy that had a deletionTimestamp
        if topics := made(before):
            self._emit(before, topics)

    def _emit(self, policy: Body, topics: str) -> None:
        message = (
            f"{topics} are retained at the broker, with their messages, subscriptions and grants; "
            "delete them manually when they are no longer needed"
        )
        task = asyncio.create_task(self._out.emit(policy, ObjectEvent(Reason.RETAINED, message)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
