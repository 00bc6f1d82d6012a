"""Requests that a fake API server would answer in any form, sent to a real one."""

from __future__ import annotations

import json
import secrets

import pytest

from redrive.kube import resources
from redrive.kube.client import Kubernetes
from sandbox.sandbox import Sandbox


async def test_versions_are_listed_of_built_in_and_of_custom_kinds(
    installed: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl, namespace = installed.cluster.kubectl, f"t-{secrets.token_hex(4)}"
    kubectl("create", "namespace", namespace)
    kubectl("create", "configmap", "ours", f"--namespace={namespace}")
    label = "app.kubernetes.io/managed-by=redrive"
    kubectl("label", "configmap", "ours", label, f"--namespace={namespace}")
    made = json.loads(
        kubectl("get", "configmap", "ours", f"--namespace={namespace}", "--output=json")
    )["metadata"]
    monkeypatch.setenv("KUBECONFIG", str(installed.cluster.kubeconfig))
    async with Kubernetes.connect() as kubernetes:
        versions = await kubernetes.versions(resources.CONFIG_MAPS, namespace)
        custom = await kubernetes.versions(resources.SPARK_APPLICATIONS, namespace)
    assert versions.by_uid == {made["uid"]: int(made["resourceVersion"])}
    assert custom.by_uid == {}
    assert custom.latest >= versions.by_uid[made["uid"]]
    kubectl("delete", "namespace", namespace, "--wait=false")
