"""Ten thousand policies: provisioning and a restart at one broker, idle cost at one and at many.

The brokers are stand-ins: a real one takes more than an hour for their topics on a small machine.
`bench_provisioning` and `bench_standing` have a thousand at a real one.
"""

from __future__ import annotations

import asyncio
import time

from redrive.kube import resources
from redrive.provision.poller import FACTS_SECONDS
from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.in_process import (
    alone,
    brokers,
    calls,
    cluster,
    operator,
    peak,
    policy,
    settled,
)
from tests.support.fake_kubernetes import FakeKubernetes

BROKERS = 100
SHARE_OF_A_CORE = 25.0


def test_idle_operator_takes_at_most_a_quarter_of_a_core(
    figures: list[Figure],
) -> None:
    figures += alone(measured_idle)


async def measured_idle() -> list[Figure]:
    """Measure few policies, then many."""
    figures: list[Figure] = []
    few, many = await idle(FEW, figures), await idle(MANY, figures)
    among = f"a policy among {MANY:,} beside one among {FEW:,}"
    growth = (many / MANY) / (few / FEW)
    name = f"policies over {BROKERS} brokers, nothing happens"
    return [*figures, Figure(name, among, growth, "times", at_most=TOLERANCE)]


async def idle(policies: int, figures: list[Figure]) -> float:
    """Return the share of a core for this number of policies."""
    name = f"{policies:,} policies over {BROKERS} brokers, nothing happens"
    async with (
        brokers(BROKERS, policies // BROKERS) as urls,
        operator(cluster(urls, range(policies))) as ctx,
    ):
        figures.append(Figure(name, "until all Ready", await settled(ctx), "s"))
        await asyncio.sleep(FACTS_SECONDS)  # new policies are polled first
        made, used, began = calls(), time.process_time(), time.monotonic()
        await asyncio.sleep(2 * FACTS_SECONDS)
        seconds = time.monotonic() - began
        share = 100 * (time.process_time() - used) / seconds
        figures += [
            Figure(name, "the operator", share, "% of a core", at_most=SHARE_OF_A_CORE),
            Figure(name, "calls of an hour", 3_600 * (calls() - made) / seconds, "calls"),
            Figure(name, "memory at the most", peak(), "MB", at_most=MEGABYTES),
        ]
    return share


FEW, MANY, CONNECTIONS = 1_000, 10_000, 20
MEGABYTES = 512
TOLERANCE = 1.5
"""The bound on the time per policy among many, relative to few."""


def test_ten_thousand_policies_at_one_broker(figures: list[Figure]) -> None:
    figures += alone(measured)


async def measured() -> list[Figure]:
    """Measure few policies, then many."""
    few, _ = await provision(FEW, 2)  # as many connections as below
    shared, _ = await provision(FEW, CONNECTIONS)
    name = "provisioning in memory"
    figures = [
        Figure(name, f"{FEW:,} policies until all Ready", few, "s"),
        Figure(name, f"{FEW:,} over {CONNECTIONS} connections", shared, "s", at_most=few * 2),
    ]
    async with brokers(1, MANY + 1) as (url,):
        urls = [url, url]  # two connections, for one allows MANY policies at most
        kubernetes = cluster(urls, range(MANY))
        async with operator(kubernetes) as ctx:
            many = await settled(ctx)
            growth = (many / MANY) / (few / FEW)
            among = f"a policy among {MANY:,} beside one among {FEW:,}"
            figures += [
                Figure(name, f"{MANY:,} policies until all Ready", many, "s"),
                Figure(name, among, growth, "times", at_most=TOLERANCE),
                *await quiet(),
                Figure(name, "memory at the most", peak(), "MB", at_most=MEGABYTES),
            ]
        return [*figures, *await restart(kubernetes, urls)]


async def provision(policies: int, connections: int) -> tuple[float, float]:
    """Return the seconds and the calls for this number of policies at one broker."""
    async with brokers(1, policies) as (url,):
        before = calls()
        async with operator(cluster([url] * connections, range(policies))) as ctx:
            return await settled(ctx), calls() - before


async def quiet() -> list[Figure]:
    """Measure the idle operator."""
    await asyncio.sleep(FACTS_SECONDS)  # new policies are polled first
    made, used, began = calls(), time.process_time(), time.monotonic()
    await asyncio.sleep(2 * FACTS_SECONDS)
    seconds = time.monotonic() - began
    share = 100 * (time.process_time() - used) / seconds
    name = f"{MANY:,} policies at one broker, nothing happens"
    return [
        Figure(name, "the operator", share, "% of a core", at_most=25),
        Figure(name, "calls of an hour", 3_600 * (calls() - made) / seconds, "calls"),
    ]


async def restart(kubernetes: FakeKubernetes, urls: list[str]) -> list[Figure]:
    """Start another operator with the existing policies and a new one."""
    written = calls(only_writes=True)
    async with operator(kubernetes):
        await asyncio.sleep(FACTS_SECONDS)
        written = calls(only_writes=True) - written
    kubernetes.add(resources.POLICIES, policy(MANY, urls))
    async with operator(kubernetes) as ctx:
        seconds = await settled(ctx)
    name = f"restart over {MANY:,} policies"
    return [
        Figure(name, "until a policy made meanwhile is Ready", seconds, "s", at_most=30),
        Figure(name, "writes to the broker", written, "calls", at_most=0),
    ]
