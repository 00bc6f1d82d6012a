from __future__ import annotations

import asyncio

import pytest

from redrive.admin.errors import AdminError, AdminNotFoundError, BrokerUnreachableError
from redrive.admin.granting import CachedRead


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


async def test_those_who_ask_at_the_same_time_share_a_read() -> None:
    reads = Reads()
    cached = CachedRead(reads)
    assert await asyncio.gather(*(cached.get(max_age=0) for _ in range(100))) == [1] * 100


async def test_what_was_read_is_read_again_only_where_it_is_too_old() -> None:
    cached = CachedRead(Reads())
    assert [await cached.get(max_age=age) for age in (60, 60, 0, 60)] == [1, 1, 2, 2]


async def test_that_there_is_nothing_is_remembered_for_as_long() -> None:
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


async def test_a_read_that_fails_is_made_again_and_what_was_known_stays_known() -> None:
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
