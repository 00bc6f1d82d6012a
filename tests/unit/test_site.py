"""The site: every page has a place in its navigation, and every link of a staged page a target.

`make site` builds it, with warnings as errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from release import site
from tests.unit.test_docs import links


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site.stage(folder)
    return folder / "docs"


def pages_of(navigation: Any) -> Iterator[str]:  # noqa: ANN401 - nested lists and mappings
    match navigation:
        case str(page):
            yield page
        case [*entries]:
            for entry in entries:
                yield from pages_of(entry)
        case {**titles}:
            yield from pages_of(list(titles.values()))


def test_navigation_has_each_page_once(staged: Path) -> None:
    pages = list(pages_of(yaml.safe_load(site.CONFIGURATION.read_text("utf-8"))["nav"]))
    expected = {str(page.relative_to(staged)) for page in staged.rglob("*.md")}
    not_of_users = {page for page in expected if page.startswith(("design/", "decisions/"))}
    assert sorted(pages) == sorted(expected - not_of_users)


def test_links_of_staged_pages_stay_in_the_site(staged: Path) -> None:
    targets = {target for page in staged.rglob("*.md") for target, _ in links(page)}
    assert len(targets) > 80
    assert [target for target in targets if not target.is_relative_to(staged)] == []
    assert [target for target in targets if not target.exists()] == []


def test_links_to_files_without_an_address_show_their_path(staged: Path) -> None:
    page = (staged / "project" / "readme.md").read_text("utf-8")
    assert "(`examples/01-first-policy/consumer.py`)" in page
    assert "(../howto/quick-start.md)" in page
