"""Watches of policies and connections → who has to be looked at; decides nothing itself.

The one door to kopf in this journey: kopf brings the watches, the `Controller`s do the rest. Called
once, by the operator's command.
"""

from __future__ import annotations

from typing import Protocol

import kopf

from redrive.admin.errors import AuthenticationFailedError
from redrive.kube import resources, status
from redrive.kube.cache import is_asked_anew
from redrive.kube.connections import connection_of, users
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Body, Key
from redrive.kube.status import Publisher
from redrive.provision import connection, reconcile
from redrive.provision.conflicts import Conflicts
from redrive.provision.deletion_events import DeletionEvents
from redrive.provision.desired import policy_of
from redrive.provision.errors import ConfigMapNotOursError
from redrive.provision.health.watch import Health
from redrive.provision.namespace_facts import NamespaceFacts
from redrive.provision.resync import Resync
from redrive.provision.stall_checks import StallChecks

PROBE_SECONDS = 5.0
"""A broker that is silent is asked for a sign of life this often, or up to twice as often."""


class Stoppable(Protocol):
    """What works beside the watches."""

    async def stop(self) -> None:
        """End it, and wait until it has ended."""


def register(registry: kopf.OperatorRegistry, ctx: Context) -> tuple[Stoppable, ...]:
    """Watch policies and connections from then on, and see to all that there are now.

    Returns:
        What the caller has to stop in the end.
    """
    journey = _Journey(ctx)
    journey.listen()
    kopf.on.event(*resources.POLICIES.address, registry=registry)(ctx.policies.seen)
    kopf.on.event(*resources.CONNECTIONS.address, registry=registry)(ctx.connections.seen)
    journey.begin()
    rounds = Resync(
        journey.facts, journey.stalls, journey.policies.enqueue, journey.connections.enqueue
    )
    return rounds, journey.health, journey.policies, journey.connections, journey.farewells


class _Journey:
    """Who wakes whom."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.policies = Controller(
            "RetryPolicy",
            lambda key: reconcile.reconcile(key, ctx, self._conflicts, self.health),
            mark_progressing=lambda key: reconcile.mark_progressing(key, ctx),
            partition_key=self._connection_of,
        )
        self.connections = Controller(
            "PulsarConnection",
            lambda key: connection.reconcile(key, ctx),
            partition_key=lambda key: key,
            longest_back_off=PROBE_SECONDS,
        )
        self._conflicts = Conflicts(ctx.policies, self.policies.enqueue)
        self.facts = NamespaceFacts(ctx, self._conflicts)
        self.stalls = StallChecks(ctx, self._conflicts)
        self.health = Health(ctx, self.policies.enqueue)
        self.farewells = DeletionEvents(
            Publisher(ctx.kubernetes, resources.POLICIES, ctx.policies, ctx.clock)
        )

    def _connection_of(self, policy: Key) -> Key | None:
        """Return whose broker a policy waits for; None where it is gone, and waits for nobody."""
        body = self._ctx.policies.get(policy)
        return None if body is None else connection_of(body)

    def listen(self) -> None:
        """Answer what changes from then on."""
        self._ctx.policies.listen(self._policy_changed)
        self._ctx.connections.listen(self._connection_changed)
        self._ctx.config_maps.listen(self._config_map_changed)
        self._ctx.brokers.listen(self._broker_fell_silent_or_answered)

    def begin(self) -> None:
        """Look at all that may need it; other settled policies are for the first survey."""
        for body in self._ctx.policies:
            orphaned = self._ctx.connections.get(connection_of(body)) is None
            if orphaned or not status.is_settled(body) or self._conflicts.rivals(Key.of(body)):
                self.policies.enqueue(Key.of(body))
        for body in self._ctx.connections:
            self.connections.enqueue(Key.of(body))
            if status.is_new(body):
                self._enqueue_users(Key.of(body))

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            self.policies.enqueue(key)
        if after is not None and _is_rejected(after) and not _is_rejected(before or {}):
            # A token is no longer good, which the connection learns by nothing else.
            self.connections.enqueue(connection_of(after))

    def _connection_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            self.connections.enqueue(key)
            self._enqueue_users(key)

    def _broker_fell_silent_or_answered(self, connection: Key) -> None:
        self.connections.enqueue(connection)
        self._enqueue_users(connection)

    def _config_map_changed(self, key: Key, _before: Body | None, after: Body | None) -> None:
        body = self._ctx.policies.get(policy_of(key))
        if body is None:
            return
        if status.is_settled(body) and self.facts.lacks_config_map(body):
            self.policies.enqueue(Key.of(body))
        if after is None and status.reason(body) == ConfigMapNotOursError.reason:
            self.policies.enqueue(Key.of(body))

    def _enqueue_users(self, connection: Key) -> None:
        for body in users(connection, self._ctx.policies):
            self.policies.enqueue(Key.of(body))
            for rival in self._conflicts.rivals(Key.of(body)):
                self.policies.enqueue(rival)


def _is_rejected(policy: Body) -> bool:
    """Whether the broker took the token for none that it knows, at the last look."""
    return status.reason(policy) == AuthenticationFailedError.reason
