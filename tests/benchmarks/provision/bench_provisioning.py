"""Policies from their making until all are Ready, beside a script that makes the same calls."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tests.benchmarks.figures import Figure
from tests.benchmarks.provision import bare
from tests.benchmarks.provision.crowd import crowd
from tests.benchmarks.provision.operator import Operator
from tests.integration.provision.conftest import MakeShop

SIZES = (100, 300, 1_000)
TOLERANCE = 1.2
"""How much more time a policy may take among the most than among the fewest, beside the script."""
OVERHEAD = 3
"""How often the bare script may run in the time that the operator takes."""


async def test_policies_become_ready_in_a_time_that_grows_with_their_number_alone(
    make_shop: MakeShop, operator: Operator, figures: list[Figure]
) -> None:
    name = "provisioning"
    seconds = {count: await provision(make_shop, operator, count) for count in SIZES}
    scripts = {count: await script_alone(make_shop, count) for count in SIZES}
    most = SIZES[-1]
    ratio = seconds[most] / scripts[most]
    most_growth = TOLERANCE * max(1.0, growth(scripts))  # brokers have more to do among many, too
    figures += [Figure(name, f"{n} policies until all Ready", s, "s") for n, s in seconds.items()]
    figures += [Figure(name, f"bare script for {n}", s, "s") for n, s in scripts.items()]
    among = f"among {most:,} beside one among {SIZES[0]}"
    figures += [
        Figure(name, f"a policy {among}", growth(seconds), "times", at_most=most_growth),
        Figure(name, f"a policy of the bare script {among}", growth(scripts), "times"),
        Figure(name, f"{most:,} beside the bare script", ratio, "times", at_most=OVERHEAD),
        Figure(name, f"memory after {sum(SIZES):,}", operator.memory(), "MB", at_most=250),
    ]


def growth(seconds: Mapping[int, float]) -> float:
    """How many times as long one takes among the most as among the fewest."""
    least, most = min(seconds), max(seconds)
    return (seconds[most] / most) / (seconds[least] / least)


async def provision(make_shop: MakeShop, operator: Operator, count: int) -> float:
    """How many seconds *count* policies of a new shop take."""
    shop = make_shop()
    shop.connection()
    shop.ready("main", "brokerconnection")
    names = [f"orders-{number}" for number in range(count)]
    async with crowd(shop, operator.kubeconfig) as people:
        await people.make_sources(names)
        began = time.monotonic()
        await people.make(names)
        ended = await people.settled(count)
    return ended - began


async def script_alone(make_shop: MakeShop, count: int) -> float:
    """How many seconds the bare script takes for as many, in a new shop."""
    shop = make_shop()
    url, token = shop.broker.admin_url, shop.broker.token(shop.role)
    sources = [f"{shop.tenant}/prod/orders-{number}" for number in range(count)]
    await bare.run(bare.sources(sources), url, token)
    return await bare.run(bare.provisions(sources, "fulfilment"), url, token)
