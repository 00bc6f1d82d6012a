"""Policies that redrive does not apply: paused policies, and policies that only observe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from redrive.cli.diff import diff
from redrive.policy import codec
from sandbox.sandbox import Sandbox
from tests.integration.provision.conftest import MakeShop, Shop


@pytest.fixture(scope="module")
def calm(make_shop: MakeShop) -> Shop:
    """A shop for all tests here."""
    shop = make_shop()
    shop.connection()
    return shop


def retries(shop: Shop, name: str) -> int:
    """The maximum number of retries in the ConfigMap of a policy."""
    written = shop.get("configmap", f"{name}-redrive")["data"]["policy.json"]
    return codec.decode(written).max_retries


def test_paused_policy_writes_nothing_until_resumed(calm: Shop) -> None:
    calm.create_topic(calm.topic("paused"))
    topic = calm.topic("paused")
    calm.policy("paused", topic=topic, maxRetries=3)
    calm.ready("paused")
    calm.annotate("paused", paused="true")
    calm.reaches_condition("paused", "Paused")
    calm.ready("paused")
    before = calm.dump()
    calm.policy("paused", topic=topic, maxRetries=5, consumerRoles=[], deletionPolicy="Delete")
    calm.reaches("paused", "Paused")
    assert calm.dump() == before
    assert retries(calm, "paused") == 3
    calm.annotate("paused", paused=None)
    status = calm.ready("paused")["status"]
    assert "Paused" not in {c["type"] for c in status["conditions"]}
    assert (status["effective"]["maxRetries"], retries(calm, "paused")) == (5, 5)
    assert calm.dump() != before
    calm.annotate("paused", paused="true")
    after = calm.dump()
    calm.delete("paused")
    assert calm.dump() == after
    assert "it was paused, so nothing was changed" in calm.event_message("paused", "Retained")


def test_observing_policy_plans_changes_and_applies_none(calm: Shop) -> None:
    topic = calm.topic("seen")
    calm.create_topic(topic, 2)
    before = calm.dump()
    observe = {"managementPolicy": "Observe"}
    calm.policy("seen", topic=topic, **observe)
    status = calm.reaches("seen", "Observed")["status"]
    retry = calm.topic("seen-fulfilment-RETRY")
    assert status["plannedChanges"][0] == f"created {retry} with 2 partitions"
    assert status["plannedChanges"][-1] == "created ConfigMap seen-redrive"
    assert "granted consume+produce" in " ".join(status["plannedChanges"])
    drift = calm.reaches_condition("seen", "DriftDetected")["message"]
    assert f"with managementPolicy Manage redrive would have created {retry}" in drift
    assert calm.dump() == before
    assert calm.objects("configmap", "metadata.name=seen-redrive") == []
    calm.policy("seen", topic=topic)
    assert "plannedChanges" not in calm.ready("seen")["status"]
    after = calm.dump()
    calm.policy("seen", topic=topic, deletionPolicy="Delete", **observe)
    status = calm.reaches("seen", "Observed")["status"]
    assert status["plannedChanges"] == ["updated ConfigMap seen-redrive"]  # of the new generation
    calm.policy("seen", topic=topic, deletionPolicy="Delete", consumerRoles=[], **observe)
    status = calm.reaches("seen", "Observed")["status"]
    assert "revoked consume+produce" in " ".join(status["plannedChanges"])
    calm.delete("seen")
    assert calm.dump() == after


def test_diff_observes_a_new_policy_and_deletes_it(
    calm: Shop, sandbox: Sandbox, tmp_path: Path
) -> None:
    topic = calm.topic("new")
    calm.create_topic(topic)
    before = calm.dump()
    file = tmp_path / "policy.yaml"
    spec = {"connectionRef": {"name": "main"}, "topic": topic, "subscription": "fulfilment"}
    policy = {
        "apiVersion": "redrive.io/v1beta1",
        "kind": "RetryPolicy",
        "metadata": {"name": "new"},
        "spec": spec,
    }
    file.write_text(yaml.safe_dump(policy), "utf-8")
    flags = ["-n", calm.namespace, "--kubeconfig", str(sandbox.cluster.kubeconfig)]
    result = CliRunner().invoke(diff, [str(file), "--observe", *flags], standalone_mode=False)
    assert (result.return_value, result.stderr) == (1, "")
    assert f"+broker: created {calm.topic('new-fulfilment-RETRY')}" in result.stdout
    assert calm.dump() == before
    calm.wait_until_gone("new")
