"""Links, and the form and the language of design pages and decision records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FRONT = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
DESIGN = sorted((ROOT / "docs/design").glob("*.md"))
AREAS = [page for page in DESIGN if page.stem != "measurements"]
RECORDS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
MOST_RECORDS = 20
SEARCHED = (
    "leader election",
    "work queue",
    "in-flight messages",
    "poison message",
    "outage breaker",
    "exactly once",
    "fencing",
    "token refresh",
    "topic ownership",
    "adoption",
    "drift detection",
)
"""Usual names of concepts: a search for each finds its design page."""
PRIVATE = re.compile(
    r"\b(all the same|anew|be it|by itself|for ?ever|go(es|ing)? on|heirs?|in hand|nobody|outlets?"
    r"|rest(s|ed|ing)|yet to be|(?<!dead )(?<!dead-)letters?)\b",
    re.IGNORECASE,
)
"""Words with a standard word in their place, such as in-flight, permanently, resume, pending."""
MOST_WHAT = 2 / 1000
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield each relative link of *page*: the file that it leads to, and its anchor."""
    for link in LINK.findall(page.read_text("utf-8")):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of *page*."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_relative_link_is_broken(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name}: no heading #{anchor}"


def test_every_page_is_at_most_two_steps_from_the_readme() -> None:
    reached = {README}
    for _ in range(2):
        pages = [page for page in reached if page.suffix == ".md"]
        reached |= {target for page in pages for target, _ in links(page)}
    assert not set(PAGES) - reached


def prose(page: Path) -> str:
    """Return the text of *page* on one line, without code and the targets of links."""
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page.read_text("utf-8"), flags=re.DOTALL)
    return " ".join(LINK.sub("]", text).split())


@pytest.mark.parametrize("page", AREAS, ids=lambda page: page.stem)
def test_design_page_has_the_standard_sections(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert headings == ["Problem", "Guarantees", "Design", "Alternatives", "Limits", "Code"]


@pytest.mark.parametrize("page", RECORDS, ids=lambda page: page.stem)
def test_decision_record_has_the_standard_sections(page: Path) -> None:
    text = page.read_text("utf-8")
    assert re.search(
        r"^- Date: \d{4}-\d{2}-\d{2}\n- Status: (accepted|superseded)$", text, re.MULTILINE
    )
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["Context", "Decision", "Alternatives", "Consequences"]


def test_design_pages_and_records_stay_few() -> None:
    assert 12 <= len(DESIGN) <= 16
    assert [int(page.stem[:4]) for page in RECORDS] == list(range(1, len(RECORDS) + 1))
    assert len(RECORDS) <= MOST_RECORDS


@pytest.mark.parametrize("term", SEARCHED)
def test_concept_is_found_by_its_usual_name(term: str) -> None:
    assert any(term in page.read_text("utf-8").lower() for page in DESIGN)


@pytest.mark.parametrize("page", [*DESIGN, *RECORDS], ids=lambda page: page.stem)
def test_design_prose_uses_standard_words(page: Path) -> None:
    assert [match[0] for match in PRIVATE.finditer(prose(page))] == []


def test_design_prose_has_few_what_clauses() -> None:
    words = re.findall(r"[\w'-]+", " ".join(prose(page).lower() for page in (*DESIGN, *RECORDS)))
    assert words.count("what") <= MOST_WHAT * len(words)
