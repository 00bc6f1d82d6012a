"""The report in a real browser: styled, readable at any width, and without effect or network."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from redrive.inspection.record import Recorder
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import Summary
from redrive.policy.envelope import CAUSE_MESSAGE, REPLAY, REPLAYS
from tests.support.dead_letter_rows import SENT, dead_letter
from tests.support.waiting import wait_until

HOSTILE = "</td><script>document.title='run'</script><img src=http://127.0.0.1:9/x>"
PROPERTIES = {CAUSE_MESSAGE: HOSTILE, REPLAYS: "1", REPLAY: "shop/after-fix"}
WIDTHS = (400, 1_600)


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
async def connected_tab(address: str) -> AsyncIterator[Tab]:
    """Connect to the only tab of a browser."""
    async with aiohttp.ClientSession(address) as session:
        async with session.get("/json") as answer:
            pages = json.loads(await answer.text())
        (page,) = (page for page in pages if page["type"] == "page")
        async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
            yield Tab(socket)


def page() -> str:
    """Return a report of dead letters with long and hostile texts."""
    summary = Summary(recorder := Recorder(lambda _: None))
    for number in range(300):
        cause = ("WarehouseDown", "JSONDecodeError", "com.example.orders.Rejected" * 4)[number % 3]
        row = dead_letter(number * 60, cause, key=f"k{number % 7}", properties=PROPERTIES)
        summary.add(row._replace(partition=number % 4, value=bytes(number * 40)))
    summary.add(dead_letter(0, HOSTILE, key=HOSTILE))
    replays = [
        ("after-fix-" + "x" * 40, "Run", result, "4", "0", "1", "2026-11-26T13:00:00Z")
        for result in ("Completed", "Failed")
    ]
    at, topic = datetime.fromtimestamp(SENT / 1_000 + 90_000, UTC), "persistent://shop/prod/" * 3
    lines = ["300 of 300 entries were read.", "Keys and texts are masked."]
    facts = ReportFacts("dead letters", topic, at, lines, recorder.hash_key, replays)
    return render_report(facts, summary)


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if CHROMIUM is None:
        pytest.fail("the report is shown in a browser; install chromium (apt-get install chromium)")
    with chromium(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.mark.parametrize("width", WIDTHS)
async def test_browser_shows_report_without_network(
    devtools: str, width: int, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(), "utf-8")
    async with connected_tab(devtools) as tab:
        await tab.open(file.as_uri(), width)
        assert await tab.evaluate("document.documentElement.scrollWidth") == width
        background = "getComputedStyle(document.querySelector('section')).backgroundColor"
        assert await tab.evaluate(background) == "rgb(255, 255, 255)"
        assert await tab.evaluate("document.title") != "run"
        assert await tab.evaluate("document.querySelectorAll('script, img').length") == 0
        assert "<script>" in await tab.evaluate("document.body.innerText")
        bars = "[...document.querySelectorAll('.plot rect')]"
        shown = f"{bars}.filter(bar => bar.getBoundingClientRect().height > 0).length"
        assert await tab.evaluate(shown) > 10
        (tmp_path / "report.png").write_bytes(await tab.picture())
        requested = [event["request"]["url"] for event in tab.named("Network.requestWillBeSent")]
        assert requested == [file.as_uri()]
        assert tab.named("Log.entryAdded") == tab.named("Runtime.exceptionThrown") == []
