"""The blocks of commands in user pages, for tests that run them as written."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README, INSTALL = "README.md", "docs/howto/install.md"
QUICK_START, AUDIT = "docs/howto/quick-start.md", "docs/howto/audit.md"
FIRST_CONSUMER, SANDBOX = "docs/tutorials/first-consumer.md", "docs/tutorials/sandbox.md"
READ, ROCKETMQ = "docs/howto/read-dead-letters.md", "docs/howto/rocketmq.md"
RESPOND, BLOCKED_KEY = "docs/howto/respond.md", "docs/howto/blocked-key.md"
CONSUME, HANDLE = "docs/howto/consume.md", "docs/howto/handle.md"
FORKS, PRODUCE = "docs/howto/forks.md", "docs/howto/produce.md"
POISON_MESSAGES, SPARK = "docs/howto/poison-messages.md", "docs/howto/spark.md"
OUTAGES, CHECK = "docs/howto/outages.md", "docs/howto/check-manifests.md"
DEVELOP, PROBES = "docs/howto/develop.md", "docs/howto/probes.md"
ORDER, RELEASE = "docs/howto/order.md", "docs/howto/release.md"
REPLAYS_PAGE, RIGHTS = "docs/reference/replays.md", "docs/reference/rights.md"
CONSUMER_METRICS, METRICS = "docs/reference/consumer-metrics.md", "docs/reference/metrics.md"
JOB_TEMPLATES, SELECTION = "docs/reference/job-templates.md", "docs/reference/selection.md"
GO, JAVA = "docs/reference/go.md", "docs/reference/java.md"
PROPERTIES, CONTRIBUTING = "docs/reference/properties.md", "CONTRIBUTING.md"
RUNBOOKS, API = (
    sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob(pattern))
    for pattern in ("runbooks/Redrive*.md", "reference/api/*.md")
)
BACK_UP, GITOPS, ARGOCD, FLUX = (
    f"docs/howto/{name}.md" for name in ("back-up", "gitops", "argocd", "flux")
)

_HEADING_OR_BLOCK = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.+?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


_VARIABLE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ|\b\d\d:\d\d:\d\d\b)"
    r"|(?P<name>(?<=fulfilment-)[a-z0-9]{5}\b)|(?P<rest>…)|(?P<gap> {2,})"
)
"""Parts of a shown output that differ in each run, `…` for a part that is left out, and gaps."""


class Block(NamedTuple):
    """A fenced block, and the heading above it."""

    heading: str
    language: str
    text: str


def blocks(*pages: str, language: str | None = None) -> Iterator[Block]:
    """Yield the fenced blocks of pages, of all languages unless one is given."""
    for page in pages:
        heading = ""
        for match in _HEADING_OR_BLOCK.finditer((ROOT / page).read_text("utf-8")):
            if match["heading"]:
                heading = match["heading"]
            elif language in {None, match["language"]}:
                yield Block(heading, match["language"], textwrap.dedent(match["text"]))


class Step(NamedTuple):
    """A command of a block with prompts, and the output that the page shows."""

    command: str
    output: str


def block(page: str, heading: str, language: str) -> str:
    """Return the text of the one block of a language under a heading."""
    [text] = [b.text for b in blocks(page) if (b.heading, b.language) == (heading, language)]
    return text


def steps(page: str, heading: str) -> Iterator[Step]:
    """Yield the commands under a heading with their outputs."""
    shown = [b.text for b in blocks(page, language="console") if b.heading == heading]
    for command in re.split(r"^\$ ", "".join(shown), flags=re.MULTILINE)[1:]:
        line, _, output = command.partition("\n")
        yield Step(line, output)


def shows(shown: str, output: str) -> bool:
    """Return True if a page shows *output*; a line `…` stands for any number of lines."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else f"{_line_pattern(line)}\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, output) is not None


def _line_pattern(line: str) -> str:
    patterns = {
        "time": r"[\d:TZ-]+(?: \d\d:\d\d)?",
        "name": "[a-z0-9]{5}",
        "rest": ".*",
        "gap": " +",
    }
    pattern, end = "", 0
    for part in _VARIABLE.finditer(line):
        pattern += re.escape(line[end : part.start()]) + patterns[str(part.lastgroup)]
        end = part.end()
    return pattern + re.escape(line[end:])


def commands(page: str, heading: str | None = None) -> list[Block]:
    """Return the blocks of commands of a page, or of those under *heading*.

    Raises:
        LookupError: there are none.
    """
    commands = [b for b in blocks(page, language="sh") if heading in (None, b.heading)]
    if not commands:
        msg = f"{page} has no block of commands under {heading!r}"
        raise LookupError(msg)
    return commands


def command_lines(*pages: str) -> set[str]:
    """Return the lines of all blocks of commands of pages."""
    return {line for block in blocks(*pages, language="sh") for line in block.text.splitlines()}


def original(dead_letter: Any) -> tuple[dict[bytes, bytes], str, bytes | None]:  # noqa: ANN401 - no types
    """Decode an encoded dead letter as documented: properties, key and payload of its original."""
    names: dict[str, Any] = {}
    exec(block(PROPERTIES, "Messages that can't be copied", "python"), names)  # noqa: S102 - our own page
    message: tuple[dict[bytes, bytes], str, bytes | None] = names["original"](dead_letter)
    return message
