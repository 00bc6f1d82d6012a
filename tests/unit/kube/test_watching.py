"""Over real sockets: which requests count as signs of life."""

from __future__ import annotations

import itertools
import ssl

import aiohttp
import pytest

from redrive.kube import watching
from redrive.kube.liveness import Liveness
from tests.unit.kube.test_client import api_server

EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


async def test_every_beginning_of_a_watch_is_a_sign_of_life_and_nothing_else_is() -> None:
    health = Liveness()
    tls = ssl.create_default_context()
    async with (
        watching.session(health, tls=tls, headers={}, proxy=None) as session,
        api_server(EMPTY) as port,
    ):
        await session.get(f"http://127.0.0.1:{port}/apis/replays")
        assert health.silent_for() == {}
        await session.get(f"http://127.0.0.1:{port}/apis/replays?watch=true&timeoutSeconds=30")
        assert list(health.silent_for()) == ["watch of /apis/replays"]


async def test_an_attempt_that_reaches_nobody_is_a_sign_of_life_too() -> None:
    health = Liveness()
    tls = ssl.create_default_context()
    async with watching.session(health, tls=tls, headers={}, proxy=None) as session:
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get("http://127.0.0.1:1/apis/replays?watch=true")
    assert list(health.silent_for()) == ["watch of /apis/replays"]


def test_the_api_server_is_asked_again_for_ever_and_soon() -> None:
    waits = list(itertools.islice(watching.BackOffs(), 1000))
    assert max(waits) <= 5
    assert waits[-1] > 0
