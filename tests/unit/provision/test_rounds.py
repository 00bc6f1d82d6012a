from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from redrive.cluster.table import Table
from redrive.provision import rounds
from redrive.provision.rounds import Rounds, pause

MakeBody = Callable[..., dict[str, Any]]


async def test_every_policy_is_woken_in_turn_those_that_come_and_go_too(
    policy: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 0.002)
    monkeypatch.setattr(rounds, "CALLS_PER_LOOK", 0)
    table = Table()
    woken: asyncio.Queue[str] = asyncio.Queue()
    walk = Rounds(table, lambda key: woken.put_nowait(key.name))

    async def seen(*names: str) -> None:
        latest: deque[str] = deque(maxlen=len(names))
        async with asyncio.timeout(5):
            while [*latest] != [*names]:
                latest.append(await woken.get())

    for name in "abc":
        table.put(policy(name))
    await seen("a", "b", "c", "a", "b", "c")
    table.drop(policy("b"))
    await seen("a", "c", "a", "c")
    await walk.stop()


@pytest.mark.parametrize("policies", [1, 10, 100, 1_000])
def test_a_round_costs_at_most_twenty_calls_a_second_and_less_than_fifteen_minutes(
    policies: int,
) -> None:
    assert rounds.CALLS_PER_LOOK / pause(policies) <= 20
    assert 30 <= policies * pause(policies) <= 15 * 60
