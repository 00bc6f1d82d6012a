"""The table of reasons has no row that no code uses."""

from __future__ import annotations

import ast
from pathlib import Path

import redrive
from redrive.errors import InvalidSpecError, OwnerConflictError, RedriveError
from redrive.reasons import Reason


def test_each_reason_is_used() -> None:
    """The documentation must not list a reason that nothing reports.

    Type checks refuse an unknown member, except of the errors that do not import the table.
    `docs/reference/reasons.md` is generated from it.
    """
    classes = (InvalidSpecError, OwnerConflictError, RedriveError)
    used = {Reason(error.reason).name for error in classes} | {
        node.attr
        for file in Path(redrive.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Reason"
    }
    assert {reason.name for reason in Reason} - used == set()
