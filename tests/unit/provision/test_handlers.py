"""Who keeps whom waiting; what wakes whom is tried at a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import kopf
import pytest

from redrive.cluster.connections import Connections
from redrive.cluster.keeper import AT_ONCE, Again
from redrive.cluster.resources import Key
from redrive.cluster.table import Table
from redrive.cluster.world import World, wall_clock
from redrive.provision import connection as connections
from redrive.provision import handlers, reconcile

MakeBody = Callable[..., dict[str, Any]]
NOTHING = cast("Any", None)
SLOW, OTHER = {"name": "slow"}, {"name": "other"}
TIMES_AT_ONCE = range(AT_ONCE + 10)


class Looks:
    """Looks at objects, of which those that are called slow never come to an end."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, key: Key, *_: object) -> Again:
        """Look at an object."""
        self.begun.put_nowait(key.name)
        if key.name.startswith("slow"):
            await asyncio.Event().wait()
        return Again.WHEN_WOKEN

    async def reach(self, name: str) -> None:
        """Return once that object is looked at."""
        async with asyncio.timeout(5):
            while await self.begun.get() != name:
                pass


async def _greet(*_: object) -> None:
    pass


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks()
    monkeypatch.setattr(reconcile, "greet", _greet)
    monkeypatch.setattr(reconcile, "reconcile", made)
    monkeypatch.setattr(connections, "reconcile", made)
    return made


@pytest.fixture
async def world(looks: Looks) -> AsyncIterator[World]:  # noqa: ARG001 - looks in place of real ones
    """What the watches tell of, and who answers."""
    tables = {
        name: Table()
        for name in ("connections", "policies", "replays", "applications", "config_maps")
    }
    made = World(
        settings=NOTHING,
        kubernetes=NOTHING,
        brokers=Connections(tables["connections"], NOTHING, NOTHING, wall_clock),
        clock=wall_clock,
        **tables,
    )
    working = handlers.register(kopf.OperatorRegistry(), made)
    yield made
    for each in working:
        await each.stop()


async def test_policies_of_a_broker_that_hangs_keep_no_others_waiting(
    world: World, looks: Looks, policy: MakeBody
) -> None:
    for number in TIMES_AT_ONCE:
        world.policies.put(policy(f"slow-{number}", connectionRef=SLOW))
    await looks.reach(f"slow-{AT_ONCE - 1}")
    world.policies.put(policy("orders", connectionRef=OTHER))
    await looks.reach("orders")


async def test_connections_whose_brokers_hang_keep_no_others_waiting(
    world: World, looks: Looks
) -> None:
    for name in (*(f"slow-{number}" for number in TIMES_AT_ONCE), "main"):
        metadata = {"namespace": "shop", "name": name, "uid": name, "resourceVersion": "1"}
        spec = {"adminUrl": f"http://{name}:8080"}
        world.connections.put({"metadata": metadata, "spec": spec})
    await looks.reach("main")
