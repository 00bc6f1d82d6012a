"""Time of a Replay by a Job, from its creation to its end, with the operator and a pod's start.

The stand-in of the sandbox starts the pod as a process.
"""

from __future__ import annotations

import statistics
import time

import pytest

from tests.benchmarks.figures import Figure
from tests.support.replay_shop import Shop, shop

__all__ = ["shop"]

TRIALS, MESSAGES = 3, 1_000
CAUSE = "WarehouseDown"


@pytest.mark.parametrize(
    ("kind", "select", "at_most"),
    [
        ("without SQL", {"causes": [CAUSE]}, 5.0),
        ("with SQL", {"where": f"cause_type = '{CAUSE}'"}, 15.0),
    ],
)
def test_replay_by_a_job(
    shop: Shop, figures: list[Figure], kind: str, select: dict[str, object], at_most: float
) -> None:
    shop.declare()
    times = []
    for trial in range(TRIALS):
        shop.bury(MESSAGES, CAUSE)
        start = time.perf_counter()
        shop.replay(f"trial-{trial}", engine="Job", select=select)
        status = shop.reaches(f"trial-{trial}", "Completed")
        times.append(time.perf_counter() - start)
        assert status["run"]["counts"]["moved"] == MESSAGES
    quantity = f"{MESSAGES:,} messages {kind}, create to complete"
    figures.append(
        Figure("replay by a Job", quantity, statistics.median(times), "s", at_most=at_most)
    )
