"""What is measured of objects' conditions."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from redrive.kube import resources
from redrive.kube.cache import Cache
from redrive.kube.metrics import counting

POLICY = {
    "policy": "orders",
    "policy_namespace": "shop",
    "source_topic": "persistent://shop/prod/orders",
    "subscription": "fulfilment",
}
OTHER = {"type": "Reconciling", "status": "True", "reason": "Progressing"}


def policy(**more: Any) -> dict[str, Any]:  # noqa: ANN401  of a manifest
    spec = {"topic": POLICY["source_topic"], "subscription": POLICY["subscription"]}
    metadata = {"name": "orders", "namespace": "shop", "uid": "u"}
    return {"metadata": metadata, "spec": spec, **more}


def ready(status: str) -> dict[str, str]:
    return {"type": "Ready", "status": status, "reason": "Why"}


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
    with counting({resources.POLICIES: policies}):
        assert REGISTRY.get_sample_value("redrive_policy_ready", POLICY) == shown
        policies.on_event({"type": "DELETED", "object": policy(**more)})
        assert REGISTRY.get_sample_value("redrive_policy_ready", POLICY) is None


def test_objects_are_counted_by_each_of_their_conditions() -> None:
    def count(**labels: str) -> float | None:
        return REGISTRY.get_sample_value("redrive_objects", {"kind": "RetryPolicy", **labels})

    bodies = [policy(status={"conditions": [ready("True"), OTHER]}), policy()]
    bodies[1]["metadata"] = {"name": "another", "namespace": "shop"}
    with counting({resources.POLICIES: Cache(bodies)}):
        assert count(condition="Ready", status="True", reason="Why") == 1
        assert count(condition="Reconciling", status="True", reason="Progressing") == 1
        assert count(condition="Ready", status="False", reason="Why") is None
