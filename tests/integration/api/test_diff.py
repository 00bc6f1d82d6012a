"""`redrive diff` against a real API server: it compares desired states and creates nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from redrive.cli.diff import diff
from sandbox.kubernetes import Cluster
from tests.support.invalid_manifests import manifest

pytestmark = pytest.mark.xdist_group("control plane")

ROLE = "shop-fulfilment"


def run(cluster: Cluster, namespace: str, file: Path, **spec: object) -> Result:
    """Compare a policy with *spec* to the one in the cluster."""
    file.write_text(yaml.safe_dump(manifest("RetryPolicy", "orders", **spec)), "utf-8")
    arguments = [str(file), "--kubeconfig", str(cluster.kubeconfig), "-n", namespace]
    return CliRunner().invoke(diff, arguments, standalone_mode=False, catch_exceptions=False)


def test_diff_shows_consequences_of_a_changed_policy(
    cluster: Cluster, kube_namespace: str, tmp_path: Path
) -> None:
    cluster.objects.put(
        manifest("BrokerConnection", "main", policyDefaults={"maxRetries": 5}), kube_namespace
    )
    new = run(cluster, kube_namespace, tmp_path / "a.yaml")
    assert new.return_value == 1
    assert "+consumers, maxRetries: 5" in new.stdout.splitlines()

    cluster.objects.put(manifest("RetryPolicy", "orders"), kube_namespace)
    same = run(cluster, kube_namespace, tmp_path / "a.yaml")
    assert (same.return_value, same.stdout) == (0, "")

    changed = run(cluster, kube_namespace, tmp_path / "a.yaml", maxRetries=3, consumerRoles=[ROLE])
    assert changed.return_value == 1
    lines = changed.stdout.splitlines()
    assert {"-consumers, maxRetries: 5", "+consumers, maxRetries: 3"} <= set(lines)
    assert f"+rights of {ROLE} on orders-fulfilment-RETRY: consume, produce" in lines

    moved = run(cluster, kube_namespace, tmp_path / "a.yaml", subscription="billing")
    assert "error: spec.subscription can't change; create another RetryPolicy" in moved.stdout
    listed = cluster.kubectl("get", "rpol", "-n", kube_namespace, "-o", "name").split()
    assert listed == ["retrypolicy.redrive.io/orders"]


def test_diff_that_cannot_run_exits_with_2(
    cluster: Cluster, kube_namespace: str, tmp_path: Path
) -> None:
    invalid = run(cluster, kube_namespace, tmp_path / "a.yaml", maxRetries=-1)
    assert invalid.return_value == 2
    assert "spec.maxRetries: maxRetries must be from 0 to 1000" in invalid.stderr
    absent = CliRunner().invoke(
        diff, ["-", "--kubeconfig", str(tmp_path / "absent")], standalone_mode=False
    )
    assert absent.return_value == 2
    assert absent.stderr.startswith("error: there is no kubeconfig")
