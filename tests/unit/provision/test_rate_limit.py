from __future__ import annotations

import asyncio
import gc

import pytest

from redrive.provision.poller import RateLimit, RateLimits

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_turns_come_in_the_order_in_which_they_are_asked_for_and_so_far_apart() -> None:
    pace, loop = RateLimit(0.02), asyncio.get_running_loop()
    begun, had = loop.time(), list[tuple[str, float]]()

    async def take(who: str) -> None:
        await pace.turn()
        had.append((who, loop.time() - begun))

    await asyncio.gather(*(take(who) for who in "abc"))
    assert [who for who, _ in had] == ["a", "b", "c"]
    assert [at for _, at in had] == pytest.approx([0.0, 0.02, 0.04])


async def test_who_did_not_ask_for_long_has_no_turns_saved_up() -> None:
    pace, loop = RateLimit(0.02), asyncio.get_running_loop()
    await pace.turn()
    await asyncio.sleep(0.06)
    begun = loop.time()
    for _ in range(3):
        await pace.turn()
    assert loop.time() - begun == pytest.approx(2 * 0.02)


async def test_all_who_ask_one_broker_share_a_pace_for_as_long_as_one_holds_it() -> None:
    paces = RateLimits(60.0)
    held = paces.of("http://first")
    assert paces.of("http://first") is held
    assert paces.of("http://second") is not held
    await held.turn()
    del held
    gc.collect()
    async with asyncio.timeout(5):
        await paces.of("http://first").turn()
