"""Health checks of Flux: every state of an object has the documented status."""

from __future__ import annotations

import pytest

from release import gitops
from tests.support import flux

WAITS = {"new": "Unknown", "progressing": "InProgress", "changed": "InProgress"}
BY_EXPRESSION = {
    "BrokerConnection": {
        **WAITS,
        "connected": "Current",
        "warning": "Current",
        "unreachable": "InProgress",
        "refused": "Failed",
    },
    "RetryPolicy": {
        **WAITS,
        "provisioned": "Current",
        "warning": "Current",
        "observed": "Current",
        "waiting": "InProgress",
        "stalled": "Failed",
        "paused": "Current",
        "paused-new": "InProgress",
    },
}
REPLAYS = {
    "new": "Current",
    "waiting": "InProgress",
    "running": "InProgress",
    "suspended": "InProgress",
    "awaiting-approval": "InProgress",
    "stalled": "Failed",
    "completed": "Current",
    "completed-with-refusals": "Current",
    "planned": "Current",
    "failed": "Failed",
    "canceled": "Failed",
    "changed-after-its-end": "InProgress",
}


@pytest.mark.parametrize("kind", BY_EXPRESSION)
def test_status_by_expressions_is_as_documented(kind: str) -> None:
    checks = flux.expressions()[kind]
    statuses = {name: flux.evaluate(checks, body) for name, body in gitops.states(kind).items()}
    assert statuses == BY_EXPRESSION[kind]


@pytest.mark.parametrize("kind", BY_EXPRESSION)
def test_kstatus_differs_only_for_unread_objects(kind: str) -> None:
    statuses = {name: flux.kstatus(body) for name, body in gitops.states(kind).items()}
    assert statuses == BY_EXPRESSION[kind] | {"new": "Current"}


def test_kstatus_of_replays_follows_their_conditions() -> None:
    statuses = {name: flux.kstatus(body) for name, body in gitops.states("Replay").items()}
    assert statuses == REPLAYS


def test_expressions_are_for_the_kinds_that_belong_in_git() -> None:
    checks = flux.expressions()
    assert checks.keys() == BY_EXPRESSION.keys()
    assert {check["apiVersion"] for check in checks.values()} == {"redrive.io/v1beta1"}
