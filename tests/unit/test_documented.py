"""Each block of commands or code of each page is run by a test, as it is written."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from redrive.api.crds import crds
from redrive.kube.resources import USABLE_BY
from redrive.lint.checks import lint
from redrive.lint.manifests import Manifests
from tests.support import documented
from tests.support.documented import (
    API,
    CHECK,
    CONTRIBUTING,
    INSTALL,
    ORDER,
    OUTAGES,
    QUICK_START,
    READ,
    README,
    RELEASE,
    REPLAYS_PAGE,
    RIGHTS,
    ROCKETMQ,
    ROOT,
    Block,
    block,
    blocks,
    commands,
)
from tests.support.manifests import VALID, manifest

PAGES = [
    README,
    CONTRIBUTING,
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
]


SHOWN = "text"
"""Language of blocks that show an output or a diagram, and are not run."""
READERS = {
    "block": None,
    "blocks": None,
    "commands": "sh",
    "follow": "sh",
    "command_lines": "sh",
    "steps": "console",
}
"""Functions by which a test reads blocks, with the language that they read."""
_PLAIN = (
    ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.Starred,
    ast.JoinedStr, ast.FormattedValue,
)  # fmt: skip


class Reading(NamedTuple):
    """Blocks that a test reads; None stands for all headings, and for all languages."""

    page: str
    heading: str | None
    language: str | None

    def covers(self, page: str, block: Block) -> bool:
        """Return True if the test reads *block* of *page*."""
        return self.page == page and all(
            wanted in {None, is_} for wanted, is_ in zip(self[1:], block[:2], strict=True)
        )


def evaluate(nodes: Sequence[ast.expr], names: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of expressions of literals and *names*; None for any other."""
    whole = ast.Expression(ast.fix_missing_locations(ast.List(list(nodes), ast.Load())))
    if not all(isinstance(node, _PLAIN) for node in ast.walk(whole)):
        return None
    try:
        return list(eval(compile(whole, "test", "eval"), {}, dict(names)))  # noqa: S307  plain
    except NameError:
        return None


def readings(source: str) -> Iterator[Reading]:
    """Yield the blocks that the source of a test reads by `tests.support.documented`.

    If a page or heading is a variable, all pairs of a page and a heading in the test are read.
    """
    tree = ast.parse(source)
    names = {name: value for name, value in vars(documented).items() if name.isupper()}
    pairs, languages = set[tuple[str, str]](), set[str | None]()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value):
                names |= zip([name], evaluate([value], names) or (), strict=False)
            case ast.Tuple(elts=[_, _, *_]):
                match evaluate(node.elts[:2], names):
                    case [str(page), str(heading)] if page in PAGES:
                        pairs.add((page, heading))
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in READERS:
                keywords = [k.value for k in node.keywords if k.arg == "language"]
                language = READERS[name] or next(iter(evaluate(keywords, names) or ()), None)
                arguments = evaluate(node.args, names)
                if name == "block":
                    [language] = evaluate(node.args[2:], names) or (None,)
                if arguments is None:
                    languages.add(language)
                elif name in {"blocks", "command_lines"}:
                    yield from (Reading(page, None, language) for page in arguments)
                else:
                    page, heading, *_ = *arguments, None
                    yield Reading(page, heading, language)
    for (page, heading), language in itertools.product(pairs, languages):
        yield Reading(page, heading, language)


@functools.cache
def all_readings() -> list[Reading]:
    """Return the blocks that all tests read."""
    sources = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("*.py")]
    tests = [
        text for text in sources if re.search("^from tests.support.documented", text, re.MULTILINE)
    ]
    own = Path(documented.__file__).read_text("utf-8")
    return [reading for text in [own, *tests] for reading in readings(text)]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_read_by_a_test(page: str) -> None:
    """A block of another language than `text` is run, validated, or compared with an output."""
    runnable = [block for block in blocks(page) if block.language != SHOWN]
    assert [b for b in runnable if not any(r.covers(page, b) for r in all_readings())] == []


def test_shown_texts_have_no_prompt() -> None:
    """A block of commands with outputs is `console`: a test compares it."""
    shown = list(blocks(*PAGES, language=SHOWN))
    assert [b.heading for b in shown if re.search(r"^\$ ", b.text, re.MULTILINE)] == []


def dry_run(text: str) -> str:
    """Return the commands that the make targets of a block would run."""
    dry = text.replace("make ", "make --dry-run ")
    run = subprocess.run(
        ["/bin/sh", "-euc", dry], cwd=ROOT, check=False, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_make_targets_of_the_front_pages_exist() -> None:
    """The end-to-end tests cover `make demo`; `make test` runs the tests."""
    [tried], [contributed] = commands(README, "Try it"), commands(CONTRIBUTING)
    assert "sandbox.demo" in dry_run(tried.text)
    assert "ruff check" in dry_run(contributed.text)
    released, _builds = commands(RELEASE, "Release redrive")
    assert "release.archives" in dry_run(released.text)


@pytest.mark.parametrize(
    ("page", "heading"), [(INSTALL, "Uninstall"), (QUICK_START, "8. Remove it")]
)
def test_removal_by_the_page_deletes_each_crd(page: str, heading: str) -> None:
    [removal] = commands(page, heading)
    [names] = re.findall("^kubectl delete crd (.+)$", removal.text, re.MULTILINE)
    assert sorted(names.split()) == sorted(crd["metadata"]["name"] for crd in crds())


def findings(text: str) -> list[str]:
    """Return the findings in manifests."""
    manifests = Manifests("shop")
    manifests.add("page.yaml", text.encode())
    return [str(finding) for finding in lint(manifests, datetime(2026, 1, 1, tzinfo=UTC))]


def completed(kind: str, fields: str) -> str:
    """Return a manifest of *kind* with *fields* of its spec, as the page has them."""
    least = {name: value for name, value in VALID[kind].items() if f"{name}:" not in fields}
    head = yaml.safe_dump(manifest(kind) | {"spec": least})
    return head + textwrap.indent(fields, "  ")


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        (ORDER, "Order of a key"),
        (ORDER, "Order beyond a dead letter"),
        (OUTAGES, "Enable it"),
    ],
)
def test_policy_fields_of_a_page_are_valid(page: str, heading: str) -> None:
    fields = textwrap.dedent(block(page, heading, "yaml").removeprefix("spec:\n"))
    assert findings(completed("RetryPolicy", fields)) == []


def test_replay_fields_of_the_page_are_valid() -> None:
    whole, *parts = [b.text for b in blocks(REPLAYS_PAGE, language="yaml")]
    assert findings(whole) == []
    choices = [part.splitlines() if part.count("select:") > 1 else [part] for part in parts]
    assert sum(map(len, choices)) == 7
    for fields in itertools.chain.from_iterable(choices):
        assert findings(completed("Replay", fields)) == [], fields


def test_examples_of_api_pages_are_valid() -> None:
    examples = list(blocks(*API, language="yaml"))
    assert [b.heading for b in examples] == ["Example"] * len(API)
    assert [finding for b in examples for finding in findings(b.text)] == []


def test_rules_and_consent_of_the_page_are_valid() -> None:
    rules = block(RIGHTS, "Rules of a connection", "yaml")
    assert findings(completed("BrokerConnection", rules)) == []
    consent = yaml.safe_load(block(RIGHTS, "Consent of the owner", "yaml"))
    assert list(consent["metadata"]["annotations"]) == [USABLE_BY]


def test_inspection_fields_of_a_connection_are_valid() -> None:
    blocks = block(RIGHTS, "Of Inspections", "yaml"), block(RIGHTS, "Destinations", "yaml")
    role, destinations = (yaml.safe_load(text)["spec"]["inspection"] for text in blocks)
    connection = manifest("BrokerConnection", inspection=role | destinations)
    assert findings(yaml.safe_dump(connection)) == []
    example = (ROOT / "examples/04-rocketmq/1-connection.yaml").read_text("utf-8")
    rocketmq = yaml.safe_load(example)
    added = yaml.safe_load(block(ROCKETMQ, "Read dead letters", "yaml"))["spec"]["rocketmq"]
    rocketmq["spec"]["rocketmq"] |= added
    assert findings(yaml.safe_dump(rocketmq)) == []
    assert findings(block(ROCKETMQ, "Replay dead letters", "yaml")) == []


def test_inspection_of_the_page_is_valid() -> None:
    assert findings(block(READ, "With an Inspection", "yaml")) == []


def test_disabled_rules_of_the_page_hide_findings() -> None:
    text = block(CHECK, "Disable a rule", "yaml").removeprefix("spec:\n")
    fields = textwrap.dedent(text)
    assert findings(completed("RetryPolicy", fields)) == []
    uncommented = findings(completed("RetryPolicy", re.sub("#.*", "", fields)))
    assert len(uncommented) == 2


def test_hook_and_action_of_the_page_exist() -> None:
    hooks = yaml.safe_load(block(CHECK, "In a pre-commit hook", "yaml"))
    [defined] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    [hook] = hooks["repos"][0]["hooks"]
    assert hook["id"] == defined["id"]
    steps = yaml.safe_load(block(CHECK, "In GitHub Actions", "yaml"))["steps"]
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    assert set(steps[1]["with"]) <= set(action["inputs"])


def test_schemas_that_the_page_names_exist() -> None:
    editor = block(CHECK, "In the editor, and with kubeconform", "yaml")
    [path] = re.findall(r"/v0\.1\.0/(\S+\.json)", editor)
    assert (ROOT / path).is_file()
    shell = block(CHECK, "In the editor, and with kubeconform", "sh")
    [template] = re.findall(r"'(docs/\S+)'", shell)
    file = template.replace("{{.Group}}", "redrive.io").replace(
        "{{.ResourceAPIVersion}}", "v1beta1"
    )
    for crd in crds():
        kind = crd["spec"]["names"]["kind"].lower()
        assert (ROOT / file.replace("{{.ResourceKind}}", kind)).is_file()
