"""Calls that share slots, batches or answers, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from redrive.admin.errors import AdminError, AdminNotFoundError, BrokerUnreachableError
from redrive.admin.fair_slots import FairSlots
from redrive.admin.granting import Batcher, CachedRead

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


class Calls:
    """Answers requests with the number of the call, once the test lets it."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.open = asyncio.Event()
        self.begun = asyncio.Event()

    async def __call__(self, requests: Sequence[int]) -> int:
        """Note the requests, then wait."""
        self.requests.append(list(requests))
        self.begun.set()
        await self.open.wait()
        return len(self.requests)


async def test_requests_during_a_call_form_the_next_batch() -> None:
    calls = Calls()
    batcher: Batcher[int, int] = Batcher(calls)
    first = asyncio.create_task(batcher.submit(0))
    await calls.begun.wait()
    others = [asyncio.create_task(batcher.submit(number)) for number in (1, 2, 3)]
    await asyncio.sleep(0)
    assert calls.requests == [[0]]

    calls.open.set()
    assert await first == 1
    assert await asyncio.gather(*others) == [2, 2, 2]
    assert calls.requests == [[0], [1, 2, 3]]


async def test_failed_call_fails_only_its_own_requests() -> None:
    outcomes = iter([ValueError("no"), None])

    async def call(_: Sequence[int]) -> str:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return "yes"

    batcher: Batcher[int, str] = Batcher(call)
    failed = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
    assert [str(error) for error in failed] == ["no", "no"]
    assert await batcher.submit(3) == "yes"


async def test_call_waits_for_announced_requests() -> None:
    calls = Calls()
    calls.open.set()
    batcher: Batcher[int, int] = Batcher(calls, max_gap=10)

    async def work(number: int) -> int | None:
        with batcher.announced() as ask:
            await asyncio.sleep(number * 0.01)
            return None if number == 4 else await ask(number)  # number 4 has nothing to ask

    assert await asyncio.gather(*map(work, range(6))) == [1, 1, 1, 1, None, 1]
    assert calls.requests == [[0, 1, 2, 3, 5]]


async def test_single_request_does_not_wait() -> None:
    calls = Calls()
    calls.open.set()
    batcher: Batcher[int, int] = Batcher(calls, max_gap=10)
    begun = asyncio.get_running_loop().time()
    with batcher.announced() as ask:
        assert await ask(1) == 1
        assert await batcher.submit(2) == 2
    assert asyncio.get_running_loop().time() == begun


async def test_call_waits_at_most_the_gap() -> None:
    calls = Calls()
    calls.open.set()
    batcher: Batcher[int, int] = Batcher(calls, max_gap=0.01)
    with batcher.announced(), batcher.announced() as ask:
        assert await ask(1) == 1


async def test_gap_restarts_with_each_request() -> None:
    calls = Calls()
    calls.open.set()
    batcher: Batcher[int, int] = Batcher(calls, max_gap=0.2)

    async def work(number: int) -> int:
        with batcher.announced() as ask:
            await asyncio.sleep(number * 0.1)
            return await ask(number)

    async with asyncio.timeout(5):
        assert await asyncio.gather(*map(work, range(6))) == [1] * 6


async def test_later_announcements_do_not_delay_a_call() -> None:
    calls = Calls()
    calls.open.set()
    batcher: Batcher[int, int] = Batcher(calls, max_gap=0.1)

    async def come_and_go() -> None:
        while True:
            with batcher.announced():
                await asyncio.sleep(0.01)

    with batcher.announced(), batcher.announced() as ask:  # the first asks nothing
        request = asyncio.ensure_future(ask(1))
        await asyncio.sleep(0)
        others = [asyncio.create_task(come_and_go()) for _ in range(3)]
        async with asyncio.timeout(2):
            assert await request == 1
    for other in others:
        other.cancel()


async def test_cancelled_request_does_not_affect_others() -> None:
    calls = Calls()
    batcher: Batcher[int, int] = Batcher(calls)
    hasty, patient = asyncio.create_task(batcher.submit(1)), asyncio.create_task(batcher.submit(2))
    await calls.begun.wait()
    hasty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hasty
    calls.open.set()
    assert await patient == 1
    assert calls.requests == [[1, 2]]


class Reads:
    """Fails as set, and counts."""

    def __init__(self) -> None:
        self.made = 0
        self.fails: AdminError | None = None

    async def __call__(self) -> int:
        """Return how many reads there were."""
        self.made += 1
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return self.made


async def test_concurrent_reads_share_one_call() -> None:
    reads = Reads()
    cached = CachedRead(reads)
    assert await asyncio.gather(*(cached.get(max_age=0) for _ in range(100))) == [1] * 100


async def test_cached_read_is_repeated_only_beyond_its_age() -> None:
    cached = CachedRead(Reads())
    assert [await cached.get(max_age=age) for age in (60, 60, 0, 60)] == [1, 1, 2, 2]


async def test_missing_object_is_cached_as_long() -> None:
    reads = Reads()
    cached = CachedRead(reads)
    reads.fails = AdminNotFoundError("no such thing", remedy="make it")
    for _ in range(3):
        with pytest.raises(AdminNotFoundError):
            await cached.get(max_age=60)
    reads.fails = None
    with pytest.raises(AdminNotFoundError):
        await cached.get(max_age=60)
    assert await cached.get(max_age=0) == 2


async def test_failed_read_is_repeated_and_keeps_the_last_value() -> None:
    reads = Reads()
    cached = CachedRead(reads)
    reads.fails = BrokerUnreachableError("no broker", remedy="start it")
    for age in (60, 60):
        with pytest.raises(BrokerUnreachableError):
            await cached.get(max_age=age)
    reads.fails = None
    assert await cached.get(max_age=60) == 3
    reads.fails = BrokerUnreachableError("no broker", remedy="start it")
    with pytest.raises(BrokerUnreachableError):
        await cached.get(max_age=0)
    assert await cached.get(max_age=60) == 3
