"""Handlers of policies and connections, the start of an operator, and the path of one reconcile.

`pytest -s -k enters_few_files tests/unit/provision/test_handlers.py` prints the length of the path.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

import redrive
from redrive.api import Body
from redrive.api.conditions import reason
from redrive.errors import Requeue
from redrive.kube.cache import Cache
from redrive.kube.connections import Connections, NamespaceLabels
from redrive.kube.context import Context, Settings, wall_clock
from redrive.kube.controller import OF_NAMESPACE
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import POLICIES, Key
from redrive.provision import connection as connections
from redrive.provision import handlers
from redrive.provision.reconciler import PolicyReconciler
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.operator_in_process import reconcile_harness
from tests.unit.provision.conftest import MakeBody

NOTHING = cast("Any", None)
SLOW, OTHER = {"name": "slow"}, {"name": "other"}
TIMES_AT_ONCE = range(OF_NAMESPACE + 10)


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
    monkeypatch.setattr(PolicyReconciler, "mark_progressing", _mark_progressing)
    monkeypatch.setattr(PolicyReconciler, "reconcile", made)
    monkeypatch.setattr(connections, "reconcile", made)
    return made


@pytest.fixture
async def ctx(looks: Looks) -> AsyncIterator[Context]:  # noqa: ARG001 - looks in place of real ones
    """A context with handlers registered, and `looks` in place of reconciles."""
    tables = {
        name: Cache()
        for name in ("connections", "policies", "replays", "inspections", "config_maps")
    }
    made = Context(
        settings=NOTHING,
        kubernetes=NOTHING,
        brokers=Connections(tables["connections"], NOTHING, NOTHING, wall_clock, NOTHING),
        namespaces=NamespaceLabels(NOTHING),
        job_templates=JobTemplates(None),
        clock=wall_clock,
        missing=(),
        began=wall_clock(),
        applications={},
        **tables,
    )
    working = handlers.start(made)
    yield made
    for controller in working:
        await controller.stop()


async def test_policies_of_hanging_broker_do_not_delay_others(
    ctx: Context, looks: Looks, policy: MakeBody
) -> None:
    for number in TIMES_AT_ONCE:
        ctx.policies.put(policy(f"slow-{number}", connectionRef=SLOW))
    await looks.reach(f"slow-{OF_NAMESPACE - 1}")
    ctx.policies.put(policy("orders", connectionRef=OTHER))
    await looks.reach("orders")


async def test_connections_of_hanging_brokers_do_not_delay_others(
    ctx: Context, looks: Looks
) -> None:
    for name in (*(f"slow-{number}" for number in TIMES_AT_ONCE), "main"):
        metadata = {"namespace": "shop", "name": name, "uid": name, "resourceVersion": "1"}
        spec = {"pulsar": {"adminURL": f"http://{name}:8080"}}
        ctx.connections.put({"metadata": metadata, "spec": spec})
    await looks.reach("main")


async def test_broker_upgrade_enqueues_its_policies(
    ctx: Context, looks: Looks, policy: MakeBody
) -> None:
    def main(version: int, release: str) -> dict[str, Any]:
        metadata = {"namespace": "shop", "name": "main", "uid": "m", "generation": 1}
        return {
            "metadata": metadata | {"resourceVersion": str(version)},
            "spec": {"pulsar": {"adminURL": "http://main:8080"}},
            "status": {"brokerVersion": release},
        }

    ctx.policies.put(policy("orders"))
    ctx.connections.put(main(1, "4.0.8"))
    for _ in range(20):
        await asyncio.sleep(0)
    while not looks.begun.empty():
        looks.begun.get_nowait()
    ctx.connections.put(main(2, "4.0.8"))
    ctx.connections.put(main(3, "4.2.4"))
    async with asyncio.timeout(60):
        assert await looks.begun.get() == "orders"
    assert looks.begun.empty()


async def test_ready_connection_enqueues_policies_that_failed(
    ctx: Context, looks: Looks, policy: MakeBody
) -> None:
    def main(version: int, ready: str) -> dict[str, Any]:
        metadata = {"namespace": "shop", "name": "main", "uid": "m", "generation": 1}
        conditions = [{"type": "Ready", "status": ready, "reason": "x"}]
        return {
            "metadata": metadata | {"resourceVersion": str(version)},
            "spec": {"pulsar": {"adminURL": "http://main:8080"}},
            "status": {"conditions": conditions},
        }

    ctx.connections.put(main(1, "False"))
    for name, ready in (("refused", "False"), ("begun", "Unknown"), ("fine", "True")):
        reason = "Progressing" if ready == "Unknown" else "Other"
        conditions = [{"type": "Ready", "status": ready, "reason": reason}]
        ctx.policies.put(policy(name) | {"status": {"conditions": conditions}})
    for _ in range(20):
        await asyncio.sleep(0)
    while not looks.begun.empty():
        looks.begun.get_nowait()
    ctx.connections.put(main(2, "True"))
    async with asyncio.timeout(60):
        assert await looks.begun.get() == "refused"
    assert looks.begun.empty()


NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECONDS = 60


@asynccontextmanager
async def started(*policies: Body) -> AsyncIterator[FakeKubernetes]:
    """An operator that finds *policies* at its start, and no connection."""
    kubernetes, connections = FakeKubernetes(), Cache()
    kubernetes.add(POLICIES, *policies)
    ctx = Context(
        settings=Settings("here", (), None, "", ""),
        kubernetes=kubernetes,
        connections=connections,
        policies=Cache(policies),
        replays=Cache(),
        inspections=Cache(),
        applications={},
        config_maps=Cache(),
        brokers=Connections(connections, NOTHING, NOTHING, lambda: NOW, NOTHING),
        namespaces=NamespaceLabels(kubernetes),
        job_templates=JobTemplates(None),
        clock=lambda: NOW,
        missing=(),
        began=NOW,
    )
    begun = handlers.start(ctx)
    try:
        async with asyncio.timeout(SECONDS):
            yield kubernetes
    finally:
        for controller in begun:
            await controller.stop()


def ready(body: dict[str, Any], since: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    """A policy that was ready when the operator went."""
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Provisioned",
        "message": "",
        "lastTransitionTime": since,
    }
    generation = body["metadata"]["generation"]
    return body | {"status": {"observedGeneration": generation, "conditions": [condition]}}


async def test_policy_without_connection_at_start_is_not_ready(
    policy: MakeBody,
) -> None:
    async with started(ready(policy())) as kubernetes:
        assert reason((await kubernetes.written()).body) == "ConnectionNotFound"


@pytest.mark.parametrize("since", ["0000-01-01T00:00:00Z", "2026-01-01T00:00:00+99:00"])
async def test_unreadable_status_at_start_is_written_again(policy: MakeBody, since: str) -> None:
    spoilt = ready(policy("spoilt"), since)
    async with started(spoilt, policy("new")) as kubernetes:
        reasons = dict[str, str]()
        while reasons != {"spoilt": "ConnectionNotFound", "new": "ConnectionNotFound"}:
            body = (await kubernetes.written()).body
            reasons[Key.of(body).name] = reason(body)
        times = {
            condition["lastTransitionTime"]
            for body in kubernetes.objects[POLICIES].values()
            for condition in body["status"]["conditions"]
        }
    assert times == {"2026-01-01T00:00:00Z"}


PACKAGE = f"{Path(redrive.__path__[0])}/"
BOUNDS = {"files": 37, "functions": 150, "pairs of files": 97}
"""The last measurement. A change that lowers a figure lowers its bound."""


async def test_new_policy_enters_few_files(connection: Body, policy: MakeBody) -> None:
    """The first reconcile of a policy enters few files and few functions of other files.

    Lambdas and comprehensions belong to the function around them.
    """
    files: set[str] = set()
    functions: set[tuple[str, str]] = set()
    pairs: set[tuple[str, str]] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        files.add(file)
        caller = "" if frame.f_back is None else frame.f_back.f_code.co_filename
        if caller.startswith(PACKAGE) and caller != file:
            functions.add((file, f"{code.co_qualname}:{code.co_firstlineno}"))
            pairs.add((caller, file))

    harness = reconcile_harness(connection, policy(), FakeKubernetes())
    sys.setprofile(record)
    try:
        await harness.reconcile()
    finally:
        sys.setprofile(None)
    assert len(harness.topics) > 1, "the policy was not provisioned"
    counts = {"files": len(files), "functions": len(functions), "pairs of files": len(pairs)}
    print(counts)  # noqa: T201
    assert {name: count for name, count in counts.items() if count > BOUNDS[name]} == {}
