"""What is measured of objects' conditions."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from redrive.api.conditions import PROGRESSING, Reason
from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.observability import counting_objects, reasons

POLICY = {
    "policy": "orders",
    "policy_namespace": "shop",
    "source_topic": "persistent://shop/prod/orders",
    "subscription": "fulfilment",
}
OTHER = {"type": "Reconciling", "status": "True", "reason": PROGRESSING}


def policy(**more: Any) -> dict[str, Any]:  # noqa: ANN401  of a manifest
    spec = {"topic": POLICY["source_topic"], "subscription": POLICY["subscription"]}
    metadata = {"name": "orders", "namespace": "shop", "uid": "u"}
    return {"metadata": metadata, "spec": spec, **more}


def ready(status: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "reason": "InvalidSpec"}


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"status": {"conditions": [ready("True"), OTHER]}}, 1),
        ({"status": {"conditions": [OTHER, ready("False")]}}, 0),
        ({"status": {"conditions": [ready("Unknown")]}}, 0),
        ({"status": {"conditions": [OTHER]}}, 0),
        ({"status": {}}, 0),
        ({}, 0),
    ],
)
def test_each_policy_that_exists_is_shown_as_ready_or_not(
    more: dict[str, Any], shown: float
) -> None:
    policies = Cache([policy(**more)])
    with counting_objects({resources.POLICIES: policies}):
        assert REGISTRY.get_sample_value("redrive_policy_ready", POLICY) == shown
        policies.on_event({"type": "DELETED", "object": policy(**more)})
        assert REGISTRY.get_sample_value("redrive_policy_ready", POLICY) is None


def test_objects_are_counted_by_each_of_their_conditions() -> None:
    def count(**labels: str) -> float | None:
        return REGISTRY.get_sample_value("redrive_objects", {"kind": "RetryPolicy", **labels})

    bodies = [policy(status={"conditions": [ready("True"), OTHER]}), policy()]
    bodies[1]["metadata"] = {"name": "another", "namespace": "shop"}
    with counting_objects({resources.POLICIES: Cache(bodies)}):
        assert count(condition="Ready", status="True", reason="InvalidSpec") == 1
        assert count(condition="Reconciling", status="True", reason="Progressing") == 1
        assert count(condition="Ready", status="False", reason="InvalidSpec") is None


def test_what_no_operator_has_written_is_counted_as_other() -> None:
    """Whoever may write a status must not make a time series of each text that it holds."""
    forged: list[dict[str, Any]] = [
        {"type": f"type-{n}", "status": "True", "reason": f"reason-{n}"} for n in range(5)
    ]
    forged += [{"type": "Ready", "status": "True", "reason": "Why"}, {}, {"type": "Ready"}]
    bodies = [policy(status={"conditions": forged})]
    with counting_objects({resources.POLICIES: Cache(bodies), resources.REPLAYS: Cache()}):
        families = [f for f in REGISTRY.collect() if f.name == "redrive_objects"]
    shown = {
        (s.labels["condition"], s.labels["status"], s.labels["reason"]): s.value
        for s in families[0].samples
    }
    assert shown == {
        ("Other", "True", "Other"): 5,
        ("Ready", "True", "Other"): 1,
        ("Other", "Other", "Other"): 1,
        ("Ready", "Other", "Other"): 1,
    }


PAGE = Path(__file__).resolve().parents[3] / "docs/reference/reasons.md"


def test_every_reason_that_is_documented_of_conditions_is_shown() -> None:
    handlers = ("redrive.provision.handlers", "redrive.replay.controller.handlers")
    for journey in handlers:  # as the operator does
        importlib.import_module(journey)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    documented = {reason for reason, shown_as in rows if shown_as not in {"Event", "Log"}}
    assert len(documented) > 80
    assert documented - reasons() == set()
    assert Reason.declared - documented == set()
