"""Every page of the documentation is found from the README, and no link is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
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


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_context_and_its_consequences(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences"]


def test_each_decision_has_a_number_of_its_own() -> None:
    numbers = [int(page.stem[:4]) for page in DECISIONS]
    assert len(set(numbers)) == len(numbers)
