"""The HTML report: complete, escaped, and independent of anything outside of it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest

from redrive.inspection.record import Recorder
from redrive.inspection.report import ReportFacts, render_report
from redrive.inspection.summary import Summary
from redrive.policy.envelope import CAUSE_MESSAGE, CONSUMER, REPLAY, REPLAYS
from tests.support.dead_letter_rows import SENT, dead_letter

HOSTILE = "</td><script>alert(1)</script><img src=//evil onerror=x>\"'&\x1b[2J\x00"


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rendered(
    *rows: Any,  # noqa: ANN401  rows of dead letters
    topic: str = "persistent://shop/prod/orders-DLQ",
    replays: Sequence[Sequence[str]] = (),
) -> str:
    recorder = Recorder(lambda _: None)
    summary = Summary(recorder)
    for row in rows:
        summary.add(row)
    at = datetime.fromtimestamp(SENT / 1_000 + 7_200, UTC)
    facts = ReportFacts("dead letters", topic, at, ["2 were read."], recorder.hash_key, replays)
    return render_report(facts, summary)


def test_report_shows_figures_of_the_summary() -> None:
    replayed = {REPLAYS: "1", REPLAY: "shop/after-fix"}
    page = rendered(
        *(dead_letter(n, "WarehouseDown", key="ann@example.com") for n in range(3)),
        dead_letter(3, properties=replayed)._replace(partition=1, value=bytes(2_000)),
    )
    texts = Page(page).texts
    for row in (
        ("Dead letters of persistent://shop/prod/orders-DLQ",),
        ("WarehouseDown", "000000000000000d", "2026-11-26 13:33 UTC"),
        ("none recorded",),
        ("1 to 6 hours", "4"),
        ("1 to 16 KiB", "1"),
        ("(without key)", "1"),
        ("partition 1", "1"),
        ("1 replay", "1"),
        ("shop/after-fix", "1"),
    ):
        start = texts.index(row[0])
        assert tuple(texts[start : start + len(row)]) == row
    assert "ann@example.com" not in page


def test_report_shows_past_replays() -> None:
    row = ("after-fix", "Run", "Completed", "4", "0", "1", "2026-11-26T13:00:00Z")
    texts = Page(rendered(dead_letter(0, "E"), replays=[row] * 40)).texts
    assert texts.count("after-fix") == 30
    start = texts.index("after-fix")
    assert tuple(texts[start : start + len(row)]) == row
    assert "Replays of the policy" not in Page(rendered(dead_letter(0, "E"))).texts


def test_hostile_texts_are_escaped() -> None:
    hostile = {CAUSE_MESSAGE: HOSTILE, CONSUMER: HOSTILE, REPLAYS: "1", REPLAY: HOSTILE}
    page = rendered(dead_letter(0, HOSTILE, key=HOSTILE, properties=hostile), topic=HOSTILE)
    tags = Page(page).tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "img", "a", "link", "iframe", "base"})
    names = {name for _, attributes in tags for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert names.isdisjoint({"href", "src", "style", "srcset", "action"})
    assert all(character.isprintable() or character == "\n" for character in page)
    assert sum("alert(1)" in text for text in Page(page).texts) >= 3


def test_policy_permits_the_style_of_the_page_alone() -> None:
    page = rendered(dead_letter(0, "E"))
    (policy,) = (
        str(attributes["content"])
        for tag, attributes in Page(page).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("times", [(0,), (0, 2**63), (SENT, 0)])
def test_times_of_any_producer_do_not_end_the_report(times: tuple[int, ...]) -> None:
    page = rendered(*(dead_letter(n)._replace(publish_time=t) for n, t in enumerate(times)))
    words = "1 messages have a time" if SENT in times else "No message has a plausible time."
    assert words in page


def test_plot_has_a_bar_for_each_cause_and_time() -> None:
    rows = [dead_letter(3_600 * n, "x" * (1 + n % 9)) for n in range(18)]
    page = Page(
        rendered(*(row._replace(publish_time=SENT - 3_600_000 * n) for n, row in enumerate(rows)))
    )
    bars = [a for tag, a in page.tags if tag == "rect" and str(a.get("class")).startswith("c")]
    assert len(bars) == 18
    assert {str(bar["class"]) for bar in bars} == {f"c{n}" for n in range(7)}
    assert sum(float(str(bar["height"])) for bar in bars) == 18
    assert "other causes" in page.texts
