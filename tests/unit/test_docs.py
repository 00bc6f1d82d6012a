"""Pages: links, commands, fields, navigation, and the form of design pages and records.

`make site` builds the site, with warnings as errors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from redrive.api.crds import KINDS
from redrive.cli.frame import COMMAND_GROUP
from redrive.cli.main import COMMANDS
from redrive.cli.operator_arguments import parser
from release import site

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
FRONT = [README, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"))]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
DOCS = ROOT / "docs"
MODULES = sorted((ROOT / "operator" / "redrive").rglob("*.py"))
DESIGN = sorted((ROOT / "docs/design").glob("*.md"))
AREAS = [page for page in DESIGN if page.stem != "measurements"]
RECORDS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
RUNBOOKS = sorted((ROOT / "docs/runbooks").glob("Redrive*.md"))
SECURITY_MODEL = ROOT / "docs/explanation/security-model.md"
MOST_RECORDS = 20
MOST_WORDS = 40  # of a sentence
MOST_WORDS_FOR_USERS = 30  # but in the changelog and in descriptions of the API and of reasons
USER_PAGES = [page for page in PAGES if not {"design", "decisions"} & set(page.parts)]
MOST_WORDS_OF_A_GUIDE = 2_500
LONG = {"security-model", "api", "cli", "reasons", "replays", "rights", "python"}
"""Pages with a row for each statement, field, command or reason."""
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
"""Usual names of concepts: a search for each finds its design page and its module."""
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`\n]*`")
"""Code in a line: a pattern may look like a link."""


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield each relative link of *page*: the file that it leads to, and its anchor."""
    for link in LINK.findall(CODE.sub("", page.read_text("utf-8"))):
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


def test_user_pages_are_at_most_two_steps_from_the_readme() -> None:
    reached = {README}
    for pages in (), USER_PAGES, PAGES:  # after one, two and three steps
        sources = [page for page in reached if page.suffix == ".md"]
        reached |= {target for page in sources for target, _ in links(page)}
        assert not set(pages) - reached


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


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of *page*: parts of paragraphs, items of lists and cells of tables."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for part in re.split(r"\n\s*\n|\n\s*(?=[-*|#]|\d+\. )", text):
        for cell in part.split("|") if part.lstrip().startswith("|") else [part]:
            plain = re.sub(r"\]\([^)]*\)", "", " ".join(cell.split()))
            yield from re.split(r"(?<=[.!?:;]) ", plain)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_too_long(page: Path) -> None:
    is_free = page in FRONT[1:] or "api" in page.parts or page.stem == "reasons"
    most = MOST_WORDS if is_free or page not in USER_PAGES else MOST_WORDS_FOR_USERS
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > most] == []


def test_guides_stay_short_enough_to_be_read() -> None:
    pages = [
        page for page in USER_PAGES if page not in FRONT and not LONG & {page.stem, *page.parts}
    ]
    words = {page.name: len(page.read_text("utf-8").split()) for page in pages}
    assert {page: count for page, count in words.items() if count > MOST_WORDS_OF_A_GUIDE} == {}


def test_user_pages_lead_to_no_decision() -> None:
    pages = set(USER_PAGES) - {ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"}
    assert [page for page in pages if any("decisions" in to.parts for to, _ in links(page))] == []


def test_every_annotation_stands_on_its_page() -> None:
    name = re.compile(r"[\"'](redrive\.io/[a-z][a-z-]+)[\"']")
    names = {text for module in MODULES for text in name.findall(module.read_text("utf-8"))}
    page = (DOCS / "reference" / "annotations.md").read_text("utf-8")
    assert len(names) > 20
    assert {text for text in names if f"`{text}`" not in page} == set()


def test_annotations_and_metrics_of_pages_exist() -> None:
    source = "".join(module.read_text("utf-8") for module in MODULES)
    source += "".join(f"redrive.io/{kind.kind.lower()}\n" for kind in KINDS)  # labels of jobs
    reference = [DOCS / "reference" / f"{name}.md" for name in ("metrics", "consumer-metrics")]
    rows = "".join(page.read_text("utf-8") for page in reference)
    metrics = set(re.findall(r"^\| `(redrive_\w+)` \|", rows, re.MULTILINE))
    for page in PAGES:
        text = page.read_text("utf-8")
        names = {re.sub("_(bucket|count|sum)$", "", name) for name in METRIC.findall(text)}
        assert names <= metrics, page
        assert [name for name in ANNOTATION.findall(text) if name not in source] == [], page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_installs_nothing_that_is_not_published(page: Path) -> None:
    """Until the first release no registry has the package: pages install a wheel or a checkout."""
    assert re.findall(r"pip(?:x)? install ['\"]?redrive(?!-\d)", page.read_text("utf-8")) == []


def test_guarantees_of_the_readme_have_tests() -> None:
    section = README.read_text("utf-8").split("## Guarantees")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 4
    for row in rows:
        assert len(TEST.findall(row)) == 1


COMMAND = re.compile(r"^[ $]*(?:kubectl )?redrive ([a-z-]+)(?: ([^|#\n]*))?", re.MULTILINE)
"""A command of redrive at the beginning of a line of code."""
METRIC = re.compile(r"\b(redrive_[a-z]\w+)")
ANNOTATION = re.compile(r"`(redrive\.io/[a-z-]+)`")


def flags_of(name: str) -> set[str]:
    """Return the flags of a command of redrive."""
    if name == "operator":
        return set(parser("redrive operator")._option_string_actions)  # noqa: SLF001 - no other
    command = COMMAND_GROUP.get_command(click.Context(COMMAND_GROUP), name)
    assert command is not None
    options = [param for param in command.params if isinstance(param, click.Option)]
    return {"--help"} | {flag for option in options for flag in option.opts + option.secondary_opts}


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_of_a_page_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    fenced = re.findall(r"^```(?:sh|console)\n(.+?)^```", text, re.MULTILINE | re.DOTALL)
    code = "\n".join([*fenced, *(span.strip("`") for span in CODE.findall(text))])
    for command, arguments in COMMAND.findall(code):
        assert command in COMMANDS
        used = set(re.findall(r"(?:^|\s)(--?[a-z][\w-]*)", arguments, re.IGNORECASE))
        assert used <= flags_of(command), f"redrive {command} {arguments}"


def test_every_flag_stands_in_the_reference() -> None:
    sections = (DOCS / "reference" / "cli.md").read_text("utf-8").split("\n### ")
    pages = {section.split("\n")[0]: section for section in sections}
    shared = pages.pop(next(iter(pages)))
    assert set(pages) == set(COMMANDS)
    for command, page in pages.items():
        listed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", page + shared, re.IGNORECASE))
        assert flags_of(command) - {"--help", "-h"} <= listed, command


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.stem)
def test_runbook_begins_with_three_commands(page: Path) -> None:
    title, block, rest = page.read_text("utf-8").split("\n\n", 2)
    assert title == f"# {page.stem}"
    assert re.fullmatch(r"```sh\n(?:(?:kubectl|pulsar-admin|helm) .+\n){3}```", block)
    assert rest.startswith("## Meaning\n")


def security_statements() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each statement of the security model that has to be proven, with its tests."""
    text = SECURITY_MODEL.read_text("utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, *lines = section.splitlines()
        if title not in {"Actors", "Limits"}:
            rows = [line for line in lines if line.startswith("| ")][1:]
            assert rows
            for row in rows:
                _, statement, tests, _ = row.split("|")
                yield statement.strip(), TEST.findall(tests)


def test_statements_of_the_security_model_have_tests() -> None:
    statements = list(security_statements())
    assert len(statements) > 40
    for statement, tests in statements:
        assert tests, f"no test proves: {statement}"


def test_tests_of_the_security_model_are_marked_as_attacks(request: pytest.FixtureRequest) -> None:
    """So `-m attack` selects them all."""
    names = {f"{file}::{name}" for _, tests in security_statements() for file, name in tests}
    assert request.node.get_closest_marker("attack")
    for item in request.session.items:
        is_marked = item.get_closest_marker("attack") is not None
        assert is_marked == (re.split(r"[@\[]", item.nodeid)[0] in names), item.nodeid


def test_tests_named_by_pages_exist() -> None:
    names = {test for page in PAGES for test in TEST.findall(page.read_text("utf-8"))}
    assert len(names) > 40
    for file, name in names:
        source = (ROOT / file).read_text("utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), f"{file}::{name}"


@pytest.fixture(scope="module")
def docstrings() -> list[str]:
    """The docstring of each module of the package, in one line."""
    texts = (ast.get_docstring(ast.parse(module.read_text("utf-8"))) for module in MODULES)
    return [" ".join((text or "").lower().split()) for text in texts]


@pytest.mark.parametrize("term", SEARCHED)
def test_concept_is_found_by_its_usual_name(term: str, docstrings: list[str]) -> None:
    assert any(term in page.read_text("utf-8").lower() for page in DESIGN)
    assert any(term in docstring for docstring in docstrings)


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
