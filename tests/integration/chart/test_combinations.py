"""What the chart renders is admitted by the API server, strictly, whatever the values are."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive.api.job import JobDefaults
from redrive.replay.controller.application import RESTRICTED
from sandbox import chart
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster

IMAGE: dict[str, Any] = {"image": {"repository": "registry.test/redrive"}}
DIGEST = f"sha256:{'0' * 64}"
COMBINATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "named namespaces": {"namespaces": ["default"], "clusterId": "ours"},
    "no rights on the cluster": {
        "namespaces": ["default"],
        "clusterId": "ours",
        "crds": {"install": False},
        "rbac": {"aggregate": False},
        "admissionPolicy": {"create": False},
    },
    "no Replays, Secrets of one namespace": {
        "replay": {"enabled": False},
        "rbac": {"secretNamespaces": ["default"]},
    },
    "replays in two namespaces": {
        "imagePullSecrets": [{"name": "registry"}],
        "replay": {
            "namespaces": ["default", "kube-public"],
            "image": {"repository": "registry.test/job", "digest": DIGEST},
            "secret": {"token": 'a "token": #'},
            "job": {"driver": {"coreRequest": "100m"}, "tolerations": [{"operator": "Exists"}]},
        },
    },
    "monitoring": {
        "podMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    },
    "everything about pods": {
        "image": {"repository": "registry.test/redrive", "digest": DIGEST},
        "fullnameOverride": "retries",
        "nameOverride": "retry",
        "replicas": 3,
        "logFormat": "text",
        "podAnnotations": {"a.test/b": "c"},
        "podLabels": {"team": "shop"},
        "extraEnv": [
            {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "priorityClassName": "system-cluster-critical",
        "credentials": {"volume": {"csi": {"driver": "secrets-store.csi.k8s.io"}}},
        "endpoint": {"address": "[::]", "port": 9090},
        "service": {"port": 80, "annotations": {"a.test/b": "c"}},
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "topology.kubernetes.io/zone",
                "whenUnsatisfiable": "DoNotSchedule",
            },
        ],
        "serviceAccount": {"name": "ours", "annotations": {"a.test/role": "b"}},
    },
    "the least": {
        "replicas": 1,
        "service": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False, "name": "ours"},
        "topologySpreadConstraints": [],
    },
}


@pytest.fixture(scope="module")
def release_namespace(cluster: Cluster) -> Iterator[str]:
    """The namespace that `chart.render` renders for, with the kinds of the Prometheus operator."""
    cluster.define(Path(__file__).with_name("monitoring.yaml").read_text("utf-8"))
    existing = cluster.kubectl("get", "namespaces", "--output=name")
    if "namespace/redrive-system" not in existing.splitlines():
        cluster.kubectl("create", "namespace", "redrive-system")
    yield "redrive-system"
    kinds = ("podmonitors", "servicemonitors", "prometheusrules")
    names = [f"{kind}.monitoring.coreos.com" for kind in kinds]
    cluster.kubectl("delete", "crd", *names, "--wait=false")


@pytest.mark.usefixtures("release_namespace")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_api_server_admits_what_the_chart_renders(cluster: Cluster, name: str) -> None:
    rendered = chart.render(IMAGE | COMBINATIONS[name])
    everything = {"apiVersion": "v1", "kind": "List", "items": rendered}
    admitted = cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "--force-conflicts",
        "--output=name", "-f", "-", input=json.dumps(everything),
    )  # fmt: skip
    assert len(admitted.splitlines()) == len(rendered)


def test_a_field_that_the_api_server_does_not_know_would_be_found(cluster: Cluster) -> None:
    (account,) = (o for o in chart.render(IMAGE) if o["kind"] == "ServiceAccount")
    account["metadata"]["namespace"] = "default"
    with pytest.raises(SandboxError, match="mountToken"):
        cluster.kubectl(
            "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-",
            input=json.dumps({**account, "mountToken": True}),
        )  # fmt: skip


@pytest.fixture
def restricted(cluster: Cluster) -> Iterator[str]:
    """A namespace that admits only pods of the restricted pod security."""
    name = f"t-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    label = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", name, label)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def admit(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> None:
    """Have the API server admit a pod without creating it."""
    metadata = {"name": "pod", "namespace": namespace}
    # A ServiceAccount that is not there is no matter of pod security.
    checked = {name: value for name, value in spec.items() if name != "serviceAccountName"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": checked}
    cluster.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(pod))


def test_every_pod_passes_the_restricted_pod_security(cluster: Cluster, restricted: str) -> None:
    pods = [
        rendered["spec"]["template"]["spec"]
        if rendered["kind"] == "Deployment"
        else rendered["spec"]
        for rendered in chart.render(IMAGE)
        if rendered["kind"] in {"Deployment", "Pod"}
    ]
    assert len(pods) == 2  # the operator, and the test of the release
    job = {
        "name": "driver",
        "image": "job",
        "securityContext": RESTRICTED,
    }
    for spec in (*pods, {"containers": [job]}):
        admit(cluster, restricted, spec)
    with pytest.raises(SandboxError, match="violates PodSecurity"):
        admit(cluster, restricted, {"containers": [{"name": "driver", "image": "job"}]})


def test_a_tag_may_be_a_number() -> None:
    def image(**given: object) -> str:
        values = {"image": {"repository": "r", **given}}
        (pod,) = (o for o in chart.render(values) if o["kind"] == "Deployment")
        shown: str = pod["spec"]["template"]["spec"]["containers"][0]["image"]
        return shown

    assert image(tag=1) == "r:1"
    assert image(tag=20261122) == "r:20261122"
    assert image(tag="1.10") == "r:1.10"
    assert image(digest=DIGEST, tag="1") == f"r@{DIGEST}"


def test_replays_use_the_image_beside_the_operators_unless_another_is_named() -> None:
    def arguments(**replay: object) -> list[str]:
        rendered = chart.render({"image": {"repository": "r/redrive", "tag": 7}, "replay": replay})
        (pod,) = (o for o in rendered if o["kind"] == "Deployment")
        found: list[str] = pod["spec"]["template"]["spec"]["containers"][0]["args"]
        return found

    assert "--replay-image=r/redrive-replay:7" in arguments()
    assert "--replay-image=job:1" in arguments(image={"repository": "job", "tag": 1})
    assert not [word for word in arguments(enabled=False) if word.startswith("--replay")]
    said = {"executor": {"memory": "2g"}, "images": ["r/*"], "labels": {"team": "shop"}}
    (job,) = (word for word in arguments(job=said) if "--replay-job" in word)
    assert yaml.safe_load(job.partition("=")[2]) == said


def test_the_chart_knows_the_fields_of_a_job() -> None:
    schema = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
    written = schema["properties"]["replay"]["properties"]["job"]["propertyNames"]["enum"]
    aliases = {field.alias for field in JobDefaults.model_fields.values()}
    assert set(written) == aliases


@pytest.mark.parametrize(
    ("given", "arguments", "groups"),
    [
        ({}, ["Kubeflow"], ["sparkoperator.k8s.io"]),
        ({"apache": True}, ["Apache", "Kubeflow"], ["spark.apache.org", "sparkoperator.k8s.io"]),
        ({"apache": True, "kubeflow": False}, ["Apache"], ["spark.apache.org"]),
    ],
)
def test_the_operator_has_rights_at_the_spark_operators_that_are_enabled(
    given: dict[str, bool], arguments: list[str], groups: list[str]
) -> None:
    rendered = chart.render(IMAGE | {"replay": {"launchers": given}})
    (pod,) = (o for o in rendered if o["kind"] == "Deployment")
    words = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [w for w in words if "launcher" in w] == [f"--replay-launcher={a}" for a in arguments]
    rules = [rule for o in rendered for rule in o.get("rules", ()) if o["kind"] == "ClusterRole"]
    found = [rule["apiGroups"] for rule in rules if rule["resources"] == ["sparkapplications"]]
    assert found == [groups]


def test_one_spark_operator_is_enabled_at_least() -> None:
    with pytest.raises(SandboxError, match="launchers"):
        chart.render(IMAGE | {"replay": {"launchers": {"kubeflow": False}}})


def test_a_driver_has_no_right_to_config_maps_or_secrets() -> None:
    """RBAC can't limit it to those that it made."""
    rendered = chart.render(IMAGE | {"replay": {"namespaces": ["shop"]}})
    drivers = ("Role", "redrive-replay")
    (role,) = (o for o in rendered if (o["kind"], o["metadata"]["name"]) == drivers)
    named = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert named == {
        "replays",
        "replays/status",
        "pods",
        "services",
        "persistentvolumeclaims",
    }
