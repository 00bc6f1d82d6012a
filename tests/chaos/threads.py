"""A server in a thread, which leaves no socket open at its end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

START_SECONDS = 30


@contextmanager
def in_thread(
    serving: Callable[[], AbstractAsyncContextManager[None]], name: str
) -> Iterator[None]:
    """Serve while the block runs.

    The event loop ends like that of a program: tasks are cancelled and awaited, and transports
    get the iteration of the loop in which they close their sockets.
    """
    began, loop, enough = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with serving():
            began.set()
            await enough.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        assert began.wait(START_SECONDS), f"{name} did not start"
        yield
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(enough.set)
        thread.join()


async def stop_accepting(listener: socket.socket) -> None:
    """Accept no more connections, and wait until each accepted one can be closed.

    The event loop accepts a connection in one iteration, and creates its transport in a later one.
    If the server is closed in between, the socket of that connection stays open.
    """
    asyncio.get_running_loop().remove_reader(listener)
    for _ in range(5):
        await asyncio.sleep(0)
