"""The report in a real browser: styled, readable at any width, and without effect or network."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from redrive.inspection.record import Recorder
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import Summary
from redrive.policy.envelope import CAUSE_MESSAGE, REPLAY, REPLAYS
from tests.support import browser
from tests.support.dead_letter_rows import SENT, dead_letter

HOSTILE = "</td><script>document.title='run'</script><img src=http://127.0.0.1:9/x>"
PROPERTIES = {CAUSE_MESSAGE: HOSTILE, REPLAYS: "1", REPLAY: "shop/after-fix"}
WIDTHS = (400, 1_600)


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
    if browser.CHROMIUM is None:
        pytest.fail("the report is shown in a browser; install chromium (apt-get install chromium)")
    with browser.chromium(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest.mark.parametrize("width", WIDTHS)
async def test_browser_shows_report_without_network(
    devtools: str, width: int, tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(), "utf-8")
    async with browser.tab(devtools) as tab:
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
