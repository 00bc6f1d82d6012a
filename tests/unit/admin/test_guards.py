"""Circuit breaker of a broker, and the fence of a leader, over real sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from redrive.admin.access import Access
from redrive.admin.errors import BrokerDownError, BrokerFailedError, BrokerUnreachableError
from redrive.admin.guards import FAILURES, Breaker, Fence, elapsed
from redrive.admin.http import Call, CallSlots, Endpoint, Http
from redrive.reasons import Reason
from tests.support.reasons import raises

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SILENT = BrokerUnreachableError("no answer", remedy="wait")
ALWAYS = timedelta()


class GuardedBroker:
    """A broker behind a breaker; each call takes a minute."""

    def __init__(self) -> None:
        self.calls = 0
        self.states: list[bool] = []
        self._now = START
        self.breaker = Breaker(
            "http://broker:8080",
            lambda: self._now,
            lambda: self.states.append(self.breaker.is_open),
        )

    async def call(
        self, fails: Exception | None = None, *, probe: timedelta | None = None
    ) -> object:
        async def answer() -> str:
            self.calls += 1
            self._now += timedelta(minutes=1)
            if fails is not None:
                raise fails
            return "answer"

        return await self.breaker.guard(answer, probe)

    def advance(self, time: timedelta) -> None:
        self._now += time

    async def fall_silent(self) -> None:
        for _ in range(FAILURES):
            with pytest.raises(BrokerUnreachableError):
                await self.call(SILENT)


async def test_breaker_passes_answers_and_refusals() -> None:
    broker = GuardedBroker()
    assert await broker.call() == "answer"
    for _ in range(2 * FAILURES):
        with pytest.raises(BrokerFailedError):
            await broker.call(BrokerFailedError("500", remedy="wait"))
    assert (broker.states, broker.calls) == ([], 2 * FAILURES + 1)


async def test_breaker_opens_after_consecutive_silent_calls() -> None:
    broker = GuardedBroker()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            with pytest.raises(BrokerUnreachableError, match="no answer"):
                await broker.call(SILENT)
        assert await broker.call() == "answer"
    assert not broker.states
    await broker.fall_silent()
    assert broker.states == [True]


async def test_open_breaker_sends_only_probes_and_shows_its_start() -> None:
    broker = GuardedBroker()
    await broker.fall_silent()
    messages: set[str] = set()
    for probe in (None, ALWAYS, None):
        with pytest.raises(BrokerDownError) as raised:
            await broker.call(SILENT, probe=probe)
        messages.add(str(raised.value))
    assert broker.calls == FAILURES + 1
    (message,) = messages
    assert "http://broker:8080 has not answered since 2026-01-02T03:05:05Z; check" in message


async def test_probes_with_a_pause_are_shared() -> None:
    broker = GuardedBroker()
    await broker.fall_silent()
    pause = timedelta(minutes=2.5)
    for _ in range(4):  # each takes a minute if it is sent
        with pytest.raises(BrokerDownError):
            await broker.call(SILENT, probe=pause)
    assert broker.calls == FAILURES + 1
    broker.advance(pause)
    assert await broker.call(probe=pause) == "answer"
    assert await broker.call(probe=pause) == "answer"  # closed


REFUSED = BrokerFailedError("503", remedy="wait")


@pytest.mark.parametrize("probed", [None, REFUSED], ids=["success", "refusal"])
async def test_answered_probe_closes_the_breaker(probed: Exception | None) -> None:
    broker = GuardedBroker()
    await broker.fall_silent()
    if probed is None:
        await broker.call(probe=ALWAYS)
    else:
        with pytest.raises(BrokerFailedError):
            await broker.call(probed, probe=ALWAYS)
    assert broker.states == [True, False]
    assert await broker.call() == "answer"
    with pytest.raises(BrokerUnreachableError, match="no answer"):
        await broker.call(SILENT)


CONNECTIONS = 20
"""The maximum to one broker."""
ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


class Clock:
    """Seconds that a test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class BusyBroker:
    """Requests at a broker that answers once the test permits it."""

    url: str
    arrived: list[str]
    answering: asyncio.Event
    busy: asyncio.Event


@asynccontextmanager
async def a_broker() -> AsyncIterator[BusyBroker]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"Content-Length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)
        broker.arrived.append(head.split()[0])
        if len(broker.arrived) == CONNECTIONS:
            broker.busy.set()
        await broker.answering.wait()
        writer.write(ANSWER)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        broker = BusyBroker(url, [], asyncio.Event(), asyncio.Event())
        yield broker


async def test_write_queued_beyond_the_fence_is_not_sent() -> None:
    clock = Clock()
    fence = Fence(clock)
    turns = CallSlots(CONNECTIONS)

    async def send(method: str, body: object = None) -> object:
        way = Endpoint(broker.url, Access.bearer("t"), turns)
        return await http.send(Call("do it", method, "x", body), way)

    async with a_broker() as broker, Http.open(fence) as http, asyncio.TaskGroup() as group:
        fence.open_until(clock.now + 7)
        reads = [group.create_task(send("GET")) for _ in range(CONNECTIONS)]
        await broker.busy.wait()  # all connections are taken now
        write = group.create_task(_refusal(send("PUT", {"a": 1})))
        await asyncio.sleep(0)
        clock.now += 10
        broker.answering.set()
        assert "this operator expired; got '3.0 s too late'" in await write
        assert set(broker.arrived) == {"GET"}
        await send("GET")
        fence.open_until(clock.now + 7)
        await send("PUT", {"a": 1})
        assert broker.arrived[len(reads) :] == ["GET", "PUT"]


async def _refusal(sending: Awaitable[object]) -> str:
    with raises(Reason.LEASE_NOT_RENEWED) as refused:
        await sending
    return str(refused.value)


def test_fence_is_open_only_until_its_end() -> None:
    clock = Clock()
    fence = Fence(clock)
    assert not fence.is_open()
    fence.open_until(107.0)
    clock.now = 106.9
    fence.check()
    clock.now = 107.0
    with raises(Reason.LEASE_NOT_RENEWED):
        fence.check()


def test_elapsed_time_is_monotonic() -> None:
    assert elapsed() <= elapsed()
