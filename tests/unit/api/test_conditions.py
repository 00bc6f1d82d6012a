from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

from redrive.api.conditions import READY, RECONCILING, Condition, ConditionStatus, merge

BEFORE = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
NOW = BEFORE + timedelta(minutes=5)


def ready(status: ConditionStatus, reason: str = "Provisioned") -> Condition:
    return Condition(type=READY, status=status, reason=reason, message="", observed_generation=1)


def test_a_first_condition_begins_now() -> None:
    (merged,) = merge([], [ready(ConditionStatus.TRUE)], NOW)
    assert merged.last_transition_time == NOW


def test_the_transition_time_stays_while_the_status_stays_though_the_reason_changes() -> None:
    old = merge([], [ready(ConditionStatus.FALSE, "TopicNotFound")], BEFORE)
    (merged,) = merge(old, [ready(ConditionStatus.FALSE, "BrokerUnreachable")], NOW)
    assert merged.reason == "BrokerUnreachable"
    assert merged.last_transition_time == BEFORE


def test_the_transition_time_changes_with_the_status() -> None:
    old = merge([], [ready(ConditionStatus.FALSE)], BEFORE)
    (merged,) = merge(old, [ready(ConditionStatus.TRUE)], NOW)
    assert merged.last_transition_time == NOW


def test_the_first_year_there_is_has_four_digits_when_it_is_written_too() -> None:
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


def test_a_condition_that_is_not_named_any_more_is_gone() -> None:
    waiting = Condition(
        type=RECONCILING, status=ConditionStatus.TRUE, reason="TopicNotFound", message="x"
    )
    old = merge([], [ready(ConditionStatus.FALSE), waiting], BEFORE)
    assert [c.type for c in merge(old, [ready(ConditionStatus.TRUE)], NOW)] == [READY]


def test_a_condition_reads_back_what_it_wrote() -> None:
    (condition,) = merge([], [ready(ConditionStatus.UNKNOWN)], NOW)
    assert Condition.model_validate(condition.to_manifest()) == condition


def test_moments_are_written_in_utc_and_whole_seconds() -> None:
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
