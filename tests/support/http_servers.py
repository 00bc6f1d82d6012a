"""A server with the answers of a test, and a real HTTP proxy, as between cluster and outside."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from tests.support.refusing_proxy import REFUSES

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve *answer* on every path; yield the URL, of HTTPS with *tls*."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


LOGIN = "ann:s@cret"
"""The user and password that the proxy requires; its URL has them percent-encoded."""
SECONDS = 60.0


@dataclass(frozen=True)
class HttpProxy:
    """A running proxy.

    Attributes:
        port: of 127.0.0.1.
        refuses: file; while it exists, each connection is refused with status 503.
    """

    port: int
    refuses: Path
    _log: Path

    @property
    def url(self) -> str:
        """Its address, with the login."""
        return f"http://{quote(LOGIN, safe=':')}@127.0.0.1:{self.port}"

    def wait_for(self, *requests: str) -> str:
        """Wait until the log has each of *requests*, such as `CONNECT HOST:PORT`; return the log.

        A request is logged when its connection ends.
        """
        deadline = time.monotonic() + SECONDS
        while not all(request in self.log for request in requests):
            assert time.monotonic() < deadline, f"no {requests} in: {self.log}"
            time.sleep(0.05)
        return self.log

    @property
    def log(self) -> str:
        """The requests of connections that ended."""
        return self._log.read_text("utf-8")


@contextmanager
def http_proxy(folder: Path) -> Iterator[HttpProxy]:
    """Run a proxy while the block runs, with its files in *folder*."""
    port, log, refuses = (folder / f"proxy-{name}" for name in ("port", "log", "refuses"))
    log.touch()
    arguments = f"--port=0 --port-file={port} --log-file={log} --basic-auth={LOGIN}".split()
    arguments += ["--plugins=tests.support.refusing_proxy.Refusing"]
    command = [sys.executable, "-m", "proxy", *arguments, "--num-workers=1", "--num-acceptors=1"]
    environment = {**os.environ, REFUSES: str(refuses)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not (port.exists() and port.read_text().strip()):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield HttpProxy(int(port.read_text()), refuses, log)
        finally:
            process.terminate()
