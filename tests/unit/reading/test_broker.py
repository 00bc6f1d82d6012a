"""The credentials of a job go to the broker of its connection, and where that may redirect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from redrive.admin.errors import AdminNotFoundError, RedirectRefusedError
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess, Method
from redrive.policy.naming import TopicName
from redrive.reading import broker
from tests.support.http_server import serving

TOPIC = TopicName("t", "n", "a")


@asynccontextmanager
async def redirecting(shown: list[str | None]) -> AsyncIterator[str]:
    """Serve a broker on 127.0.0.1 that redirects to localhost, where tokens are noted."""

    async def answer(request: web.Request) -> web.Response:
        if request.url.host == "localhost":
            shown.append(request.headers.get("Authorization"))
            return web.json_response({"reason": "no such topic"}, status=404)
        elsewhere = request.url.with_host("localhost")
        return web.Response(status=307, headers={"Location": str(elsewhere)})

    async with serving(answer) as url:
        yield url


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives this process a token, and says where it may be redirected."""
    file = tmp_path / "credentials" / "token"
    file.parent.mkdir()
    file.write_text("the-token\n")

    def give(*hosts: str) -> None:
        access = BrokerAccess(Method.TOKEN, str(tmp_path), hosts)
        monkeypatch.setenv(ACCESS_VARIABLE, access.encode())

    return give


@pytest.mark.parametrize("hosts", [(), ("broker-*.pulsar",)])
async def test_the_token_of_a_job_is_redirected_to_no_host_that_the_connection_does_not_name(
    give: Callable[..., None], hosts: tuple[str, ...]
) -> None:
    give(*hosts)
    shown: list[str | None] = []
    async with redirecting(shown) as url:
        with pytest.raises(RedirectRefusedError, match="redirectHosts"):
            await broker.take_snapshot(url, TOPIC)
    assert shown == []


async def test_the_token_of_a_job_is_redirected_to_hosts_that_the_connection_names(
    give: Callable[..., None],
) -> None:
    give("broker-*.pulsar", "localhost")
    shown: list[str | None] = []
    async with redirecting(shown) as url:
        with pytest.raises(AdminNotFoundError, match="no such topic"):
            await broker.take_snapshot(url, TOPIC)
    assert shown == ["Bearer the-token"]
