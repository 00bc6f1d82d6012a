"""Upgrades from an older chart, and uninstalls while policies are in use."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox import chart, installation, spark
from sandbox.kubernetes import Cluster
from sandbox.process import Processes
from sandbox.sandbox import Sandbox
from tests.integration.chart.test_chart import IMAGE
from tests.integration.provision.conftest import Shop, redrive, rest_path
from tests.support.documented import INSTALL, commands

pytestmark = pytest.mark.xdist_group("control plane")

OPERATOR = "upgraded-operator"


@pytest.fixture
def place(shared_sandbox: Sandbox, control_plane: Cluster, tmp_path: Path) -> Iterator[Sandbox]:
    """The broker of the run, and a control plane without another installation."""
    control_plane.define(spark.definitions())
    state = tmp_path / "place"
    state.mkdir()
    processes = Processes(state)
    yield Sandbox(state, processes, shared_sandbox.pulsar, control_plane)
    processes.stop_all()


@pytest.fixture
def shop(place: Sandbox) -> Iterator[Shop]:
    """A tenant and a Kubernetes namespace that no operator serves yet."""
    name = f"t-{secrets.token_hex(4)}"
    place.cluster.objects.create_namespace(name)
    made = Shop(place.pulsar, place.cluster, name, name)
    clusters = {"adminRoles": [made.role], "allowedClusters": ["standalone"]}
    made.request("PUT", f"tenants/{name}", clusters)
    made.request("PUT", f"namespaces/{name}/prod")
    made.create_topic(made.topic("orders"))
    # A broker deletes a topic without a subscription after a minute.
    made.request("PUT", f"{rest_path(made.topic('orders'))}/subscription/fulfilment")
    yield made
    place.cluster.objects.delete("namespace", name)


def values(shop: Shop) -> dict[str, Any]:
    return {**installation.VALUES, "namespaces": [shop.namespace], "clusterId": "upgraded"}


def start(place: Sandbox, shop: Shop) -> None:
    installation.start_operator(place, namespace=shop.namespace, name=OPERATOR)


def topics(shop: Shop) -> set[str]:
    """Return the topics of the tenant, without Pulsar's own."""
    names = shop.dump()["namespaces"][f"{shop.tenant}/prod"]["topics"]
    return {topic for topic in names if not topic.endswith("/__change_events")}


def objects_of_user(shop: Shop, *more: str) -> dict[str, Any]:
    """Return the fields of the objects of a user, and of *more*, that only the user may change."""
    names = [
        "retrypolicy/kept", "retrypolicy/deleted", "brokerconnection/main", "replay/waits",
        "secret/pulsar-admin", *more,
    ]  # fmt: skip
    bodies = {name: shop.get(*name.split("/")) for name in names}
    return {
        name: (body["metadata"]["uid"], body.get("spec"), body.get("data"))
        for name, body in bodies.items()
    }


def test_policies_survive_an_upgrade_and_an_uninstall(
    place: Sandbox, shop: Shop, tmp_path: Path
) -> None:
    cluster, release = place.cluster, shop.namespace
    chart.helm("package", str(chart.CHART), "--version=0.0.1", f"--destination={tmp_path}")
    (older,) = tmp_path.glob("*.tgz")
    chart.install(cluster, "redrive", release, values(shop), older)
    shop.secret("pulsar-admin", token=shop.token(shop.role))
    shop.connection()
    shop.policies({"kept": {}, "deleted": {"subscription": "b", "deletionPolicy": "Delete"}})
    shop.apply({"waits": redrive("Replay", {"policyRef": {"name": "to-come"}})})
    made = objects_of_user(shop)

    chart.install(cluster, "redrive", release, values(shop))
    assert objects_of_user(shop) == made
    start(place, shop)
    for name in ("kept", "deleted"):
        shop.ready(name)
    shop.reaches("waits", "PolicyNotFound", "replay")
    lease = shop.get("lease", "redrive")
    consumed = objects_of_user(shop, "configmap/kept-redrive")
    assert consumed.items() >= made.items()

    place.processes.stop(OPERATOR)
    chart.uninstall(cluster, "redrive", release)
    assert objects_of_user(shop, "configmap/kept-redrive") == consumed
    before = topics(shop)
    assert len(before) == 5
    shop.delete("kept")  # Retain asks no operator
    assert topics(shop) == before
    shop.start_deletion("deleted")

    chart.install(cluster, "redrive", release, values(shop))  # the deletion waits for the operator
    start(place, shop)
    shop.wait_until_gone("deleted")
    assert before - topics(shop) == {shop.topic(f"orders-b-{kind}") for kind in ("RETRY", "DLQ")}
    assert shop.get("lease", "redrive")["metadata"]["uid"] == lease["metadata"]["uid"]
    place.processes.stop(OPERATOR)
    chart.uninstall(cluster, "redrive", release)
    assert objects_of_release(shop) == {"lease.coordination.k8s.io/redrive"}
    (removing,) = commands(INSTALL, "Uninstall")
    assert "kubectl delete lease/redrive secret/redrive-replay-keys" in removing.text
    shop.delete("redrive", "lease")
    shop.delete("waits", "replay")


def objects_of_release(shop: Shop) -> set[str]:
    """Return the objects in the namespace that only the chart and its operator create."""
    kinds = "deployments,services,poddisruptionbudgets,serviceaccounts,roles,rolebindings,leases"
    names = shop.kubectl("get", kinds, "--output=name").split()
    return {name for name in names if name != "serviceaccount/default"}


def test_upgrade_and_rollback_change_crds_uninstall_keeps_them(
    cluster: Cluster, kube_namespace: str, tmp_path: Path
) -> None:
    copied = tmp_path / "redrive"
    shutil.copytree(chart.CHART, copied)
    shutil.rmtree(copied / "definitions")
    definition = copied / "definitions" / "redrive.io_things.yaml"
    definition.parent.mkdir()
    package = yaml.safe_load((copied / "Chart.yaml").read_text())
    package["annotations"]["artifacthub.io/crds"] = yaml.safe_dump([{"name": "things"}])
    (copied / "Chart.yaml").write_text(yaml.safe_dump(package))
    values = IMAGE | {"namespaces": [kube_namespace], "clusterId": "ours"}
    kind = f"things.{kube_namespace}.test"
    try:
        definition.write_text(yaml.safe_dump(definition_of_kind(kube_namespace, "Old.")))
        chart.install(cluster, "redrive", kube_namespace, values, copied)
        assert description(cluster, kind) == "Old."
        definition.write_text(yaml.safe_dump(definition_of_kind(kube_namespace, "New.")))
        chart.install(cluster, "redrive", kube_namespace, values, copied)
        assert description(cluster, kind) == "New."
        release = (f"--namespace={kube_namespace}", f"--kubeconfig={cluster.kubeconfig}")
        chart.helm("rollback", "redrive", "1", *release)
        assert description(cluster, kind) == "Old."
        chart.helm("rollback", "redrive", "2", *release)
        assert description(cluster, kind) == "New."
        chart.uninstall(cluster, "redrive", kube_namespace)
        assert description(cluster, kind) == "New."
        assert "redrive" not in cluster.kubectl("get", "serviceaccounts", "-n", kube_namespace)
    finally:
        cluster.kubectl("delete", "crd", kind, "--ignore-not-found", "--wait=false")


def definition_of_kind(word: str, description: str) -> dict[str, Any]:
    schema = {"type": "object", "description": description}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{word}.test"},
        "spec": {
            "group": f"{word}.test",
            "scope": "Namespaced",
            "names": {"kind": "Thing", "plural": "things"},
            "versions": [version],
        },
    }


def description(cluster: Cluster, kind: str) -> str:
    crd = json.loads(cluster.kubectl("get", "crd", kind, "--output=json"))
    text: str = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]
    return text
