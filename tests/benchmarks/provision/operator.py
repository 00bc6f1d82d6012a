"""The operator under measurement, and a proxy before a broker that records each call."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web
from yarl import URL

from sandbox import installation
from sandbox.sandbox import Sandbox
from tests.support.installed_operator import metric


@dataclass(frozen=True)
class Operator:
    """The operator of a sandbox."""

    sandbox: Sandbox

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of the cluster's administrator."""
        return self.sandbox.cluster.kubeconfig

    def stop(self) -> None:
        """Stop the operator, and wait for its end."""
        self.sandbox.processes.stop(installation.OPERATOR)

    def start(self) -> None:
        """Start the operator again, and wait until it serves."""
        installation.start_operator(self.sandbox)

    def memory(self) -> float:
        """The resident memory of the operator in MB."""
        return self.measured("process_resident_memory_bytes") / 1e6

    def measured(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        return metric(self.sandbox, name, seconds=10, **labels)


class Call(NamedTuple):
    """A call to the broker."""

    at: float
    method: str
    path: str

    @property
    def writes(self) -> bool:
        """True if the call writes."""
        return self.method != "GET"


@dataclass(frozen=True)
class Proxy:
    """The recorded calls.

    Attributes:
        url: of the proxy.
    """

    url: str
    calls: list[Call] = field(default_factory=list)

    def since(self, moment: float) -> list[Call]:
        """Return the calls since a time."""
        return [call for call in self.calls if call.at >= moment]


@asynccontextmanager
async def counting(upstream: str) -> AsyncIterator[Proxy]:
    """Serve the answers of *upstream* on a free port."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        calls: list[Call] = []

        async def forward(request: web.Request) -> web.Response:
            calls.append(Call(time.monotonic(), request.method, request.raw_path))
            url = URL(f"{upstream}{request.raw_path}", encoded=True)
            headers = {k: v for k, v in request.headers.items() if k.lower() in _PASSED}
            async with session.request(
                request.method, url, data=await request.read(), headers=headers
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() in _PASSED}
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)

        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield Proxy(f"http://127.0.0.1:{runner.addresses[0][1]}", calls)
        finally:
            await runner.cleanup()


_PASSED = {"accept-encoding", "authorization", "content-type", "content-encoding", "location"}
