from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redrive.api.conditions import ConditionStatus, StatusWarning
from redrive.policy.naming import TopicName
from redrive.provision import outcome
from redrive.provision.actions import Action, CreateSubscription
from redrive.provision.outcome import describe_changes, observed_conditions, paused_conditions

MakeBody = Callable[..., dict[str, Any]]
TOPIC = TopicName("shop", "prod", "orders")


@pytest.mark.parametrize(
    ("annotations", "is_paused"),
    [(None, False), ({}, False), ({"redrive.io/paused": "true"}, True),
     ({"redrive.io/paused": "false"}, False), ({"paused": "true"}, False)],
)  # fmt: skip
def test_an_annotation_pauses(
    policy: MakeBody, annotations: dict[str, str] | None, *, is_paused: bool
) -> None:
    body = policy()
    body["metadata"]["annotations"] = annotations
    assert outcome.is_paused(body) is is_paused


def conditions(*types: str) -> list[dict[str, str]]:
    return [
        {"type": t, "status": "True", "reason": "R", "message": "M",
         "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for t in types
    ]  # fmt: skip


def test_how_a_policy_stood_when_it_was_paused_stays_said(policy: MakeBody) -> None:
    found = conditions("Ready", "Reconciling", "LadderDescends", "Paused")
    body = policy() | {"status": {"observedGeneration": 7, "conditions": found}}
    said = paused_conditions(body)
    assert [c.type for c in said] == ["Ready", "LadderDescends", "Paused"]
    assert said[0].status is ConditionStatus.TRUE
    assert "remove the annotation" in said[2].message


def test_of_a_spec_that_is_new_to_a_pause_nothing_is_known(policy: MakeBody) -> None:
    body = policy() | {"status": {"observedGeneration": 6, "conditions": conditions("Ready")}}
    said = {c.type: c.status for c in paused_conditions(body)}
    assert said == {"Ready": ConditionStatus.UNKNOWN, "Paused": ConditionStatus.TRUE}


def test_a_policy_that_observes_is_ready_and_says_what_planned_changes_been_done() -> None:
    actions: list[Action] = [CreateSubscription(TOPIC, str(n) + "x" * 600) for n in range(40)]
    ready, differs, other = observed_conditions(actions, [StatusWarning("Other", "m")])
    assert (ready.type, ready.status, ready.reason) == ("Ready", ConditionStatus.TRUE, "Observed")
    assert (differs.type, other.type) == ("DriftDetected", "Other")
    assert "redrive would have created subscription 0x" in differs.message
    assert differs.message.endswith("; and 35 more")
    shown = describe_changes(actions)
    assert len(shown) == 32
    assert {len(action) for action in shown} == {512}


def test_where_nothing_differs_an_observer_says_no_more_than_that() -> None:
    assert [c.type for c in observed_conditions([], [])] == ["Ready"]
