"""Watches of policies and connections → who has to be looked at; decides nothing itself.

The one door to kopf in this journey: kopf brings the watches, the `Keeper`s do the rest. Called
once, by the operator's command.
"""

from __future__ import annotations

from typing import Protocol

import kopf

from redrive.admin.errors import AuthenticationFailedError
from redrive.cluster import resources, status
from redrive.cluster.connections import connection_of, users
from redrive.cluster.keeper import Keeper
from redrive.cluster.resources import Body, Key
from redrive.cluster.status import Publisher
from redrive.cluster.table import is_asked_anew
from redrive.cluster.world import World
from redrive.provision import connection, reconcile
from redrive.provision.claims import Claims
from redrive.provision.desired import policy_of
from redrive.provision.errors import ConfigMapNotOursError
from redrive.provision.farewell import Farewells
from redrive.provision.health.watch import Health
from redrive.provision.rounds import Rounds
from redrive.provision.standing import Standing
from redrive.provision.survey import Survey

PROBE_SECONDS = 5.0
"""A broker that is silent is asked for a sign of life this often, or up to twice as often."""


class Stoppable(Protocol):
    """What works beside the watches."""

    async def stop(self) -> None:
        """End it, and wait until it has ended."""


def register(registry: kopf.OperatorRegistry, world: World) -> tuple[Stoppable, ...]:
    """Watch policies and connections from then on, and see to all that there are now.

    Returns:
        What the caller has to stop in the end.
    """
    journey = _Journey(world)
    journey.listen()
    kopf.on.event(*resources.POLICIES.address, registry=registry)(world.policies.seen)
    kopf.on.event(*resources.CONNECTIONS.address, registry=registry)(world.connections.seen)
    journey.begin()
    rounds = Rounds(
        journey.survey, journey.standing, journey.policies.wake, journey.connections.wake
    )
    return rounds, journey.health, journey.policies, journey.connections, journey.farewells


class _Journey:
    """Who wakes whom."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.policies = Keeper(
            "RetryPolicy",
            lambda key: reconcile.reconcile(key, world, self._claims, self.health),
            greet=lambda key: reconcile.greet(key, world),
            lane=self._connection_of,
        )
        self.connections = Keeper(
            "PulsarConnection",
            lambda key: connection.reconcile(key, world),
            lane=lambda key: key,
            longest_back_off=PROBE_SECONDS,
        )
        self._claims = Claims(world.policies, self.policies.wake)
        self.survey = Survey(world, self._claims)
        self.standing = Standing(world, self._claims)
        self.health = Health(world, self.policies.wake)
        self.farewells = Farewells(
            Publisher(world.kubernetes, resources.POLICIES, world.policies, world.clock)
        )

    def _connection_of(self, policy: Key) -> Key | None:
        """Return whose broker a policy waits for; None where it is gone, and waits for nobody."""
        body = self._world.policies.get(policy)
        return None if body is None else connection_of(body)

    def listen(self) -> None:
        """Answer what changes from then on."""
        self._world.policies.listen(self._policy_changed)
        self._world.connections.listen(self._connection_changed)
        self._world.config_maps.listen(self._config_map_changed)
        self._world.brokers.listen(self._broker_fell_silent_or_answered)

    def begin(self) -> None:
        """Look at all that may need it; other settled policies are for the first survey."""
        for body in self._world.policies:
            orphaned = self._world.connections.get(connection_of(body)) is None
            if orphaned or not status.is_settled(body) or self._claims.rivals(Key.of(body)):
                self.policies.wake(Key.of(body))
        for body in self._world.connections:
            self.connections.wake(Key.of(body))
            if status.is_new(body):
                self._wake_users(Key.of(body))

    def _policy_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            self.policies.wake(key)
        if after is not None and _is_refused(after) and not _is_refused(before or {}):
            # A token is no longer good, which the connection learns by nothing else.
            self.connections.wake(connection_of(after))

    def _connection_changed(self, key: Key, before: Body | None, after: Body | None) -> None:
        if is_asked_anew(before, after):
            self.connections.wake(key)
            self._wake_users(key)

    def _broker_fell_silent_or_answered(self, connection: Key) -> None:
        self.connections.wake(connection)
        self._wake_users(connection)

    def _config_map_changed(self, key: Key, _before: Body | None, after: Body | None) -> None:
        body = self._world.policies.get(policy_of(key))
        if body is None:
            return
        if status.is_settled(body) and self.survey.lacks_config_map(body):
            self.policies.wake(Key.of(body))
        if after is None and status.reason(body) == ConfigMapNotOursError.reason:
            self.policies.wake(Key.of(body))

    def _wake_users(self, connection: Key) -> None:
        for body in users(connection, self._world.policies):
            self.policies.wake(Key.of(body))
            for rival in self._claims.rivals(Key.of(body)):
                self.policies.wake(rival)


def _is_refused(policy: Body) -> bool:
    """Whether the broker took the token for none that it knows, at the last look."""
    return status.reason(policy) == AuthenticationFailedError.reason
