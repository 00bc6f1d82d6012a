"""Prose keeps to the standard words of Kubernetes, Kafka and Pulsar; a short list is banned.

Prose is what users and contributors read: pages, descriptions in CRDs, the chart, the examples,
and of Python its docstrings, comments and strings. Code in backticks on a page is no prose.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What is banned, as a regular expression of whole words, and what to write in its place.
STANDARD = {
    r"amiss": "wrong, or drifted",
    r"anew": "again, or from scratch",
    r"custody": "the component's name, such as AckTimeouts",
    r"dear": "expensive",
    r"farewell": "deletion Event",
    r"(is|are|be|been|being|was|were) told": "what happens: reads, is notified, is shown",
    r"hear that": "what happens: detects, is notified",
    r"he|him|his|himself": "the component, or the user",
    r"in earnest": "in production",
    r"lest": "so that … not",
    r"mend(s|ed|ing)?": "fix, or repair",
    r"nobody": "none, or the component that does not",
    r"patience": "rate limit, or time-out",
    r"somebody": "the component, or a passive: was changed",
    r"whom": "the component, or a role",
}
GAP = r"[\s#]+"  # between words that a line break parts, in a comment too
BANNED = {
    re.compile(rf"\b({words.replace(' ', GAP)})\b", re.IGNORECASE): standard
    for words, standard in STANDARD.items()
}
PROSE_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
SUFFIXES = {".md", ".py", ".tpl", ".txt", ".yaml"}


def written_in(tree: Path) -> Iterator[Path]:
    """Yield the files below *tree* that have prose."""
    return (path for path in tree.rglob("*") if path.suffix in SUFFIXES)


TREES = ("charts", "crds", "docs", "examples", "operator/redrive", "release", "sandbox")
FOLDERS = sorted(
    {str(path.parent.relative_to(ROOT)) for tree in TREES for path in written_in(ROOT / tree)}
)
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "README.md", "SECURITY.md")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the pieces of prose in *path*, each with the number of its first line."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in PROSE_TOKENS:
                yield token.start[0], token.string
        return
    if path.name == "CHANGELOG.md":
        text = "\n## ".join(text.split("\n## ")[:2])  # what is released stays as it is
    yield 1, re.sub(r"`[^`\n]+`", "", text) if path.suffix == ".md" else text


def findings(path: Path) -> Iterator[str]:
    """Yield `file:line` of each banned word in *path*, with what to write in its place."""
    for line, text in prose(path):
        for banned, standard in BANNED.items():
            for found in banned.finditer(text):
                at = line + text.count("\n", 0, found.start())
                yield f"{path}:{at}: {found.group()!r}: write {standard}"


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_no_banned_word_is_used(name: str) -> None:
    top = ROOT / name
    files = [top] if top.is_file() else [p for p in top.iterdir() if p.suffix in SUFFIXES]
    found = [finding for path in sorted(files) for finding in findings(path)]
    assert not found, "\n".join(["banned words, and the standard ones:", *found])


def test_a_banned_word_is_found_with_its_line(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Fine.\n\nIt is\ntold Nobody\n"""\nnobody = f"whom{1}"  # mends\n', "utf-8"
    )
    page = tmp_path / "page.md"
    page.write_text("Hello\n`nobody` else\nwho is\ntold, Dear", "utf-8")
    found = [finding.split(":")[1] for path in (module, page) for finding in findings(path)]
    assert sorted(found) == ["3", "3", "4", "4", "6", "6"]
