"""The blocks of commands in user pages, for tests that run them as written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README, INSTALL = "README.md", "docs/howto/install.md"
QUICK_START, AUDIT = "docs/howto/quick-start.md", "docs/howto/audit.md"
FIRST_CONSUMER, SANDBOX = "docs/tutorials/first-consumer.md", "docs/tutorials/sandbox.md"
READ = "docs/howto/read-dead-letters.md"
BACK_UP, GITOPS, ARGOCD, FLUX = (
    f"docs/howto/{name}.md" for name in ("back-up", "gitops", "argocd", "flux")
)
PAGES = (
    README,
    FIRST_CONSUMER,
    SANDBOX,
    INSTALL,
    QUICK_START,
    AUDIT,
    READ,
    BACK_UP,
    GITOPS,
    ARGOCD,
    FLUX,
)

_HEADING_OR_BLOCK = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|^```(?P<language>\w*)\n(?P<text>.+?)^```", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block, and the heading above it."""

    heading: str
    language: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield all fenced blocks of a page."""
    heading = ""
    for headings in _HEADING_OR_BLOCK.finditer((ROOT / page).read_text("utf-8")):
        if headings["heading"]:
            heading = headings["heading"]
        else:
            yield Block(heading, headings["language"], headings["text"])


def commands(page: str, heading: str | None = None) -> list[Block]:
    """Return the blocks of commands of a page, or of those under *heading*.

    Raises:
        LookupError: there are none.
    """
    commands = [
        block
        for block in blocks(page)
        if block.language == "sh" and heading in (None, block.heading)
    ]
    if not commands:
        msg = f"{page} has no block of commands under {heading!r}"
        raise LookupError(msg)
    return commands


def original(dead_letter: Any) -> tuple[dict[bytes, bytes], str, bytes | None]:  # noqa: ANN401 - no types
    """Decode an encoded dead letter as documented: properties, key and payload of its original."""
    [code] = [
        block.text
        for block in blocks("docs/reference/properties.md")
        if block.heading == "Messages that can't be copied"
    ]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own page
    message: tuple[dict[bytes, bytes], str, bytes | None] = names["original"](dead_letter)
    return message
