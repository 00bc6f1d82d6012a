"""Prose and names follow the countable rules of the style, in each folder and top-level page.

Prose is the text of pages and manifests; in Python it is docstrings, comments, strings, and the
names of functions and classes. Code in backticks, targets of links, and strings of tests are not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = "charts crds docs examples gitops images operator/redrive release sandbox tests".split()
PAGES = "CHANGELOG.md CONTRIBUTING.md Makefile README.md SECURITY.md".split()
SUFFIXES = {".Dockerfile", ".lua", ".md", ".py", ".sh", ".tpl", ".txt", ".yaml"}
GLOSSARY = "docs/reference/glossary.md"  # the only page that may use private words: it defines them

LONGEST_TEST_NAME = 60
MOST_WHAT = 2 / 1000  # of the words of docstrings, comments and pages
# No docstring begins with one of these.
FIRST_WORDS = re.compile(r"""\w?["']+\s*(What|Whether|How|Of|That)\b""")
VARIABLES = frozenset("each found given known left of said there told what".split())
STANDARD = {
    "aftermath": "outcome of replayed messages",
    "all the same": "anyway, or even if",
    "amiss": "wrong, or drifted",
    "anew": "again, or from scratch",
    "as far as (it|one|that|they) (can|could)": "as much as possible, or the limit itself",
    "be it": "even if",
    "beacons?": "outage reporter",
    "by (itself|themselves)": "automatically, or alone",
    "custody": "the name of the component, such as AckTimeouts",
    "dear": "expensive",
    "farewell": "deletion Event",
    "for ?ever": "permanently",
    "go(es|ing|ne)? on|went on": "continue, or resume",
    "(is|are|be|been|being|was|were) told": "reads, is notified, is shown",
    "he|him|his|himself|whom": "the component, or the user",
    "hear that": "detects, is notified",
    "heirs?": "successor",
    "in earnest": "in production",
    "in hand": "in-flight",
    "lest": "so that … not",
    r"(?<!dead[ -])(?<!retry[ -])(?<!case )letters?(?!,? (or |and )?digit)": "dead letter",
    "(a|another|each|every|first|its|last|next|one|per|the) look|(between|the) looks": "poll",
    "lost polic(y|ies)": "orphaned policy",
    "mend(s|ed|ing)?": "fix, or repair",
    "no(body| one)|somebody": "the component; no client; or a passive",
    "none is needed": "No action needed",
    "outlets?": "sender",
    "patience": "rate limit, or time-out",
    "rest(s|ed|ing)": "pending, or suspended",
    "(?<!-)standings?": "priority",
    "(a|another|each|every|first|last|next|one|second) (try|tries)": "attempt",
    "(a|each|every|free|its|next|one|their|whose) turns?": "slot",
    "wish(es|ed)?": "desired run state",
    "yet to be": "not yet",
}
PRIVATE = {
    re.compile(rf"\b({words})\b".replace(" ", r"\s"), re.IGNORECASE): standard
    for words, standard in STANDARD.items()
}
# One search, where nearly all text has none of them, costs half as much as one for each.
ANY_PRIVATE = re.compile(rf"\b({'|'.join(STANDARD)})\b".replace(" ", r"\s"), re.IGNORECASE)


class Prose(NamedTuple):
    """A piece of prose: the number of its first line, its kind, and its text without code."""

    line: int
    kind: str
    text: str


def prose(path: Path, nodes: Sequence[ast.AST]) -> Iterator[Prose]:
    """Yield the prose of *path*, whose syntax tree has *nodes* if it is Python.

    Each gap between lines is one character.
    """
    text = path.read_text("utf-8")
    pieces = _python(text, nodes) if path.suffix == ".py" else [Prose(1, "page", text)]
    for piece in pieces:
        plain = re.sub(r"`[^`\n]+`|\]\([^)\n]+\)", "", piece.text)
        yield piece._replace(text=re.sub(r"[ \t]*\n[ \t#]*", "\n", plain))


# A third of the time of `tokenize`. In Python 3.11 no string contains its own quotes.
COMMENT_OR_STRING = re.compile(
    r"""#.*|[a-zA-Z]{0,2}(\"{3}|'{3})(?:\\[\s\S]|[^\\])*?\1|[a-zA-Z]{0,2}(["'])(?:\\[\s\S]|(?!\2)[^\\])*\2"""
)


def _python(text: str, nodes: Sequence[ast.AST]) -> list[Prose]:
    pieces = [Prose(0, "module", "")]
    statements = {
        node.lineno
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr)
    }
    line, end = 1, 0
    for match in COMMENT_OR_STRING.finditer(text):
        line, end, last = line + text.count("\n", end, match.start()), match.start(), pieces[-1]
        if not match[0].startswith("#"):
            kind = "docstring" if line in statements else "string"
            pieces.append(Prose(line, kind, match[0]))
        elif last.kind == "comment" and line == last.line + last.text.count("\n") + 1:
            pieces[-1] = last._replace(text=f"{last.text}\n{match[0]}")
        else:
            pieces.append(Prose(line, "comment", match[0]))
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words = re.sub(r"_|(?<=[a-z])(?=[A-Z])", " ", node.name)
            pieces.append(Prose(node.lineno, "name", words))
    return pieces


def name_findings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the problem of each name of a variable or a test that breaks a rule."""
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    fields = {
        part.target for node in classes for part in node.body if isinstance(part, ast.AnnAssign)
    }
    for node in nodes:
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ) if name in VARIABLES and node not in fields:
                yield node.lineno, f"variable {name!r}: use a noun of its content"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if (
                name.startswith("test_") and len(name) > LONGEST_TEST_NAME
            ):
                yield node.lineno, f"name of a test of {len(name)} characters: {name}"


def prose_findings(path: Path, pieces: Sequence[Prose]) -> Iterator[tuple[int, str]]:
    """Yield the line and the problem of each docstring or word in *path* that breaks a rule."""
    for line, kind, text in pieces:
        if kind == "docstring" and (first := FIRST_WORDS.match(text)):
            yield line, f"docstring begins with {first[1]!r}: use a noun or an imperative"
        if path == ROOT / GLOSSARY or (kind == "string" and "tests" in path.parts):
            continue
        for private, standard in PRIVATE.items() if ANY_PRIVATE.search(text) else ():
            for match in private.finditer(text):
                at = line + text.count("\n", 0, match.start())
                yield at, f"{kind} has {' '.join(match[0].split())!r}: write {standard}"


def findings(files: Iterable[Path]) -> Iterator[str]:
    """Yield each finding in *files*, the prose of which is counted as a whole."""
    words: list[str] = []
    for path in files:
        is_python = path.suffix == ".py"
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8")))) if is_python else []
        pieces = list(prose(path, nodes))
        problems = [*prose_findings(path, pieces), *name_findings(nodes)]
        yield from (f"{path}:{line}: {problem}" for line, problem in sorted(problems))
        for piece in pieces:
            if piece.kind in {"docstring", "comment", "page"}:
                words += re.findall(r"[\w'-]+", piece.text.lower())
    if (count := words.count("what")) > MOST_WHAT * len(words):
        yield f"{count} 'what' in {len(words)} words; at most {int(MOST_WHAT * len(words))}"


def files_in(place: str) -> list[Path]:
    """Return the page *place*, or the files with prose in the folder *place* itself."""
    path = ROOT / place
    suffixes = {".py"} if place.startswith("tests") else SUFFIXES
    return [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in suffixes)


FOLDERS = sorted(
    {str(path.parent.relative_to(ROOT)) for tree in TREES for path in (ROOT / tree).rglob("*.*")}
)
PLACES = [*PAGES, *filter(files_in, FOLDERS)]


@pytest.mark.parametrize("place", PLACES)
def test_prose_and_names_follow_the_style(place: str) -> None:
    problems = list(findings(files_in(place)))
    assert not problems, "\n".join(["the style is broken:", *problems])


def test_each_broken_rule_is_reported_with_its_line(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""What a dead\nletter is, not a\n\nletter."""\n\n# The messages in\n# hand of `heir`.\n'
        f'def test_{56 * "x"}(left, right="for ever"):\n    "A dead-letter topic."\n',
        "utf-8",
    )
    page = tmp_path / "page.md"
    page.write_text("Hello\n`nobody` else\n[who](he) is\ntold, Dear what", "utf-8")
    *located, last = (f.removeprefix(f"{tmp_path}/") for f in findings([module, page]))
    assert [finding.split(": ")[0] for finding in located] == [
        "module.py:1",
        "module.py:4",
        "module.py:6",
        "module.py:8",
        "module.py:8",
        "module.py:8",
        "page.md:3",
        "page.md:4",
    ]
    assert last == "2 'what' in 23 words; at most 0"
