"""Virtual time for tests of what waits on an event loop and has no sockets."""

from __future__ import annotations

import asyncio

import looptime
import pytest


@pytest.fixture
async def virtual_time() -> None:
    """Have the event loop of the test skip its waits: its clock moves on at once.

    Not by the plugin of the library, which makes an event loop for tests without one and leaves it
    open; nor where a socket or a thread is waited for, which take real time.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, asyncio.BaseEventLoop)
    # Nothing wakes this loop from outside; by default 42 idle cycles precede each jump of time.
    looptime.patch_event_loop(loop, start=loop.time(), noop_cycles=1)
