"""Polling in virtual time: calls of an idle operator by kind, and the delay until a repair."""

from __future__ import annotations

import asyncio
import copy
import os
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from redrive.provision.poller import FACTS_SECONDS
from tests.benchmarks.figures import Figure
from tests.benchmarks.provision.in_process import (
    VirtualHttp,
    alone,
    idle_operator,
    namespace,
    settled,
)
from tests.support.fake_admin import Topic

SAMPLE = 100
"""Policies that drift in each way."""
IDLE_SECONDS = 900
WATCHED_SECONDS = 900
"""Each of 1,000 policies of a broker is polled within it, and a tenth of 10,000."""
CASES = ((10_000, 100), (10_000, 1), (1_000, 100), (1_000, 1))
"""Numbers of policies and of brokers, the longest first."""

Grants = dict[str, list[str]]
"""The actions of each role on one topic."""
Harm = Callable[[Topic, Grants], None]


def _lose_grants(_: Topic, grants: Grants) -> None:
    grants.clear()


def _lose_subscription(topic: Topic, _: Grants) -> None:
    topic.parts[""].clear()


def _lose_policy(topic: Topic, _: Grants) -> None:
    topic.policies["messageTTL"] = 1


LOSSES: Mapping[str, Harm] = {
    "grant": _lose_grants,
    "subscription": _lose_subscription,
    "topic policy": _lose_policy,
}


def test_idle_calls_and_delay_of_repairs(figures: list[Figure]) -> None:
    """No figure is a time of this machine, so the cases run beside each other."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for of_case in threads.map(lambda case: alone(partial(measured, *case)), CASES):
            figures += of_case


async def measured(policies: int, brokers: int) -> list[Figure]:
    """Count the calls of an idle operator, then have topics drift."""
    name = f"{policies:,} policies over {brokers} brokers, in virtual time"
    async with idle_operator(brokers, policies) as (ctx, http):
        await settled(ctx)
        await asyncio.sleep(2 * FACTS_SECONDS)  # new policies are polled first
        before = http.calls.copy()
        await asyncio.sleep(IDLE_SECONDS)
        calls = http.calls - before
        hourly = 3_600 / IDLE_SECONDS
        figures = [
            Figure(name, f"calls of an hour: {kind}", count * hourly, "calls")
            for kind, count in sorted(calls.items())
        ]
        figures.append(Figure(name, "calls of an hour", calls.total() * hourly, "calls"))
        for loss, delays in (await _repaired(http, policies)).items():
            seconds = [delay for delay in delays if delay is not None]
            share = 100 * len(seconds) / len(delays)
            figures += [
                Figure(name, f"lost {loss}, repaired within {WATCHED_SECONDS} s", share, "%"),
                Figure(name, f"lost {loss}, mean delay of these", statistics.mean(seconds), "s"),
                Figure(name, f"lost {loss}, longest delay of these", max(seconds), "s"),
            ]
    return figures


async def _repaired(http: VirtualHttp, policies: int) -> dict[str, list[float | None]]:
    """Harm retry topics; return the seconds until each is repaired, by the kind of loss.

    None stands for one that is not repaired within `WATCHED_SECONDS`. A round of 10,000 policies of
    a broker takes two and a half hours, of which each minute compares them all with their facts.
    """
    harmed = {
        (loss, policy): _harm(http, policy, harm)
        for number, (loss, harm) in enumerate(LOSSES.items())
        for policy in range(number, policies, policies // SAMPLE + 1)
    }
    delays: dict[tuple[str, int], float | None] = dict.fromkeys(harmed)
    for second in range(WATCHED_SECONDS):
        await asyncio.sleep(1)
        for at in [at for at, is_whole in harmed.items() if is_whole()]:
            del harmed[at]
            delays[at] = second + 1.0
    return {loss: [delay for at, delay in delays.items() if at[0] == loss] for loss in LOSSES}


def _harm(http: VirtualHttp, policy: int, harm: Harm) -> Callable[[], bool]:
    """Harm the retry topic of a policy; return a function that tells if it is repaired."""
    urls = list(http.brokers)
    own = policy // len(urls)
    within = http.brokers[urls[policy % len(urls)]].namespaces[namespace(own)]
    local = f"orders-{own}-fulfilment-RETRY"
    topic, grants = within.topics[local], within.grants[f"persistent://{namespace(own)}/{local}"]
    state = (topic.parts, topic.policies, grants)
    before = copy.deepcopy(state)
    harm(topic, grants)
    return lambda: state == before
