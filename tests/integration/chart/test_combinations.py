"""The API server admits the rendered chart, with strict validation, for each combination."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox import chart
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.integration.chart.combinations import COMBINATIONS, IMAGE, TOKEN
from tests.support.documented import INSTALL, ROOT


def paths(values: dict[str, Any], folder: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each entry in *values*, of mappings too."""
    for name, value in values.items():
        yield f"{folder}{name}", value
        if isinstance(value, dict):
            yield from paths(value, f"{folder}{name}.")


def test_documented_combinations_are_the_tested_ones() -> None:
    text = (ROOT / INSTALL).read_text("utf-8").partition("| to | set, beside `image` |")[2]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text.partition("\n\n")[0], re.MULTILINE)
    assert [purpose for purpose, _ in rows] == list(COMBINATIONS)
    for purpose, settings in rows:
        values = {path: json.dumps(value) for path, value in paths(COMBINATIONS[purpose])}
        for name, value in re.findall(r"`([\w.]+)(?:=(\w+))?`", settings):
            assert name in values, purpose
            assert value in ("", values[name]), purpose


def test_default_values_render_no_optional_object() -> None:
    """A cluster may lack the kinds of the Prometheus operator."""
    bodies = chart.render(IMAGE)
    maps = [body["metadata"]["name"] for body in bodies if body["kind"] == "ConfigMap"]
    assert maps == ["redrive-job-templates"]
    assert {body["kind"] for body in bodies} == {
        "ClusterRole", "ClusterRoleBinding", "ConfigMap", "CustomResourceDefinition", "Deployment",
        "Pod", "PodDisruptionBudget", "PodTemplate", "Role", "RoleBinding", "Service",
        "ServiceAccount", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    }  # fmt: skip


def namespace_of_release(cluster: Cluster) -> str:
    """Create the namespace that `chart.render` renders for; others may create it meanwhile."""
    metadata = {"name": "redrive-system"}
    cluster.objects.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    return metadata["name"]


@pytest.fixture(scope="module")
def release_namespace(cluster: Cluster) -> Iterator[str]:
    """The namespace that `chart.render` renders for, with the kinds of the Prometheus operator."""
    text = Path(__file__).with_name("monitoring.yaml").read_text("utf-8")
    kinds = list(yaml.load_all(text, yaml.CSafeLoader))
    cluster.define(kinds)
    yield namespace_of_release(cluster)
    for kind in kinds:
        cluster.objects.delete("customresourcedefinition", kind["metadata"]["name"])


@pytest.fixture(scope="module")
def admitted() -> set[str]:
    """Objects that the API server has admitted for an earlier combination, as JSON."""
    return set()


@pytest.mark.usefixtures("release_namespace")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_api_server_admits_the_rendered_chart(
    cluster: Cluster, admitted: set[str], name: str
) -> None:
    rendered = chart.render(IMAGE | COMBINATIONS[name])
    for body in rendered:
        if body["kind"] == "Pod":  # a dry run creates no ServiceAccount for it
            del body["spec"]["serviceAccountName"]
        if (text := json.dumps(body)) not in admitted:
            cluster.objects.admit(body, "default")
            admitted.add(text)
    assert rendered


def test_secret_has_the_token_of_the_values(cluster: Cluster, kube_namespace: str) -> None:
    lent = ["platform/main", "shop/main"]
    named = {"name": "replayer", "key": "a.token", "token": TOKEN, "usableBy": lent}
    replay = {"namespaces": [kube_namespace], "secret": named}
    (secret,) = (o for o in chart.render(IMAGE | {"replay": replay}) if o["kind"] == "Secret")
    stored = cluster.objects.create(secret)
    held = {name: base64.b64decode(data) for name, data in stored["data"].items()}
    assert held == {"a.token": TOKEN.encode()}
    usable = stored["metadata"]["annotations"]["redrive.io/usable-by"]
    assert usable == "platform/main,shop/main"


def test_unknown_field_is_refused_by_the_api_server(cluster: Cluster) -> None:
    account = next(o for o in chart.render(IMAGE) if o["kind"] == "ServiceAccount")
    account["metadata"]["namespace"] = "default"
    with pytest.raises(SandboxError, match="mountToken"):
        cluster.objects.admit({**account, "mountToken": True}, "default")


@pytest.mark.parametrize(
    ("launchers", "arguments", "groups"),
    [
        ({}, ["Kubeflow"], ["sparkoperator.k8s.io"]),
        ({"apache": True}, ["Apache", "Kubeflow"], ["spark.apache.org", "sparkoperator.k8s.io"]),
        ({"apache": True, "kubeflow": False}, ["Apache"], ["spark.apache.org"]),
    ],
)
def test_operator_has_rights_for_enabled_spark_operators(
    launchers: dict[str, bool], arguments: list[str], groups: list[str]
) -> None:
    rendered = chart.render(IMAGE | {"replay": {"launchers": launchers}})
    (pod,) = (o for o in rendered if o["kind"] == "Deployment")
    words = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [w for w in words if "launcher" in w] == [f"--replay-launcher={a}" for a in arguments]
    rules = [rule for o in rendered for rule in o.get("rules", ()) if o["kind"] == "ClusterRole"]
    enabled = [rule["apiGroups"] for rule in rules if rule["resources"] == ["sparkapplications"]]
    assert enabled == [groups]


def test_values_without_a_spark_operator_are_refused() -> None:
    with pytest.raises(SandboxError, match="launchers"):
        chart.render(IMAGE | {"replay": {"launchers": {"kubeflow": False}}})


def test_job_has_no_right_to_pods_config_maps_or_secrets() -> None:
    """RBAC can't limit a driver of Spark to the objects that it created."""
    rendered = chart.render(IMAGE | {"replay": {"namespaces": ["shop"]}})
    roles = {o["metadata"]["name"]: o["rules"] for o in rendered if o["kind"] == "Role"}
    resources = {
        name: {resource for rule in rules for resource in rule["resources"]}
        for name, rules in roles.items()
    }
    own = {"replays", "replays/status", "replayapprovals"}
    assert resources["redrive-job"] == own
    assert resources["redrive-inspection"] == {"inspections", "inspections/status"}
    assert resources["redrive-replay"] == own | {"pods", "services", "persistentvolumeclaims"}


def test_job_and_driver_share_no_service_account() -> None:
    with pytest.raises(SandboxError, match=r"replay\.jobServiceAccount: must be another than"):
        chart.render(IMAGE | {"replay": {"jobServiceAccount": "redrive-replay"}})
    with pytest.raises(SandboxError, match=r"replay\.inspectionServiceAccount: must be another"):
        chart.render(IMAGE | {"replay": {"inspectionServiceAccount": "redrive-job"}})
