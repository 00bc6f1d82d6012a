"""Requests that a fake API server would answer in any form, sent to a real one."""

from __future__ import annotations

import pytest

from redrive.kube import resources
from redrive.kube.client import Kubernetes
from sandbox.sandbox import Sandbox


async def test_versions_are_listed_of_built_in_and_of_custom_kinds(
    installed: Sandbox, kube_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = {"name": "ours", "labels": dict([resources.MANAGED])}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    made = installed.cluster.objects.create(body, kube_namespace)["metadata"]
    monkeypatch.setenv("KUBECONFIG", str(installed.cluster.kubeconfig))
    async with Kubernetes.connect() as kubernetes:
        versions = await kubernetes.versions(resources.CONFIG_MAPS, kube_namespace)
        custom = await kubernetes.versions(resources.SPARK_APPLICATIONS, kube_namespace)
    assert versions.by_uid == {made["uid"]: int(made["resourceVersion"])}
    assert custom.by_uid == {}
    assert custom.latest >= versions.by_uid[made["uid"]]
