"""Many policies over many brokers that are Ready: what the operator takes while nothing happens."""

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
"""How much more of a core a policy may take among many than among few."""
MEGABYTES = 512


def test_what_does_not_change_takes_a_quarter_of_a_core_at_most_and_grows_by_the_policy(
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
    """Measure what so many policies take; return the share of a core."""
    name = f"{policies:,} policies over {BROKERS} brokers, nothing happens"
    async with (
        brokers(BROKERS, policies // BROKERS) as urls,
        operator(cluster(urls, range(policies))) as ctx,
    ):
        figures.append(Figure(name, "until all Ready", await settled(ctx), "s"))
        await asyncio.sleep(FACTS_SECONDS)  # what was provisioned is looked at first
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
