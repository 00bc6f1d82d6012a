"""The reference of reasons holds all that conditions and Events can have, and nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import redrive.provision
from redrive import errors as common
from redrive.admin import errors as admin_errors
from redrive.admin import guards
from redrive.admin.guards import FenceClosedError
from redrive.api.conditions import PROGRESSING, READY, RECONCILING, STALLED
from redrive.errors import RedriveError
from redrive.kube import client as cluster_errors
from redrive.kube import status
from redrive.kube.client import ClusterUnknownError, LeaseLostError, NoClusterError
from redrive.provision import request
from redrive.replay.controller import reconciler as replays
from redrive.replay.controller import rights

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "reasons.md"
WARNINGS = REFERENCE.with_name("warnings.md")
LOGGED = (
    NoClusterError,
    ClusterUnknownError,
    LeaseLostError,
    FenceClosedError,
)
"""Of the operator as a whole: no object shows them."""
TYPES = {READY, RECONCILING, STALLED}


def errors() -> Iterator[type[RedriveError]]:
    """All that keeps an object from being ready."""
    for module in (common, admin_errors, guards, cluster_errors, request):
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, RedriveError):
                yield found


def modules() -> Iterator[ModuleType]:
    """Where reasons are that are no errors."""
    yield from (status, replays, rights)
    for found in pkgutil.walk_packages(redrive.provision.__path__, "redrive.provision."):
        yield importlib.import_module(found.name)


def constants() -> set[str]:
    """Reasons that are no errors: constants that are words in CamelCase."""
    return {
        value
        for module in modules()
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str) and re.fullmatch("([A-Z][a-z]+)+", value)
    } - TYPES


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    """Reason → how it is shown."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return dict(rows)


def test_every_reason_is_documented_and_no_other(documented: dict[str, str]) -> None:
    assert documented.keys() == constants() | {error.reason for error in errors()}


def test_what_stalls_an_object_is_told_from_what_is_waited_for(documented: dict[str, str]) -> None:
    for error in errors():
        if error.reason == RedriveError.reason or issubclass(error, LOGGED):
            shown = "Log"
        else:
            shown = STALLED if error.stalls else RECONCILING
        assert documented[error.reason] == shown, error


def test_a_reason_that_is_no_error_is_never_said_to_keep_an_object_from_being_ready(
    documented: dict[str, str],
) -> None:
    shown = {reason: documented[reason] for reason in constants()}
    assert shown.pop(PROGRESSING) == RECONCILING
    assert set(shown.values()) == {READY, "Warning", "Event"}


def test_every_condition_that_warns_is_documented(documented: dict[str, str]) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", WARNINGS.read_text("utf-8"), re.MULTILINE)
    listed = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    warned = {reason for reason, shown in documented.items() if shown == "Warning"}
    # Conflicts stall the younger policy, and are a warning of the older one.
    assert listed == warned | {"ResourceConflict", "NameCollision"}
