"""The time until new policies are Ready, compared with a script that makes the same calls."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.crowd import (
    connect,
    crowd,
    provision_calls,
    run_script,
    source_calls,
)
from tests.benchmarks.provision.operator import Operator
from tests.integration.provision.conftest import MakeShop

SIZES = (100, 300, 1_000)
TOLERANCE = 1.2
"""The bound on the time per policy among the most, relative to the fewest and the script."""
OVERHEAD = 3
"""The bound on the operator's time, as a multiple of the script's."""


async def test_provisioning_time_grows_linearly_with_the_policies(
    make_shop: MakeShop, operator: Operator, figures: list[Figure]
) -> None:
    name = "provisioning"
    seconds = {count: await provision(make_shop, operator, count) for count in SIZES}
    scripts = {count: await script_alone(make_shop, count) for count in SIZES}
    most = SIZES[-1]
    ratio = seconds[most] / scripts[most]
    most_growth = TOLERANCE * max(1.0, growth(scripts))  # a broker is slower with many topics, too
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
    """Return the time per policy among the most, relative to the fewest."""
    least, most = min(seconds), max(seconds)
    return (seconds[most] / most) / (seconds[least] / least)


async def provision(make_shop: MakeShop, operator: Operator, count: int) -> float:
    """Return the seconds until *count* policies of a new shop are Ready."""
    shop = make_shop()
    await connect(shop, count)
    names = [f"orders-{number}" for number in range(count)]
    async with crowd(shop, operator.kubeconfig) as people:
        await people.make_sources(names)
        began = time.monotonic()
        await people.make(names)
        ended = await people.settled(count)
    return ended - began


async def script_alone(make_shop: MakeShop, count: int) -> float:
    """Return the seconds of the bare script for *count* policies in a new shop."""
    shop = make_shop()
    url, token = shop.broker.admin_url, shop.broker.token(shop.role)
    sources = [f"{shop.tenant}/prod/orders-{number}" for number in range(count)]
    await run_script(source_calls(sources), url, token)
    return await run_script(provision_calls(sources, "fulfilment"), url, token)
