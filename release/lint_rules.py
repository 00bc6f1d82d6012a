"""The reference of the rules of `redrive lint`, from the table of the rules.

`python -m release` writes `docs/reference/lint-rules.md`.
"""

from __future__ import annotations

from redrive.lint.rules import LintRule
from release import CHECKOUT

PAGE = CHECKOUT / "docs" / "reference" / "lint-rules.md"
_INTRODUCTION = """# Rules of `redrive lint`

[How to check manifests](../howto/check-manifests.md) shows the command. Names of rules are stable.
An error is refused by the API server or the operator; a warning works, and is rarely meant. A rule
that the operator checks as well has the name of its [reason](reasons.md): `topic-not-allowed` is
`TopicNotAllowed`.

Generated from `redrive.lint.rules` by `python -m release`.

| rule | severity | meaning |
|---|---|---|
"""


def render() -> str:
    """Write the page."""
    rows = (f"| `{rule.id}` | {rule.severity} | {rule.meaning} |\n" for rule in LintRule)
    return _INTRODUCTION + "".join(rows)
