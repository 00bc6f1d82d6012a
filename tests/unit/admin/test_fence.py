"""Over real sockets: what a closed fence keeps from leaving the process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from redrive.admin.guards import Fence, FenceClosedError, elapsed
from redrive.admin.http import Access, Call, CallTurns, Http, Way

CONNECTIONS = 20
"""As many as there may be to one broker."""
ANSWER = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Broker:
    """What arrives at a broker that answers once the test lets it."""

    url: str
    arrived: list[str]
    answering: asyncio.Event
    busy: asyncio.Event


@asynccontextmanager
async def a_broker() -> AsyncIterator[Broker]:
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
        broker = Broker(url, [], asyncio.Event(), asyncio.Event())
        yield broker


async def test_a_write_that_waited_too_long_for_a_connection_never_leaves() -> None:
    clock = Clock()
    fence = Fence(clock)
    turns = CallTurns(CONNECTIONS)

    async def send(method: str, body: object = None) -> object:
        way = Way(broker.url, Access.bearer("t"), turns)
        return await http.send(Call("do it", method, "x", body), way)

    async with a_broker() as broker, Http.open(fence) as http, asyncio.TaskGroup() as group:
        fence.open_until(clock.now + 7)
        reads = [group.create_task(send("GET")) for _ in range(CONNECTIONS)]
        await broker.busy.wait()  # all connections are taken now
        write = group.create_task(_refusal(send("PUT", {"a": 1})))
        await asyncio.sleep(0)
        clock.now += 10
        broker.answering.set()
        assert "was not renewed in time; got '3.0 s too late'" in await write
        assert set(broker.arrived) == {"GET"}
        await send("GET")
        fence.open_until(clock.now + 7)
        await send("PUT", {"a": 1})
        assert broker.arrived[len(reads) :] == ["GET", "PUT"]


async def _refusal(sending: Awaitable[object]) -> str:
    with pytest.raises(FenceClosedError) as refused:
        await sending
    return str(refused.value)


def test_a_fence_is_closed_until_it_is_opened_and_from_its_moment_on() -> None:
    clock = Clock()
    fence = Fence(clock)
    assert not fence.is_open()
    fence.open_until(107.0)
    clock.now = 106.9
    fence.check()
    clock.now = 107.0
    with pytest.raises(FenceClosedError):
        fence.check()


def test_elapsed_time_only_rises() -> None:
    assert elapsed() <= elapsed()
