"""The pods of the chart: they have the fields of the values, and pass restricted pod security."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from redrive.api.job import RESTRICTED
from sandbox import chart
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.integration.chart.combinations import COMBINATIONS, DIGEST, IMAGE, PODS
from tests.support.namespaces import new_namespace


def test_fields_of_pods_are_those_of_the_values() -> None:
    values = COMBINATIONS[PODS]
    rendered = chart.render(IMAGE | values)
    (deployment,) = (body for body in rendered if body["kind"] == "Deployment")
    tests = [body["spec"] for body in rendered if body["kind"] == "Pod"]
    metadata, pod = (deployment["spec"]["template"][part] for part in ("metadata", "spec"))
    assert deployment["spec"]["replicas"] == values["replicas"]
    assert metadata["annotations"] == values["podAnnotations"]
    assert metadata["labels"].items() >= values["podLabels"].items()
    for field in ("priorityClassName", "affinity"):
        assert pod[field] == values[field]
    (spread,) = pod["topologySpreadConstraints"]
    selector = deployment["spec"]["selector"]
    assert spread == {**values["topologySpreadConstraints"][0], "labelSelector": selector}
    (container,) = pod["containers"]
    assert container["env"][1:] == values["extraEnv"]
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "128Mi"},
        "limits": {"memory": "1Gi"},
    }
    for spec in (pod, *tests):
        assert spec["nodeSelector"] == values["nodeSelector"]
        assert spec["tolerations"] == values["tolerations"]
        # The defaults of restricted pod security remain besides.
        context = values["podSecurityContext"]
        assert spec["securityContext"].items() >= {**context, "runAsNonRoot": True}.items()
        context = {**values["securityContext"], "readOnlyRootFilesystem": True}
        assert spec["containers"][0]["securityContext"].items() >= context.items()
        assert spec["containers"][0]["image"] == f"registry.test/redrive@{DIGEST}"


def test_spread_constraint_with_a_selector_keeps_it() -> None:
    spread = {
        "maxSkew": 2,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"team": "shop"}},
    }
    rendered = chart.render(IMAGE | {"topologySpreadConstraints": [spread]})
    (deployment,) = (body for body in rendered if body["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"] == [spread]


@pytest.fixture
def restricted(cluster: Cluster) -> Iterator[str]:
    """A namespace that admits only pods of the restricted pod security."""
    with new_namespace(cluster) as name:
        label = "pod-security.kubernetes.io/enforce=restricted"
        cluster.kubectl("label", "namespace", name, label)
        yield name


def admit(cluster: Cluster, namespace: str, spec: dict[str, Any]) -> None:
    """Have the API server admit a pod without creating it."""
    metadata = {"name": "pod", "namespace": namespace}
    # Pod security does not depend on the ServiceAccount, which does not exist.
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
    assert len(pods) == 3  # the operator, and the tests of the release
    job = {
        "name": "driver",
        "image": "job",
        "securityContext": RESTRICTED,
    }
    for spec in (*pods, {"containers": [job]}):
        admit(cluster, restricted, spec)
    with pytest.raises(SandboxError, match="violates PodSecurity"):
        admit(cluster, restricted, {"containers": [{"name": "driver", "image": "job"}]})


def test_digest_of_image_has_priority_over_its_tag() -> None:
    def image(**fields: object) -> str:
        values = {"image": {"registry": "", "repository": "r", **fields}}
        (pod,) = (o for o in chart.render(values) if o["kind"] == "Deployment")
        shown: str = pod["spec"]["template"]["spec"]["containers"][0]["image"]
        return shown

    assert image(tag="0123456") == "r:0123456"
    assert image(digest=DIGEST, tag="1") == f"r@{DIGEST}"


def test_image_of_replays_inherits_registry_and_tag() -> None:
    def arguments(**replay: object) -> list[str]:
        rendered = chart.render({"image": {"registry": "r", "tag": "7"}, "replay": replay})
        (pod,) = (o for o in rendered if o["kind"] == "Deployment")
        words: list[str] = pod["spec"]["template"]["spec"]["containers"][0]["args"]
        return words

    def image(**replay: object) -> str:
        rendered = chart.render({"image": {"registry": "r", "tag": "7"}, "replay": replay})
        (template,) = (o["template"] for o in rendered if o["kind"] == "PodTemplate")
        (container,) = template["spec"]["containers"]
        name: str = container["image"]
        return name

    assert image() == "r/redrive-replay:7"
    assert image(image={"repository": "job", "tag": "1"}) == "r/job:1"
    assert not [word for word in arguments(enabled=False) if word.startswith("--replay")]
    assert "--max-executors=7" in arguments(maxExecutors=7)


def test_job_templates_are_mounted_unchanged() -> None:
    user = {"securityContext": {"runAsUser": 1_000_700_000}}
    templates = {"large": {"executors": 2, "driver": {"spec": user}}}
    rendered = chart.render(IMAGE | {"jobTemplates": templates})
    (file,) = (o for o in rendered if o["metadata"]["name"] == "redrive-job-templates")
    assert yaml.safe_load(file["data"]["templates.yaml"]) == templates
    (deployment,) = (o for o in rendered if o["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["job-templates"]["configMap"] == {"name": "redrive-job-templates"}
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "job-templates")
    assert f"--job-templates={mount['mountPath']}/templates.yaml" in pod["containers"][0]["args"]
    without = chart.render(IMAGE | {"replay": {"enabled": False}})
    assert not [o for o in without if o["metadata"]["name"] == "redrive-job-templates"]


def test_schema_of_values_has_all_pod_fields_of_the_api_server(cluster: Cluster) -> None:
    kinds = json.loads(cluster.kubectl("get", "--raw", "/openapi/v3/api/v1"))["components"]
    schema = json.loads((chart.CHART / "values.schema.json").read_text("utf-8"))
    properties = schema["properties"]
    schemas = {
        "PodSecurityContext": properties["podSecurityContext"],
        "SecurityContext": properties["securityContext"],
        "Affinity": properties["affinity"],
        "HostAlias": properties["hostAliases"]["items"],
        "PodDNSConfig": properties["dnsConfig"],
        "PodDNSConfigOption": properties["dnsConfig"]["properties"]["options"]["items"],
        "VolumeMount": properties["extraVolumeMounts"]["items"],
        "Toleration": properties["tolerations"]["items"],
        "TopologySpreadConstraint": properties["topologySpreadConstraints"]["items"],
    }
    for kind, ours in schemas.items():
        served = kinds["schemas"][f"io.k8s.api.core.v1.{kind}"]
        assert set(ours["properties"]) == set(served["properties"]), kind
