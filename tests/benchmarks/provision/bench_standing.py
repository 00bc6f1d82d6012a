"""A thousand Ready policies: the cost of polling, of a restart, and of changes."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

from redrive.provision.poller import FACTS_SECONDS
from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.crowd import Crowd, connect, crowd
from tests.benchmarks.provision.operator import Call, Operator, Proxy, counting
from tests.integration.provision.conftest import MakeShop

POLICIES = 1_000
CHANGES_PER_SECOND = 4.0
SAMPLE_SECONDS = 5.0
WARM_UP = 1 / 2
"""The share of a churn after which memory must not grow."""


async def test_a_thousand_ready_policies_cost_little(
    make_shop: MakeShop, operator: Operator, figures: list[Figure], minutes: float
) -> None:
    shop = make_shop()
    names = [f"orders-{number}" for number in range(POLICIES)]
    async with counting(shop.broker.admin_url) as proxy, crowd(shop, operator.kubeconfig) as people:
        await connect(shop, POLICIES + 1, proxy.url)
        await people.make_sources(names)
        await people.make(names)
        await people.settled(POLICIES)
        figures += await idle(proxy, f"{shop.tenant}/prod")
        figures += await churning(operator, people, names, minutes)
        figures += await restarting(proxy, operator, people)


async def idle(proxy: Proxy, namespace: str) -> list[Figure]:
    """Count the calls of the idle operator."""
    began = time.monotonic()
    await asyncio.sleep(FACTS_SECONDS + 5)
    calls = proxy.since(began)
    name = f"{POLICIES:,} policies, nothing happens"
    of_namespace = [call for call in calls if is_of_namespace(call, namespace)]
    statistics_of = [call for call in calls if "tats" in call.path.rsplit("/", 1)[-1]]
    rest = len(calls) - len(of_namespace) - len(statistics_of)
    seconds = time.monotonic() - began
    return [
        Figure(name, "a survey of topics and grants", len(of_namespace), "calls", at_most=20),
        Figure(name, "the rotation", rest / seconds, "calls/s", at_most=20),
        Figure(name, "statistics of topics", len(statistics_of) / seconds, "calls/s", at_most=10.2),
        Figure(name, "writes to the broker", writes(calls), "calls", at_most=0),
    ]


async def restarting(proxy: Proxy, operator: Operator, people: Crowd) -> list[Figure]:
    """Restart the operator with a new policy, and wait until that policy is Ready."""
    newcomer = "newcomer"
    await people.make_sources([newcomer])
    await people.settled(POLICIES)
    await asyncio.to_thread(operator.stop)
    began = time.monotonic()
    await asyncio.to_thread(operator.start)
    await asyncio.sleep(15)
    written = writes(proxy.since(began))
    await asyncio.to_thread(operator.stop)
    await people.make([newcomer])
    began = time.monotonic()
    await asyncio.to_thread(operator.start)
    ended = await people.settled(POLICIES + 1)
    name = f"restart over {POLICIES:,} policies"
    return [
        Figure(name, "until a policy made meanwhile is Ready", ended - began, "s", at_most=30),
        Figure(name, "writes to the broker", written, "calls", at_most=0),
        Figure(name, "memory", await asyncio.to_thread(operator.memory), "MB", at_most=250),
    ]


async def churning(
    operator: Operator, people: Crowd, names: list[str], minutes: float
) -> list[Figure]:
    """Change, delete and create policies continuously, and measure the memory."""
    began = time.monotonic()
    samples: list[tuple[float, float]] = []
    turn = itertools.cycle(names)
    changes = 0
    while (passed := time.monotonic() - began) < minutes * 60:
        if passed >= len(samples) * SAMPLE_SECONDS:
            samples.append((passed / 60, await asyncio.to_thread(operator.memory)))
        await change(people, next(turn), changes)
        changes += 1
        await asyncio.sleep(max(0.0, changes / CHANGES_PER_SECOND - (time.monotonic() - began)))
    warm = [sample for sample in samples if sample[0] >= minutes * WARM_UP]
    growth = statistics.linear_regression(*zip(*warm, strict=True)).slope
    name = f"churn of {minutes:g} minutes"
    return [
        Figure(name, "changes", changes, "policies"),
        Figure(name, "memory at the most", max(m for _, m in samples), "MB", at_most=250),
        Figure(name, "growth of memory", growth, "MB/min", at_most=1),
    ]


async def change(people: Crowd, name: str, number: int) -> None:
    """Make one change: mostly of a spec, sometimes a deletion and a new policy."""
    if number % 4:
        await people.change(name, {"maxRetries": number % 1_000})
    else:
        await people.remake(name)


def is_of_namespace(call: Call, namespace: str) -> bool:
    """Return True if a call reads all topics of *namespace* at once."""
    whole = (f"namespaces/{namespace}", f"persistent/{namespace}")
    path = call.path.removeprefix("/admin/v2/").removesuffix("/partitioned")
    return path in whole


def writes(calls: list[Call]) -> int:
    """Return the number of *calls* that write."""
    return sum(call.writes for call in calls)
