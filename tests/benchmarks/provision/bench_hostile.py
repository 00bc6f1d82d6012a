"""Thousands of hostile objects of one namespace, and a new policy of another one.

Half of the objects are colliding policies. A fifth of those have their own connection each, to an
address where no broker answers. The other objects refer to a policy that is ready: suspended
Replays with the longest condition, pending and ended ones, and Inspections.
API server and broker are stand-ins, so the figures are those of the operator alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from redrive.api import Body
from redrive.api.conditions import is_settled
from redrive.inspection import controller as inspection
from redrive.kube import resources
from redrive.kube.context import Context
from redrive.kube.resources import Key
from redrive.replay.controller import handlers as replay
from redrive.replay.controller.admission import ENDED_AT
from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.in_process import alone, brokers, cluster, operator, policy
from tests.support.fake_kubernetes import FakeKubernetes

HOSTILE = 10_000
NEW = 5
DELAY_SECONDS = 2.0
CHUNK = 50
CLOSED = "http://127.0.0.1:1"
JOBS = ("replay", "inspection")
CONDITION = " OR ".join(f"cause_type = 'E{number:03}'" for number in range(160))
"""About 4 KB."""


def test_hostile_namespace_delays_no_other(figures: list[Figure]) -> None:
    figures += alone(measured)


async def measured() -> list[Figure]:
    """Measure the slowest of some new policies, alone and beside hostile objects."""
    return await delays(HOSTILE)


async def delays(hostile: int) -> list[Figure]:
    """Measure beside this number of hostile objects."""
    async with brokers(1, 2 * NEW + 2) as urls:
        kubernetes = cluster(urls, ())
        _admit_hostile(kubernetes)
        async with operator(kubernetes) as ctx:
            settings = replace(ctx.settings, replay_template=Key("redrive", "replay"))
            runs_replays = replace(ctx, settings=settings)
            (replays,) = replay.start(runs_replays)
            (inspections,) = inspection.start(runs_replays)
            quiet = max([await _provisioned(n, urls, kubernetes, ctx) for n in range(NEW)])
            began = time.monotonic()
            await _fill(hostile, kubernetes, ctx)
            beside = [await _provisioned(n, urls, kubernetes, ctx) for n in range(NEW, 2 * NEW)]
            duration = time.monotonic() - began
            await replays.stop()
            await inspections.stop()
    name = f"{hostile:,} hostile objects of one namespace"
    delay = max(beside) - quiet
    return [
        Figure(name, "slowest new policy of another one, without them", quiet, "s"),
        Figure(name, "delay of the slowest beside them", delay, "s", at_most=DELAY_SECONDS),
        Figure(name, f"{NEW} new policies and the hostile objects", duration, "s"),
    ]


def _admit_hostile(kubernetes: FakeKubernetes) -> None:
    """Add a connection of the hostile namespace, to the same broker."""
    for kind in (resources.CONNECTIONS, resources.SECRETS):
        for body in list(kubernetes.objects[kind].values()):
            hostile = _hostile(body, body["metadata"]["name"])
            if kind is resources.CONNECTIONS:
                token = body["spec"]["pulsar"]["authentication"]
                roles = {name: {"role": name, "authentication": token} for name in JOBS}
                hostile["spec"] = body["spec"] | roles
            kubernetes.add(kind, hostile)


async def _provisioned(
    number: int, urls: list[str], kubernetes: FakeKubernetes, ctx: Context
) -> float:
    """Create a policy; return the seconds until it is settled."""
    body = policy(number, urls)
    settled = asyncio.Event()

    @ctx.policies.listen
    def changed(key: Key, _: Body | None, after: Body | None) -> None:
        if key == Key.of(body) and after is not None and is_settled(after):
            settled.set()

    began = time.monotonic()
    await kubernetes.create(resources.POLICIES, body)
    await settled.wait()
    return time.monotonic() - began


async def _fill(count: int, kubernetes: FakeKubernetes, ctx: Context) -> None:
    """Add hostile objects, as a watch shows them."""
    connection = kubernetes.objects[resources.CONNECTIONS][Key("hostile", "to-0")]
    for number, (kind, body) in enumerate(_objects(count, connection)):
        kubernetes.add(kind, body)
        ctx.caches[kind].put(body)
        if number % CHUNK == 0:
            await asyncio.sleep(0)


def _objects(count: int, connection: Body) -> Iterator[tuple[resources.Resource, Body]]:
    colliding = policy(2 * NEW, ["-"])  # with a source topic of their own
    yield resources.POLICIES, _hostile(policy(2 * NEW + 1, ["-"]), "ready")
    for number in range(count // 2):
        name, body = f"p{number:05}", colliding
        if number % 5 == 0:
            pulsar = connection["spec"]["pulsar"] | {"adminURL": CLOSED}
            closed = connection["spec"] | {"pulsar": pulsar}
            yield resources.CONNECTIONS, _hostile({**connection, "spec": closed}, name)
            body = {**body, "spec": body["spec"] | {"connectionRef": {"name": name}}}
        yield resources.POLICIES, _hostile(body, name)
        yield _run(number)


def _run(number: int) -> tuple[resources.Resource, Body]:
    """Return a suspended, pending or ended Replay, or an Inspection, in turn."""
    body = _hostile(policy(0, ["-"]), f"r{number:05}")
    spec: dict[str, Any] = {"policyRef": {"name": "ready"}}
    kind = resources.INSPECTIONS if number % 4 == 3 else resources.REPLAYS
    if number % 4 == 0:
        spec |= {"suspend": True, "select": {"where": CONDITION}}
    if number % 4 == 2:
        body["metadata"]["annotations"] = {ENDED_AT: "2026-01-01T00:00:00Z"}
    return kind, {**body, "kind": kind.kind, "spec": spec}


def _hostile(body: Body, name: str) -> dict[str, Any]:
    metadata = body["metadata"] | {"namespace": "hostile", "name": name, "uid": f"hostile-{name}"}
    return {**body, "metadata": metadata}
