"""Watches of policies and connections → who has to be looked at; decides nothing itself.

The one door to kopf in this journey: kopf brings the watches, the `Keeper`s do the rest. Called
once, by the operator's command.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import kopf

from redrive.cluster import resources
from redrive.cluster.keeper import Keeper
from redrive.cluster.resources import Body, Key
from redrive.cluster.table import Table, is_asked_anew
from redrive.cluster.world import World
from redrive.provision import connection, reconcile
from redrive.provision.claims import Claims
from redrive.provision.health.watch import Health
from redrive.provision.rounds import Rounds


class Stoppable(Protocol):
    """What works beside the watches."""

    async def stop(self) -> None:
        """End it, and wait until it has ended."""


def register(registry: kopf.OperatorRegistry, world: World) -> tuple[Stoppable, ...]:
    """Watch policies and connections from then on, and look at all that there are now.

    Returns:
        What the caller has to stop in the end.
    """
    policies = Keeper("RetryPolicy", lambda key: reconcile.reconcile(key, world, claims, health))
    connections = Keeper("PulsarConnection", lambda key: connection.reconcile(key, world))
    claims = Claims(world.policies, policies.wake)
    health = Health(world, policies.wake)

    def policy_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            policies.wake(key)

    def connection_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            connections.wake(key)
            for user in _users(key, world.policies):
                policies.wake(user)
                for rival in claims.rivals(user):
                    policies.wake(rival)

    world.policies.listen(policy_changed)
    world.connections.listen(connection_changed)
    kopf.on.event(*resources.POLICIES.address, registry=registry)(world.policies.seen)
    kopf.on.event(*resources.CONNECTIONS.address, registry=registry)(world.connections.seen)
    for body in world.policies:
        policies.wake(Key.of(body))
    for body in world.connections:
        connections.wake(Key.of(body))
    return Rounds(world.policies, policies.wake), health, policies, connections


def _users(key: Key, policies: Table) -> Iterator[Key]:
    """Yield the policies that refer to connection *key*."""
    for body in policies:
        ref = body["spec"]["connectionRef"]
        own = Key.of(body)
        if key == (ref.get("namespace", own.namespace), ref["name"]):
            yield own
