"""Conditions, and the reference of their reasons."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType

import pytest

import redrive.provision
from redrive import errors as common
from redrive.admin import errors as admin_errors
from redrive.admin import guards
from redrive.admin.guards import FenceClosedError
from redrive.api.conditions import (
    COMPLETE,
    FAILED,
    MAX_CONDITIONS,
    PROGRESSING,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    ConditionStatus,
    Reason,
    StatusWarning,
    merge,
    warning,
)
from redrive.errors import RedriveError
from redrive.kube import client as cluster_errors
from redrive.kube import status
from redrive.kube.client import ClusterUnknownError, LeaseLostError, NoClusterError
from redrive.provision import request
from redrive.replay.controller import reconciler as replays
from redrive.replay.controller import rights

BEFORE = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
NOW = BEFORE + timedelta(minutes=5)


def ready(status: ConditionStatus, reason: str = "Provisioned") -> Condition:
    return Condition(type=READY, status=status, reason=reason, message="", observed_generation=1)


def test_new_condition_transitions_now() -> None:
    (merged,) = merge([], [ready(ConditionStatus.TRUE)], NOW)
    assert merged.last_transition_time == NOW


@pytest.mark.parametrize(
    ("status", "moment"), [(ConditionStatus.FALSE, BEFORE), (ConditionStatus.TRUE, NOW)]
)
def test_transition_time_changes_only_with_the_status(
    status: ConditionStatus, moment: datetime
) -> None:
    old = merge([], [ready(ConditionStatus.FALSE, "TopicNotFound")], BEFORE)
    (merged,) = merge(old, [ready(status, "BrokerUnreachable")], NOW)
    assert merged.reason == "BrokerUnreachable"
    assert merged.last_transition_time == moment


def test_transition_time_in_year_1_keeps_four_digits() -> None:
    read = Condition.model_validate(
        {
            "type": READY,
            "status": "True",
            "reason": "Provisioned",
            "message": "",
            "lastTransitionTime": "0001-01-01T00:00:00Z",
        }
    )
    assert read.to_manifest()["lastTransitionTime"] == "0001-01-01T00:00:00Z"


def test_merge_removes_conditions_without_a_new_value() -> None:
    waiting = Condition(
        type=RECONCILING, status=ConditionStatus.TRUE, reason="TopicNotFound", message="x"
    )
    old = merge([], [ready(ConditionStatus.FALSE), waiting], BEFORE)
    assert [c.type for c in merge(old, [ready(ConditionStatus.TRUE)], NOW)] == [READY]


def test_merge_cuts_the_last_of_too_many_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reason, "declared", set())  # not the product's reasons
    warnings = [warning(StatusWarning(Reason(f"Warning{n}"), "a warning")) for n in range(40)]
    merged = merge((), [ready(ConditionStatus.TRUE), *warnings], NOW)
    assert len(merged) == MAX_CONDITIONS
    assert [merged[0].type, merged[-1].type] == ["Ready", "Warning30"]


def test_condition_round_trips_through_its_manifest() -> None:
    (condition,) = merge([], [ready(ConditionStatus.UNKNOWN)], NOW)
    assert Condition.model_validate(condition.to_manifest()) == condition


def test_transition_time_is_written_in_utc_seconds() -> None:
    moment = datetime(2026, 11, 21, 10, 5, 3, 999, tzinfo=timezone(timedelta(hours=1)))
    (condition,) = merge([], [ready(ConditionStatus.TRUE)], moment)
    assert condition.to_manifest() == {
        "type": "Ready",
        "status": "True",
        "reason": "Provisioned",
        "message": "",
        "lastTransitionTime": "2026-11-21T09:05:03Z",
        "observedGeneration": 1,
    }


REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "reasons.md"
WARNINGS = REFERENCE.with_name("warnings.md")
LOGGED = (
    NoClusterError,
    ClusterUnknownError,
    LeaseLostError,
    FenceClosedError,
)
"""Errors of the whole operator: no object shows them."""
TYPES = {READY, RECONCILING, STALLED, COMPLETE, FAILED}


def errors() -> Iterator[type[RedriveError]]:
    """Classes of errors that keep an object from being ready."""
    for module in (common, admin_errors, guards, cluster_errors, request):
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, RedriveError):
                yield value


def modules() -> Iterator[ModuleType]:
    """Modules that define reasons without an error class."""
    yield from (status, replays, rights)
    for module in pkgutil.walk_packages(redrive.provision.__path__, "redrive.provision."):
        yield importlib.import_module(module.name)


def constants() -> set[str]:
    """Reasons without an error class: constants whose values are in CamelCase."""
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


def test_documented_error_is_stalled_or_reconciling(documented: dict[str, str]) -> None:
    for error in errors():
        if error.reason == RedriveError.reason or issubclass(error, LOGGED):
            shown = "Log"
        else:
            shown = STALLED if error.stalls else RECONCILING
        assert documented[error.reason] == shown, error


def test_documented_reason_without_error_is_not_stalled(
    documented: dict[str, str],
) -> None:
    shown = {reason: documented[reason] for reason in constants()}
    assert shown.pop(PROGRESSING) == RECONCILING
    assert set(shown.values()) == {READY, "Warning", "Event"}


def test_every_warning_condition_is_documented(documented: dict[str, str]) -> None:
    rows = re.findall(r"^\| (`.*?`) \|", WARNINGS.read_text("utf-8"), re.MULTILINE)
    listed = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    warned = {reason for reason, shown in documented.items() if shown == "Warning"}
    # Conflicts stall the younger policy, and are a warning of the older one.
    # A run that waits for its approval is not ready, and needs attention.
    assert listed == warned | {"ResourceConflict", "NameCollision", "ApprovalRequired"}
