from __future__ import annotations

import asyncio

import pytest

from redrive.admin.fair_slots import FairSlots

pytestmark = pytest.mark.usefixtures("virtual_time")


async def order(slots: FairSlots, *namespaces: str) -> str:
    """Return the order in which tasks of these namespaces got the slots, each for a second."""
    served: list[str] = []

    async def work(namespace: str) -> None:
        async with slots.slot(namespace):
            served.append(namespace)
            await asyncio.sleep(1)

    await asyncio.gather(*map(work, namespaces))
    return "".join(served)


async def test_namespaces_are_served_round_robin() -> None:
    assert await order(FairSlots(1), *"aaaabbc") == "aabcaba"


async def test_namespace_leaves_a_slot_to_others() -> None:
    slots = FairSlots(3, of_namespace=2)
    assert await order(slots, *"aaaab") == "aabaa"
    assert await order(slots, *"aaaab") == "aabaa"


async def test_cancelled_task_gives_its_place_and_slot_back() -> None:
    slots = FairSlots(1)
    await slots.acquire("a")
    waiting = [asyncio.create_task(slots.acquire(name)) for name in "abc"]
    await asyncio.sleep(0)
    waiting[1].cancel()
    slots.release("a")
    waiting[0].cancel()  # granted in the same moment
    await asyncio.wait(waiting, timeout=1)
    assert [task.cancelled() for task in waiting] == [True, True, False]
    slots.release("c")
    async with asyncio.timeout(1), slots.slot("d"):
        pass
