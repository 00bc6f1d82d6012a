"""Costs of a message by a call, compared with those by the bare client."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.benchmarks.figures import Figure


class Cost(NamedTuple):
    """The seconds of a message, and those of the processor in all threads of the process."""

    wall: float
    processor: float


def cost_of(call: Callable[[int], object], messages: int) -> Cost:
    """Return the cost of a call with the number of a message, after one that is not measured.

    The first call waits for connections.
    """
    call(1)
    wall, processor = time.perf_counter(), time.process_time()
    for number in range(2, messages + 2):
        call(number)
    return Cost(
        (time.perf_counter() - wall) / messages, (time.process_time() - processor) / messages
    )


def compared(
    name: str,
    pairs: Sequence[tuple[Cost, Cost]],
    *,
    goal: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> list[Figure]:
    """Return the figures of pairs of the bare client and a call, with bounds of the call.

    The ratio is that of each pair, because the load of the machine changes between pairs.

    Args:
        name: the benchmark.
        pairs: the costs of both.
        goal: for the rate, named only.
        least: bound of the rate, relative to the bare client's.
        most: bound of the processor time, relative to the bare client's.
    """
    ratios = sorted(its.wall / ours.wall for its, ours in pairs)
    processor = statistics.median(ours.processor / its.processor for its, ours in pairs)
    bare = Cost(
        *(statistics.median(costs) for costs in zip(*(its for its, _ in pairs), strict=True))
    )
    ratio = "ratio" if goal is None else f"ratio, goal {goal:g}"
    return [
        Figure(name, "bare client", 1 / bare.wall, "messages/s"),
        Figure(name, ratio, statistics.median(ratios), "of bare", at_least=least),
        Figure(name, "lowest ratio", ratios[0], "of bare"),
        Figure(name, "highest ratio", ratios[-1], "of bare"),
        Figure(name, "processor time of bare", bare.processor * 1e6, "µs a message"),
        Figure(name, "processor time", processor, "of bare", at_most=most),
    ]
