"""The idle cost of the operator with many Ready policies at many brokers."""

from __future__ import annotations

import asyncio
import time

from redrive.provision.poller import FACTS_SECONDS
from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.in_process import (
    alone,
    brokers,
    calls,
    cluster,
    operator,
    peak,
    settled,
)

BROKERS = 100
FEW, MANY = 1_000, 10_000
SHARE_OF_A_CORE = 25.0
TOLERANCE = 1.5
"""The bound on the processor time per policy among many, relative to few."""
MEGABYTES = 512


def test_idle_operator_takes_at_most_a_quarter_of_a_core(
    figures: list[Figure],
) -> None:
    figures += alone(measured)


async def measured() -> list[Figure]:
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
