"""The chart's README: a table of its values, from the comments in values.yaml.

A comment that begins with `# --` describes the value that follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from release import CHART, page

README = CHART / "README.md"
_HEAD = f"""# redrive

The Helm chart of the operator, its rights and its kinds:
[How to install it]({page("docs/howto/install.md")}).

Generated from [values.yaml]({page("charts/redrive/values.yaml")}) by `python -m release`.
The types of all values are in [values.schema.json]({page("charts/redrive/values.schema.json")}).

| value | default | what |
|---|---|---|
"""


class Value(NamedTuple):
    """One row of the table."""

    path: str
    default: object
    description: str


def render() -> str:
    """Return the README. Its links are absolute, because a registry shows it without the rest."""
    text = (CHART / "values.yaml").read_text("utf-8")
    rows = [
        f"| `{value.path}` | `{json.dumps(value.default)}` | {value.description} |"
        for value in values(text)
    ]
    return _HEAD + re.sub(r"docs/[\w./-]+\.md", _link, "\n".join(rows)) + "\n"


def _link(path: re.Match[str]) -> str:
    return f"[{path[0]}]({page(path[0])})"


def values(text: str) -> Iterator[Value]:
    """Yield each value of a values.yaml that is described, in its order."""
    whole = yaml.safe_load(text)
    parents: list[tuple[int, str]] = []
    description: list[str] | None = None
    for line in text.splitlines():
        comment = re.fullmatch(r"\s*# (-- )?(.+)", line)
        if comment and comment[1]:
            description = [comment[2]]
        elif comment and description is not None:
            description.append(comment[2])
        elif key := re.match(r"( *)(\w+):", line):
            depth = len(key[1])
            parents = [(at, name) for at, name in parents if at < depth] + [(depth, key[2])]
            if description is not None:
                names = [name for _, name in parents]
                yield Value(".".join(names), _at(whole, names), " ".join(description))
            description = None


def _at(value: object, names: list[str]) -> object:
    for name in names:
        assert isinstance(value, dict)  # noqa: S101  lines and document are the same text
        value = value[name]
    return value
