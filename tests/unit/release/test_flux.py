"""Health checks of Flux: every state of an object has the documented status."""

from __future__ import annotations

import re

import pytest

from release import CHECKOUT, gitops
from tests.support import argocd, flux

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
    "RocketMQRetryPolicy": {
        "new": "Unknown",
        "provisioned": "Current",
        "waiting": "InProgress",
        "stalled": "Failed",
        "paused": "Current",
    },
}
REPLAYS = {
    "new": "Current",
    "waiting": "InProgress",
    "running": "InProgress",
    "suspended": "InProgress",
    "awaiting-approval": "InProgress",
    "in-review": "InProgress",
    "stalled": "Failed",
    "completed": "Current",
    "completed-with-refusals": "Current",
    "planned": "Current",
    "failed": "Failed",
    "canceled": "Failed",
    "changed-after-its-end": "InProgress",
}

NAME = re.compile("Progressing|Healthy|Degraded|Suspended|waits|Current|InProgress|Failed")
UNKNOWN = {"Unknown": "waits"}
TABLE = (
    ("not read", [("RetryPolicy", "new")]),
    ("Ready", [("RetryPolicy", "provisioned")]),
    ("Ready, with a", [("RetryPolicy", "warning")]),
    ("Reconciling", [("RetryPolicy", "waiting")]),
    ("Stalled", [("RetryPolicy", "stalled")]),
    ("paused", [("RetryPolicy", "paused"), ("RetryPolicy", "paused-new")]),
    ("suspended", [("Replay", "suspended"), ("Replay", "awaiting-approval")]),
    ("`Complete`, `Failed`", [("Replay", "completed"), ("Replay", "failed")]),
)
"""Rows of the table on the page: words of the state, and examples."""


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


def test_health_table_of_the_page_is_true() -> None:
    page = (CHECKOUT / "docs/howto/gitops.md").read_text("utf-8")
    table = page.partition("## Health\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    checks = flux.expressions()
    statuses = {
        (kind, name): (
            argocd.health((gitops.CUSTOMIZATIONS / kind / "health.lua").read_text(), body)[
                "status"
            ],
            flux.evaluate(checks[kind], body) if kind in checks else flux.kstatus(body),
        )
        for kind in ("RetryPolicy", "Replay")
        for name, body in gitops.states(kind).items()
    }
    assert len(rows) == len(TABLE) + 1
    for (label, *cells), (words, examples) in zip(rows[1:], TABLE, strict=True):
        assert words in label
        for tool, cell in enumerate(cells):
            shown = [statuses[example][tool] for example in examples]
            distinct = list(dict.fromkeys(UNKNOWN.get(status, status) for status in shown))
            assert distinct == NAME.findall(cell)


def test_expressions_are_for_the_kinds_that_belong_in_git() -> None:
    checks = flux.expressions()
    assert checks.keys() == BY_EXPRESSION.keys()
    assert {check["apiVersion"] for check in checks.values()} == {"redrive.io/v1beta1"}
