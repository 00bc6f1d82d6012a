"""A relay before a port; its connections can be cut and refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from tests.chaos.threads import in_thread, stop_accepting


class Relay:
    """Passes bytes on to a port of this machine, in a thread.

    Attributes:
        port: of the relay.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        self.port = 0

    @classmethod
    @contextmanager
    def before(cls, target: int) -> Iterator[Relay]:
        """Relay until the block ends."""
        relay = cls(target)
        with in_thread(relay._serving, name="relay"):
            yield relay

    def cut(self) -> None:
        """Cut all connections, and refuse new ones until `accept`."""
        self._open = False
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(30)

    def accept(self) -> None:
        """Accept connections again."""
        self._open = True

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        server = await asyncio.start_server(self._relay, sock=listener)
        self.port = listener.getsockname()[1]
        try:
            yield
        finally:
            await stop_accepting(listener)
            server.close()
            await self._cut()

    async def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        answers, back = await asyncio.open_connection("127.0.0.1", self._target)
        task, mine = asyncio.current_task(), {writer, back}
        assert task is not None
        self._relays.add(task)
        self._writers |= mine
        try:
            await asyncio.gather(_pump(reader, back), _pump(answers, writer))
        finally:
            self._writers -= mine
            self._relays.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
