"""The chart for each combination of values: admitted, and its pods as the values have them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive.api.job import RESTRICTED, SPARK_ROLES, Role
from redrive.replay.controller.launch import needed_rights
from sandbox import chart
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.integration.chart.combinations import COMBINATIONS, DIGEST, IMAGE, PODS, TOKEN
from tests.support.documented import INSTALL, ROOT
from tests.support.namespaces import new_namespace


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


@pytest.mark.parametrize(
    ("account", "kind", "roles"),
    [
        ("redrive-job", "Replay", [Role.JOB]),
        ("redrive-replay", "Replay", SPARK_ROLES),
        ("redrive-inspection", "Inspection", [Role.JOB]),
    ],
)
def test_reviewed_rights_are_those_of_the_chart(
    account: str, kind: str, roles: Sequence[Role]
) -> None:
    rendered = chart.render(IMAGE | {"replay": {"namespaces": ["shop"]}})
    (role,) = (o for o in rendered if (o["kind"], o["metadata"]["name"]) == ("Role", account))
    granted = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = needed_rights(kind, roles)
    assert {(r.group, r.resource, verb) for r in needed for verb in r.verbs} == granted


def test_job_and_driver_share_no_service_account() -> None:
    with pytest.raises(SandboxError, match=r"replay\.jobServiceAccount: must be another than"):
        chart.render(IMAGE | {"replay": {"jobServiceAccount": "redrive-replay"}})
    with pytest.raises(SandboxError, match=r"replay\.inspectionServiceAccount: must be another"):
        chart.render(IMAGE | {"replay": {"inspectionServiceAccount": "redrive-job"}})


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
