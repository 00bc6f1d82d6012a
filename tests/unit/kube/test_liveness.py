from __future__ import annotations

import asyncio

from redrive.kube.observability import EVENT_LOOP, STALL_SECONDS, Liveness


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_gives_signs_of_life_lives() -> None:
    clock = Clock()
    health = Liveness(clock)
    for _ in range(5):
        health.beat("watch")
        clock.now += STALL_SECONDS
        assert not health.has_stalled()


def test_what_gives_none_for_a_minute_has_stalled_and_may_come_back() -> None:
    clock = Clock()
    health = Liveness(clock)
    health.beat("watch of a")
    health.beat("watch of b")
    clock.now += STALL_SECONDS
    health.beat("watch of b")
    clock.now += 1
    assert health.silent_for() == {"watch of a": 61, "watch of b": 1}
    assert health.has_stalled()
    health.beat("watch of a")
    assert not health.has_stalled()


async def test_the_event_loop_gives_signs_of_life_while_it_turns() -> None:
    clock = Clock()
    health = Liveness(clock)
    async with health.beating():
        await asyncio.sleep(0)
    clock.now += STALL_SECONDS + 1
    assert health.silent_for() == {EVENT_LOOP: 61}
    assert health.has_stalled()
