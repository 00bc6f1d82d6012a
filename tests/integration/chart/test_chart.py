"""The Helm chart: rendered objects, refused values, upgrades and uninstalls."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from redrive.api.crds import crds
from sandbox import chart
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.support.documented import INSTALL, JOB_TEMPLATES, block

pytestmark = pytest.mark.xdist_group("control plane")

IMAGE: dict[str, Any] = {"image": {"registry": "registry.test"}}
ALONE = IMAGE | {
    "clusterId": "ours",
    "crds": {"install": False},
    "rbac": {"aggregate": False},
    "admissionPolicy": {"create": False},
}
"""Values of an installation without cluster-scoped objects, if `namespaces` are set."""
SERVING = "redrive.redrive-system.operator"
"""The name of the role of the operator in the namespaces that it serves."""
KEEP = {"helm.sh/resource-policy": "keep"}


def of_kind(kind: str, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [body for body in objects if body["kind"] == kind]


def test_helm_lint_finds_no_warning() -> None:
    report = chart.helm("lint", "--strict", str(chart.CHART), values=IMAGE)
    assert "0 chart(s) failed" in report
    assert "[WARNING]" not in report


@pytest.mark.parametrize(
    ("page", "heading", "kind", "shown"),
    [
        (JOB_TEMPLATES, "Templates", "ConfigMap", "kueue.x-k8s.io/queue-name"),
        (INSTALL, "Proxies", "Deployment", "http://proxy.shop.example:3128"),
    ],
)
def test_values_of_pages_are_rendered(page: str, heading: str, kind: str, shown: str) -> None:
    values = IMAGE | yaml.safe_load(block(page, heading, "yaml"))
    assert any(shown in yaml.safe_dump(body) for body in of_kind(kind, chart.render(values)))


def test_crds_are_those_of_the_models_and_are_kept() -> None:
    rendered = of_kind("CustomResourceDefinition", chart.render(IMAGE))
    assert [crd["metadata"].pop("annotations") for crd in rendered] == [KEEP] * len(crds())
    assert sorted(rendered, key=name) == sorted(crds(), key=name)


def test_crds_without_install_are_not_rendered() -> None:
    rendered = chart.render(IMAGE | {"crds": {"install": False}})
    assert of_kind("CustomResourceDefinition", rendered) == []


def test_listed_namespaces_limit_the_rights_of_the_operator() -> None:
    (serving,) = (r for r in of_kind("ClusterRole", chart.render(IMAGE)) if name(r) == SERVING)
    rules = serving["rules"]
    rendered = chart.render(IMAGE | {"namespaces": ["shop", "billing"], "clusterId": "ours"})
    assert of_kind("ClusterRoleBinding", rendered) == []
    roles = [role for role in of_kind("Role", rendered) if name(role) == SERVING]
    served = {role["metadata"]["namespace"]: role for role in roles}
    assert set(served) == {"shop", "billing"}
    assert all(role["rules"] == rules for role in served.values())
    (pod,) = of_kind("Deployment", rendered)
    arguments = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=shop", "--namespace=billing"} <= set(arguments)


def test_volume_of_credentials_is_mounted_for_the_operator() -> None:
    source = {"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}}
    rendered = chart.render(IMAGE | {"credentials": {"volume": source}})
    pod = of_kind("Deployment", rendered)[0]["spec"]["template"]["spec"]
    mount, templates = pod["containers"][0]["volumeMounts"]
    assert pod["volumes"][0] == {"name": mount["name"], **source}
    assert templates["name"] == "job-templates"
    assert f"--credentials={mount['mountPath']}" in pod["containers"][0]["args"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"namespaces": "shop"}, r"'/namespaces': got string, want array"),
        ({"namespaces": ["Shop"]}, r"'/namespaces/0': 'Shop' does not match pattern"),
        ({"namespaces": ["a", "a"]}, r"'/namespaces': items at 0 and 1 are equal"),
        ({"namspaces": ["shop"]}, r"additional properties 'namspaces' not allowed"),
        ({"image": {"pullPolicy": "Sometimes"}}, r"'/image/pullPolicy': value must be one of"),
        ({"image": {"tag": 0o123456}}, r"'/image/tag': got number, want string"),
        ({"image": None}, "missing property 'image'"),
        ({"replay": {"enabled": None}}, "'/replay': missing property 'enabled'"),
        ({"livenessProbe": None}, "missing property 'livenessProbe'"),
        ({"livenessProbe": {"successThreshold": 2}}, "/successThreshold': value must be 1"),
        ({"image": {"digest": "sha256:1"}}, r"'/image/digest': 'sha256:1' does not match pattern"),
        ({"namespaces": ["shop"]}, r"'/clusterId': minLength: got 0, want 1"),
        ({"replay": {"job": {}}}, r"'/replay': additional properties 'job' not"),
        ({"replay": {"maxExecutors": 0}}, r"'/replay/maxExecutors': minimum: got 0, want 1"),
        ({"extraEnv": [{"value": "x"}]}, r"'/extraEnv/0': missing property 'name'"),
        ({"image": {"tag": "a b"}}, r"'/image/tag': 'a b' does not match pattern"),
        ({"replay": {"application": "https://x"}}, r"'/replay/application': .* does not match"),
        ({"crds": {"install": "yes"}}, r"'/crds/install': got string, want boolean"),
        ({"image": {"repository": "a:1"}}, r"'/image/repository': 'a:1' does not match pattern"),
        ({"serviceAccount": {"create": False}}, r"serviceAccount.name: say which one to use"),
        ({"securityContext": {"runAsNonroot": True}}, r"properties 'runAsNonroot' not allowed"),
        ({"securityContext": {"runAsUser": "1"}}, r"'/securityContext/runAsUser': got string"),
        ({"podSecurityContext": {"fsgroup": 1}}, r"additional properties 'fsgroup' not allowed"),
        ({"tolerations": [{"efect": "NoSchedule"}]}, r"properties 'efect' not allowed"),
        ({"affinity": {"nodeAfinity": {}}}, r"additional properties 'nodeAfinity' not allowed"),
        (
            {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}]},
            r"'/topologySpreadConstraints/0': missing property 'topologyKey'",
        ),
        ({"jobTemplates": {"Large": {}}}, "invalid propertyName 'Large'"),
        ({"jobTemplates": {"a": {"driver": 5}}}, r"'/jobTemplates/a/driver': got number, want obj"),
        ({"jobTemplates": {"a": {"drivers": {}}}}, r"properties 'drivers' not allowed"),
        (
            {"jobTemplates": {"a": {"executors": "2"}}},
            r"'/jobTemplates/a/executors': got string, want integer",
        ),
        (
            {"serviceMonitor": {"enabled": True}, "service": {"enabled": False}},
            r"'/service/enabled': value must be true",
        ),
        (
            {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}},
            r"'/podMonitor/enabled': value must be false",
        ),
        (
            {"namespaces": ["a"], "clusterId": "c", "replay": {"namespaces": ["a", "b", "c"]}},
            r"replay.namespaces: b, c can't run Replays, .* not served; add them to namespaces",
        ),
        (
            {"replay": {"secret": {"token": "t"}}},
            r"replay.secret.token: .* no namespace; list those .* in replay.namespaces",
        ),
        (
            {"replay": {"enabled": False, "namespaces": ["a"], "secret": {"token": "t"}}},
            r"'/replay/enabled': value must be true",
        ),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        chart.render(IMAGE | values)


def test_installer_with_cluster_id_needs_no_cluster_rights(
    cluster: Cluster, kube_namespace: str
) -> None:
    cluster.kubectl(
        "create", "rolebinding", "installer", f"--namespace={kube_namespace}",
        "--clusterrole=cluster-admin", "--user=installer",
    )  # fmt: skip
    values = ALONE | {"namespaces": [kube_namespace]}
    install = (
        "install", "redrive", str(chart.CHART), f"--namespace={kube_namespace}",
        f"--kubeconfig={cluster.kubeconfig}", "--kube-as-user=installer",
    )  # fmt: skip
    chart.helm(*install, values=values)
    (pod,) = of_kind("Deployment", chart.installed(cluster, "redrive", kube_namespace))
    arguments = pod["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--cluster-id=ours" in arguments


@pytest.mark.parametrize("service", [True, False])
def test_notes_of_installation_are_the_next_three_commands(
    cluster: Cluster, kube_namespace: str, *, service: bool
) -> None:
    values = ALONE | {
        "namespaces": [kube_namespace],
        "service": {"enabled": service},
        "fullnameOverride": "retries",
    }
    option = f"--namespace={kube_namespace}"
    chart.install(cluster, "redrive", kube_namespace, values)
    notes = chart.helm("get", "notes", "redrive", option, f"--kubeconfig={cluster.kubeconfig}")
    namespaced = f"--namespace {kube_namespace}"
    assert re.findall(r"^   (\S.+)$", notes, re.MULTILINE) == [
        f"kubectl {namespaced} rollout status deployment/retries",
        f"helm test redrive {namespaced}",
        "kubectl explain brokerconnection.spec",
    ]
    assert f"serves the namespaces {kube_namespace}." in notes
    assert "No namespace can run Replays yet" not in notes
    assert "no image of redrive is published yet" not in notes
    upgraded = values | {"namespaces": [], "replay": {"namespaces": []}, "image": {}}
    chart.install(cluster, "redrive", kube_namespace, upgraded)
    notes = chart.helm("get", "notes", "redrive", option, f"--kubeconfig={cluster.kubeconfig}")
    assert "serves all namespaces." in notes
    assert re.search(r"no image .* published yet, so registry.example/redrive:[\d.]+ cann", notes)
    assert "No namespace can run Replays yet: list those that shall in replay.namespaces." in notes
    chart.uninstall(cluster, "redrive", kube_namespace)


def name(body: dict[str, Any]) -> str:
    text: str = body["metadata"]["name"]
    return text
