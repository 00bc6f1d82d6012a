"""Which objects wait for which; what enqueues what is tried at a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import kopf
import pytest

from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.connections import Connections, NamespaceLabels
from redrive.kube.context import Context, wall_clock
from redrive.kube.controller import AT_ONCE
from redrive.kube.resources import Key
from redrive.provision import connection as connections
from redrive.provision import handlers, reconciler

MakeBody = Callable[..., dict[str, Any]]
NOTHING = cast("Any", None)
SLOW, OTHER = {"name": "slow"}, {"name": "other"}
TIMES_AT_ONCE = range(AT_ONCE + 10)


class Looks:
    """Looks at objects, of which those that are called slow never come to an end."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, key: Key, *_: object, **__: object) -> Requeue:
        """Look at an object."""
        self.begun.put_nowait(key.name)
        if key.name.startswith("slow"):
            await asyncio.Event().wait()
        return Requeue.ON_CHANGE

    async def reach(self, name: str) -> None:
        """Return once that object is looked at."""
        async with asyncio.timeout(60):
            while await self.begun.get() != name:
                pass


async def _mark_progressing(*_: object) -> None:
    pass


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks()
    monkeypatch.setattr(reconciler, "mark_progressing", _mark_progressing)
    monkeypatch.setattr(reconciler, "reconcile", made)
    monkeypatch.setattr(connections, "reconcile", made)
    return made


@pytest.fixture
async def ctx(looks: Looks) -> AsyncIterator[Context]:  # noqa: ARG001 - looks in place of real ones
    """What the watches tell of, and who answers."""
    tables = {name: Cache() for name in ("connections", "policies", "replays", "config_maps")}
    made = Context(
        settings=NOTHING,
        kubernetes=NOTHING,
        brokers=Connections(tables["connections"], NOTHING, NOTHING, wall_clock, NOTHING),
        namespaces=NamespaceLabels(NOTHING),
        clock=wall_clock,
        missing=(),
        began=wall_clock(),
        applications={},
        **tables,
    )
    working = handlers.register(kopf.OperatorRegistry(), made)
    yield made
    for each in working:
        await each.stop()


async def test_policies_of_a_broker_that_hangs_keep_no_others_waiting(
    ctx: Context, looks: Looks, policy: MakeBody
) -> None:
    for number in TIMES_AT_ONCE:
        ctx.policies.put(policy(f"slow-{number}", connectionRef=SLOW))
    await looks.reach(f"slow-{AT_ONCE - 1}")
    ctx.policies.put(policy("orders", connectionRef=OTHER))
    await looks.reach("orders")


async def test_connections_whose_brokers_hang_keep_no_others_waiting(
    ctx: Context, looks: Looks
) -> None:
    for name in (*(f"slow-{number}" for number in TIMES_AT_ONCE), "main"):
        metadata = {"namespace": "shop", "name": name, "uid": name, "resourceVersion": "1"}
        spec = {"adminUrl": f"http://{name}:8080"}
        ctx.connections.put({"metadata": metadata, "spec": spec})
    await looks.reach("main")


async def test_policies_are_looked_at_when_their_broker_is_upgraded(
    ctx: Context, looks: Looks, policy: MakeBody
) -> None:
    def main(version: int, release: str) -> dict[str, Any]:
        metadata = {"namespace": "shop", "name": "main", "uid": "m", "generation": 1}
        return {
            "metadata": metadata | {"resourceVersion": str(version)},
            "spec": {"adminUrl": "http://main:8080"},
            "status": {"brokerVersion": release},
        }

    ctx.policies.put(policy("orders"))
    ctx.connections.put(main(1, "4.0.8"))
    for _ in range(4):
        await asyncio.sleep(0)
    while not looks.begun.empty():
        looks.begun.get_nowait()
    ctx.connections.put(main(2, "4.0.8"))
    ctx.connections.put(main(3, "4.2.4"))
    async with asyncio.timeout(60):
        assert await looks.begun.get() == "orders"
    assert looks.begun.empty()


async def test_a_connection_that_becomes_ready_has_those_looked_at_that_failed_without_it(
    ctx: Context, looks: Looks, policy: MakeBody
) -> None:
    def main(version: int, ready: str) -> dict[str, Any]:
        metadata = {"namespace": "shop", "name": "main", "uid": "m", "generation": 1}
        conditions = [{"type": "Ready", "status": ready, "reason": "x"}]
        return {
            "metadata": metadata | {"resourceVersion": str(version)},
            "spec": {"adminUrl": "http://main:8080"},
            "status": {"conditions": conditions},
        }

    ctx.connections.put(main(1, "False"))
    for name, ready in (("refused", "False"), ("begun", "Unknown"), ("fine", "True")):
        reason = "Progressing" if ready == "Unknown" else "Other"
        conditions = [{"type": "Ready", "status": ready, "reason": reason}]
        ctx.policies.put(policy(name) | {"status": {"conditions": conditions}})
    for _ in range(4):
        await asyncio.sleep(0)
    while not looks.begun.empty():
        looks.begun.get_nowait()
    ctx.connections.put(main(2, "True"))
    async with asyncio.timeout(60):
        assert await looks.begun.get() == "refused"
    assert looks.begun.empty()
