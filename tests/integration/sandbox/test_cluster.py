from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster


def eventually(holds: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.2)
    return holds()


@pytest.fixture
def clerk(cluster: Cluster, kube_namespace: str) -> Path:
    """The kubeconfig of a ServiceAccount that may read ConfigMaps in its namespace."""
    cluster.kubectl("create", "serviceaccount", "clerk", "-n", kube_namespace)
    cluster.kubectl(
        "create", "role", "reader", "--verb=get,list", "--resource=configmaps", "-n", kube_namespace
    )
    cluster.kubectl(
        "create", "rolebinding", "clerk", "--role=reader",
        f"--serviceaccount={kube_namespace}:clerk", "-n", kube_namespace,
    )  # fmt: skip
    kubeconfig = cluster.service_account_kubeconfig(kube_namespace, "clerk")

    def may() -> bool:
        asked = ("auth", "can-i", "list", "configmaps", "-n", kube_namespace)
        try:
            return "yes" in cluster.kubectl(*asked, kubeconfig=kubeconfig)
        except SandboxError:
            return False

    assert eventually(may, seconds=30)  # the API server hears of its own objects by watches
    return kubeconfig


def test_kubeconfig_authenticates_its_service_account(
    cluster: Cluster, clerk: Path, kube_namespace: str
) -> None:
    review = json.loads(cluster.kubectl("auth", "whoami", "-o", "json", kubeconfig=clerk))
    name = f"system:serviceaccount:{kube_namespace}:clerk"
    assert review["status"]["userInfo"]["username"] == name


def test_kubectl_without_home_leaves_no_file_behind(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    cluster.kubectl("get", "namespaces")
    assert list(tmp_path.iterdir()) == []


def test_service_account_has_the_rights_of_its_role_only(
    cluster: Cluster, clerk: Path, kube_namespace: str
) -> None:
    cluster.kubectl("get", "configmaps", "-n", kube_namespace, kubeconfig=clerk)
    with pytest.raises(SandboxError, match=r'cannot list resource "secrets"'):
        cluster.kubectl("get", "secrets", "-n", kube_namespace, kubeconfig=clerk)
    with pytest.raises(SandboxError, match=r'cannot create resource "configmaps"'):
        cluster.kubectl("create", "configmap", "mine", "-n", kube_namespace, kubeconfig=clerk)
    with pytest.raises(SandboxError, match=r'cannot list .* in the namespace "default"'):
        cluster.kubectl("get", "configmaps", "-n", "default", kubeconfig=clerk)


def test_false_token_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "false"  # noqa: S105
    forged = tmp_path / "kubeconfig"
    forged.write_text(json.dumps(config))
    with pytest.raises(SandboxError, match=r"Unauthorized|must be logged in"):
        cluster.kubectl("get", "namespaces", kubeconfig=forged)


def test_kubeconfigs_are_readable_by_their_owner_only(cluster: Cluster, clerk: Path) -> None:
    assert {file.stat().st_mode & 0o777 for file in (cluster.kubeconfig, clerk)} == {0o600}


def test_an_object_goes_when_its_owner_goes(cluster: Cluster, kube_namespace: str) -> None:
    cluster.kubectl("create", "configmap", "owner", "-n", kube_namespace)
    uid = cluster.kubectl(
        "get", "configmap", "owner", "-n", kube_namespace, "-o", "jsonpath={.metadata.uid}"
    )
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    owned = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "owned", "namespace": kube_namespace, "ownerReferences": [owner]},
    }
    cluster.kubectl("apply", "-f", "-", input=json.dumps(owned))

    cluster.kubectl("delete", "configmap", "owner", "-n", kube_namespace)

    def gone() -> bool:
        names = cluster.kubectl("get", "configmaps", "-n", kube_namespace, "-o", "name")
        return "configmap/owned" not in names

    assert eventually(gone, seconds=60)


def test_a_namespace_that_is_deleted_goes_with_all_that_is_in_it(
    cluster: Cluster, kube_namespace: str
) -> None:
    name = f"{kube_namespace}-b"
    cluster.objects.create_namespace(name)
    cluster.kubectl("create", "configmap", "inside", "-n", name)

    cluster.kubectl("delete", "namespace", name, "--timeout=180s")

    assert name not in cluster.kubectl("get", "namespaces", "-o", "name")
