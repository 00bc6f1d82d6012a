"""Many policies over many brokers that are Ready: what the operator takes while nothing happens."""

from __future__ import annotations

import asyncio
import time

import pytest

from redrive.provision.resync import FACTS_SECONDS
from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.in_process import (
    brokers,
    calls,
    cluster,
    operator,
    peak,
    settled,
)

BROKERS = 100
SHARE_OF_A_CORE = 25.0
MEGABYTES = 512


@pytest.mark.parametrize("policies", [1_000, 10_000])
async def test_what_does_not_change_takes_a_quarter_of_a_core_at_most(
    policies: int, figures: list[Figure]
) -> None:
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
