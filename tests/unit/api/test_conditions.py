"""Conditions, and the reference of their reasons."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from redrive.api.conditions import (
    MAX_CONDITIONS,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    ConditionStatus,
    StatusWarning,
    failed,
    merge,
    warning,
)
from redrive.reasons import Reason, Shown

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


def test_merge_cuts_the_last_of_too_many_warnings() -> None:
    warnings = [warning(StatusWarning(f"Warning{n}", "a warning")) for n in range(40)]
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


WARNINGS = Path(__file__).parents[3] / "docs" / "reference" / "warnings.md"


def test_errors_are_shown_where_their_reason_is() -> None:
    """An error stalls its object or is waited for; a log line has no condition."""
    stalled, waited = (
        {reason for reason in Reason if failed(reason.error("a", remedy="b"))[1].type == kind}
        for kind in (STALLED, RECONCILING)
    )
    assert stalled == {reason for reason in Reason if reason.shown is Shown.STALLED}
    assert Reason.INTERNAL_ERROR in waited
    assert all(Reason.of(reason.error("a", remedy="b")) is reason for reason in Reason)


def test_every_warning_condition_is_documented() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", WARNINGS.read_text("utf-8"), re.MULTILINE)
    listed = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    warned = {str(reason) for reason in Reason if reason.shown is Shown.WARNING}
    # Conflicts stall the younger policy, and are a warning of the older one.
    # A run that waits for its approval is not ready, and needs attention.
    assert listed == warned | {"ResourceConflict", "NameCollision", "ApprovalRequired"}
