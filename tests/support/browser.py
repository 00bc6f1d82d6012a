"""A page in headless Chromium, by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import wait_until

CHROMIUM = shutil.which("chromium")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # for root
    "--hide-scrollbars",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-port=0",
)


@dataclass
class Tab:
    """A tab of a browser.

    Attributes:
        events: of the page and the network, each with its method and parameters.
    """

    _socket: aiohttp.ClientWebSocketResponse
    events: list[dict[str, Any]] = field(default_factory=list)
    _calls: int = 0

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a method; return its result."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        while (message := await self._socket.receive_json()).get("id") != self._calls:
            self.events.append(message)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str, width: int) -> None:
        """Load a page in a window of *width* pixels."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)
        while not self.named("Page.loadEventFired"):
            self.events.append(await self._socket.receive_json())

    def named(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of a method."""
        return [event["params"] for event in self.events if event["method"] == method]

    async def evaluate(self, expression: str) -> Any:  # noqa: ANN401
        """Return the value of an expression of JavaScript, which no policy of the page forbids."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def picture(self) -> bytes:
        """Return a picture of the whole page, as PNG."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """Start a browser with a new *profile*; yield the address of its DevTools."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    ports = profile / "DevToolsActivePort"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            wait_until(lambda: ports.exists() and "\n" in ports.read_text())
            yield f"http://127.0.0.1:{ports.read_text().splitlines()[0]}"
        finally:
            browser.terminate()


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[Tab]:
    """Connect to the only tab of a browser."""
    async with aiohttp.ClientSession(address) as session:
        async with session.get("/json") as answer:
            pages = json.loads(await answer.text())
        (page,) = (page for page in pages if page["type"] == "page")
        async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
            yield Tab(socket)
