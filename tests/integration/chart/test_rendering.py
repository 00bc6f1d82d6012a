"""The chart as GitOps tools and parent charts render it, without a cluster."""

from __future__ import annotations

import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from redrive import __version__
from release import CHART
from sandbox import CHECKOUT, chart
from sandbox.errors import SandboxError

DEFAULT = f"registry.example/redrive:{__version__}"


def render(
    values: dict[str, Any], *, release: str = "redrive", namespace: str = "redrive-system"
) -> list[dict[str, Any]]:
    """Render the chart without its CRDs, which are most of its output."""
    without = {"crds": {"install": False}}
    return chart.render(without | values, release=release, namespace=namespace)


@pytest.fixture(scope="module")
def default() -> list[dict[str, Any]]:
    """The objects without values; tests do not change them."""
    return render({})


def objects(rendered: list[dict[str, Any]]) -> Counter[tuple[str, str, str]]:
    """Count rendered objects by kind, namespace and name."""
    metadata = ((body["kind"], body["metadata"]) for body in rendered)
    return Counter((kind, data.get("namespace", ""), data["name"]) for kind, data in metadata)


def the(kind: str, rendered: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only object of *kind*."""
    (body,) = (body for body in rendered if body["kind"] == kind)
    return body


def images(rendered: list[dict[str, Any]]) -> list[str]:
    """Return the images of the operator and of replay jobs."""
    (container,) = the("Deployment", rendered)["spec"]["template"]["spec"]["containers"]
    (replay,) = the("PodTemplate", rendered)["template"]["spec"]["containers"]
    assert not [word for word in container["args"] if replay["image"] in word]
    return [container["image"], replay["image"]]


def parent(folder: Path) -> Path:
    """Write a chart that depends on redrive, with a condition."""
    shutil.copytree(chart.CHART, folder / "charts" / "redrive")
    dependency = {"name": "redrive", "version": __version__, "condition": "redrive.enabled"}
    about = {"apiVersion": "v2", "name": "platform", "version": "1.0.0"}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about | {"dependencies": [dependency]}))
    return folder


def test_chart_without_definitions_is_refused_while_wanted(tmp_path: Path) -> None:
    """Tools that drop links or files would otherwise install an operator without its kinds."""
    copy = tmp_path / "redrive"
    shutil.copytree(chart.CHART, copy)
    shutil.rmtree(copy / "definitions")
    with pytest.raises(SandboxError, match=r"lacks a CRD; got no file .*connections\.yaml"):
        chart.render({}, chart=copy)
    assert the("Deployment", chart.render({"crds": {"install": False}}, chart=copy))


def test_chart_without_one_definition_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "redrive"
    shutil.copytree(chart.CHART, copy)
    (copy / "definitions" / "redrive.io_replays.yaml").write_text("../../crds/replays.yaml")
    with pytest.raises(SandboxError, match=r"lacks a CRD; got no file .*_replays\.yaml"):
        chart.render({}, chart=copy)


def test_chart_without_values_renders_a_name_none_can_publish(
    default: list[dict[str, Any]],
) -> None:
    assert images(default) == [DEFAULT, DEFAULT.replace("redrive:", "redrive-replay:")]


@pytest.mark.parametrize("enabled", [True, False])
def test_parent_chart_enables_redrive_by_a_condition(tmp_path: Path, *, enabled: bool) -> None:
    values = {
        "redrive": {"enabled": enabled, "image": {"tag": "2"}},
        "global": {"imageRegistry": "mirror.test", "imagePullSecrets": ["a"], "storageClass": "b"},
    }
    rendered = chart.render(values, chart=parent(tmp_path))
    assert bool(rendered) is enabled
    if enabled:
        assert images(rendered) == ["mirror.test/redrive:2", "mirror.test/redrive-replay:2"]
        operator = the("Deployment", rendered)["spec"]["template"]["spec"]
        assert operator["imagePullSecrets"] == [{"name": "a"}]


def test_anchors_of_values_are_ignored(default: list[dict[str, Any]]) -> None:
    assert render({"x-labels": {"a": "b"}, "x-": 1}) == default


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enabled": False}, "'/enabled': value must be true"),
        ({"xlabels": {}}, "additional properties 'xlabels' not allowed"),
        ({"global": {"imageRegisty": "a"}}, "imageRegistry and imagePullSecrets only; got imageRe"),
        ({"image": {"repository": "a.test/b"}}, "got a.test/b; set image.registry=a.test"),
        (
            {"replay": {"image": {"repository": "localhost:5000/b/c"}}},
            "got localhost:5000/b/c; set replay.image.registry=localhost:5000",
        ),
    ],
)
def test_value_without_effect_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        render(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"global": {"imageRegistry": "m.test/x"}}, ["m.test/x/redrive:1", "m.test/x/job:1"]),
        ({"image": {"registry": "r:5000", "tag": "1"}}, ["r:5000/redrive:1", "r:5000/job:1"]),
        ({"image": {"registry": "", "tag": "1"}}, ["redrive:1", "job:1"]),
    ],
)
def test_registries_apply_to_both_images(values: dict[str, Any], expected: list[str]) -> None:
    replay = {"replay": {"image": {"repository": "job"}}}
    assert images(render({"image": {"tag": "1"}} | values | replay)) == expected


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "namespaces": ["shop"],
            "clusterId": "ours",
            "rbac": {"secretNamespaces": ["vault"]},
            "crds": {"install": False},
        },
        {
            "podMonitor": {"enabled": True, "namespace": "monitoring"},
            "prometheusRule": {"enabled": True, "namespace": "monitoring"},
            "dashboard": {"enabled": True, "namespace": "monitoring"},
        },
    ],
)
def test_releases_of_one_name_share_no_object(values: dict[str, Any]) -> None:
    """The second one serves other namespaces, and writes to the same one."""
    first = objects(render(values, namespace="one"))
    other = values | {"namespaces": ["billing"]} if "namespaces" in values else values
    second = objects(render(other, namespace="two"))
    shared = {kind for kind, _, _ in first & second}
    assert shared <= {"CustomResourceDefinition"}


def test_releases_in_one_namespace_share_no_object() -> None:
    """The other names are those of objects of the first release, or begin as they do."""
    values = {"crds": {"install": False}, "dashboard": {"enabled": True}}
    first = render(values, release="redrive")
    names = {body["metadata"]["name"].partition(".")[0] for body in first} - {"redrive"}
    assert {"redrive-viewer", "redrive-replay"} <= names
    for name in names:
        assert not objects(first) & objects(render(values, release=name))


@pytest.mark.parametrize("release", ["redrive-replay", "redrive", "pay.redrive", "x"])
def test_release_of_any_name_renders_each_object_once(release: str) -> None:
    values = {
        "namespaces": ["shop", "vault"],
        "clusterId": "ours",
        "rbac": {"secretNamespaces": ["shop"]},
        "replay": {"namespaces": ["shop"], "secret": {"token": "t"}},
    }
    rendered = objects(render(values, release=release, namespace="shop-system"))
    assert set(rendered.values()) == {1}
    labels = [name for kind, _, name in rendered if kind in {"Service", "Deployment"}]
    assert not [name for name in labels if "." in name]


def test_roles_list_kinds_and_verbs_without_wildcards() -> None:
    values = {"replay": {"namespaces": ["shop"], "launchers": {"apache": True}}}
    roles = [body for body in render(values) if body["kind"] in {"Role", "ClusterRole"}]
    assert {"ClusterRole", "Role"} == {role["kind"] for role in roles}
    for role in roles:
        for rule in role["rules"]:
            for words in rule.values():
                assert not any("*" in word for word in words), (role["metadata"]["name"], rule)


def test_approvers_are_in_no_role_that_is_aggregated(default: list[dict[str, Any]]) -> None:
    roles = [body for body in default if body["kind"] == "ClusterRole"]
    writes = {
        role["metadata"]["name"]: role["metadata"]["labels"]
        for role in roles
        for rule in role["rules"]
        if "replayapprovals" in rule["resources"] and "create" in rule["verbs"]
    }
    assert "redrive-approver.redrive-system" in writes
    (labels,) = writes.values()
    assert not any("aggregate" in label for label in labels)


def rights_of(role: str, rendered: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return the kinds and verbs of a role of people, which is in no other role."""
    (body,) = (
        body for body in rendered if body["metadata"]["name"] == f"redrive-{role}.redrive-system"
    )
    assert not any("aggregate" in label for label in body["metadata"]["labels"])
    return {
        (kind, verb)
        for rule in body["rules"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
    }


def test_responder_patches_policies_only_under_admission_policy(
    default: list[dict[str, Any]],
) -> None:
    policies = ("retrypolicies", "rocketmqretrypolicies")
    kinds = ("brokerconnections", *policies, "replays", "replayapprovals", "inspections")
    expected = {(kind, verb) for kind in kinds for verb in ("get", "list", "watch")}
    inspector = expected | {("inspections", verb) for verb in ("create", "delete")}
    assert rights_of("inspector", default) == inspector
    expected |= {("replays", verb) for verb in ("create", "patch", "delete")}
    without = render({"admissionPolicy": {"create": False}})
    assert rights_of("responder", without) == expected
    assert rights_of("responder", default) == expected | {("retrypolicies", "patch")}
    assert rights_of("approver", default) == {("replayapprovals", v) for v in ("create", "delete")}


def test_operator_and_jobs_share_no_service_account() -> None:
    values = {"replay": {"namespaces": ["shop"]}}
    with pytest.raises(SandboxError, match="would share one ServiceAccount; got redrive-replay"):
        render(values, release="redrive-replay", namespace="shop")
    own = values | {"serviceAccount": {"name": "operator"}}
    rendered = objects(render(own, release="redrive-replay", namespace="shop"))
    assert set(rendered.values()) == {1}


@pytest.fixture(scope="module")
def deployment() -> dict[str, Any]:
    """The Deployment with many values, each of which has a place of its own."""
    values = {
        "deploymentAnnotations": {"a": "b"},
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 0,
        "commonLabels": {"a": "b", "c": "d"},
        "podLabels": {"a": "e"},
        "serviceAccount": {"automount": False},
        "terminationGracePeriodSeconds": 0,
        "runtimeClassName": "gvisor",
        "hostAliases": [{"ip": "::1"}],
        "dnsConfig": {"searches": ["a"]},
        "extraVolumes": [{"name": "a", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}],
        "extraArgs": ["--log-level=${A}"],
        "logLevel": "error",
        "livenessProbe": {"failureThreshold": 9},
        "readinessProbe": {"successThreshold": 2, "timeoutSeconds": 9},
    }
    return the("Deployment", render(values))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.annotations.a", "b"),
        ("spec.strategy.type", "Recreate"),
        ("spec.revisionHistoryLimit", 0),
        ("metadata.labels.a", "b"),
        ("pod.metadata.labels.c", "d"),
        ("pod.metadata.labels.a", "e"),
        ("pod.spec.automountServiceAccountToken", True),
        ("pod.spec.terminationGracePeriodSeconds", 0),
        ("pod.spec.runtimeClassName", "gvisor"),
        ("pod.spec.hostAliases.0.ip", "::1"),
        ("pod.spec.dnsConfig.searches.0", "a"),
        ("pod.spec.volumes.0.emptyDir", {}),
        ("container.volumeMounts.0.mountPath", "/a"),
        ("container.args.-1", "--log-level=${A}"),
        ("container.args.4", "--log-level=error"),
        ("container.livenessProbe.failureThreshold", 9),
        ("container.livenessProbe.periodSeconds", 10),
        ("container.readinessProbe.successThreshold", 2),
        ("container.readinessProbe.timeoutSeconds", 9),
    ],
)
def test_value_arrives_in_the_deployment(
    deployment: dict[str, Any], path: str, expected: object
) -> None:
    value: Any = deployment
    for short, whole in (("container.", "pod.spec.containers.0."), ("pod.", "spec.template.")):
        path = path.replace(short, whole) if path.startswith(short) else path
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    assert value == expected


@pytest.mark.parametrize("monitor", ["podMonitor", "serviceMonitor"])
def test_monitor_has_all_its_values(monitor: str) -> None:
    scrape = {
        "interval": "30s",
        "scrapeTimeout": "10s",
        "honorLabels": True,
        "relabelings": [{"targetLabel": "cluster", "replacement": "east"}],
        "metricRelabelings": [{"action": "drop", "sourceLabels": ["a"], "regex": "b.*"}],
    }
    where = {"namespace": "monitoring", "annotations": {"a": "b"}, "labels": {"team": "c"}}
    values = {monitor: {"enabled": True, **where, **scrape}, "commonLabels": {"team": "d"}}
    body = the(monitor[0].upper() + monitor[1:], render(values))
    assert body["metadata"]["labels"].items() >= {"team": "c"}.items()
    assert (body["metadata"]["namespace"], body["metadata"]["annotations"]["a"]) == (
        "monitoring",
        "b",
    )
    (endpoint,) = body["spec"].get("podMetricsEndpoints") or body["spec"]["endpoints"]
    assert endpoint == {"port": "http", **scrape}
    assert body["spec"]["namespaceSelector"] == {"matchNames": ["redrive-system"]}


@pytest.mark.parametrize("section", ["podMonitor", "serviceMonitor", "prometheusRule", "dashboard"])
def test_null_values_of_monitoring_are_absent_ones(
    default: list[dict[str, Any]], section: str
) -> None:
    """Helm removes a default where a user sets it to null."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))[section]
    assert render({section: None}) == default
    enabled = render({section: {"enabled": True}})
    assert len(enabled) == len(default) + 1
    nothing = dict.fromkeys(values.keys() - {"enabled"})
    nulls = render({section: {**nothing, "enabled": True}})
    for body in (*enabled, *nulls):
        body["metadata"].get("labels", {}).pop("grafana_dashboard", None)  # removed by its null
    assert nulls == enabled


def test_common_labels_are_on_every_object() -> None:
    values = {
        "commonLabels": {"owner": "platform"},
        "replay": {"namespaces": ["shop"], "secret": {"token": "t"}},
        "networkPolicy": {"enabled": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
    }
    rendered = chart.render(values)
    unlabelled = [b["kind"] for b in rendered if b["metadata"]["labels"].get("owner") != "platform"]
    assert unlabelled == []
    assert "owner" not in the("Deployment", rendered)["spec"]["selector"]["matchLabels"]


def test_alerts_and_dashboard_have_namespaces_of_their_own() -> None:
    values = {
        "prometheusRule": {"enabled": True, "namespace": "monitoring"},
        "dashboard": {"enabled": True, "namespace": "grafana", "annotations": {"folder": "a"}},
    }
    rendered = render(values)
    assert the("PrometheusRule", rendered)["metadata"]["namespace"] == "monitoring"
    maps = (body for body in rendered if body["kind"] == "ConfigMap")
    (dashboard,) = (
        body["metadata"]
        for body in maps
        if body["metadata"]["name"] == "redrive.redrive-system.dashboards"
    )
    assert (dashboard["namespace"], dashboard["annotations"]) == ("grafana", {"folder": "a"})


def test_network_policy_permits_the_port_of_metrics() -> None:
    rendered = render({"networkPolicy": {"enabled": True}})
    spec = the("NetworkPolicy", rendered)["spec"]
    assert (spec["ingress"], spec["egress"]) == ([{"ports": [{"port": "http"}]}], [{}])
    deployment = the("Deployment", rendered)
    assert spec["podSelector"] == deployment["spec"]["selector"]


def test_extra_objects_are_templates() -> None:
    texts = ["kind: Text\nmetadata: {name: '{{ .Release.Name }}'}"]
    objects = [{"kind": "Object", "metadata": {"name": "{{ .Release.Namespace }}"}}]
    rendered = render({"extraObjects": texts + objects})
    assert the("Text", rendered)["metadata"]["name"] == "redrive"
    assert the("Object", rendered)["metadata"]["name"] == "redrive-system"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"commonLabels": {"app.kubernetes.io/name": "a"}}, "invalid propertyName"),
        ({"podLabels": {"app.kubernetes.io/instance": "a"}}, "invalid propertyName"),
        ({"strategy": {"maxSurge": 1}}, "properties 'maxSurge' not allowed"),
        ({"livenessProbe": {"httpGet": {}}}, "properties 'httpGet' not allowed"),
        ({"networkPolicy": {"ingress": [{"to": []}]}}, "properties 'to' not allowed"),
        ({"networkPolicy": {"ingress": None}}, "'/networkPolicy': missing property 'ingress'"),
        ({"networkPolicy": {"egress": None}}, "'/networkPolicy': missing property 'egress'"),
        ({"podMonitor": {"relabelings": [{"target": "a"}]}}, "properties 'target' not allowed"),
        ({"extraVolumes": [{"emptyDir": {}}]}, "missing property 'name'"),
        ({"extraVolumeMounts": [{"name": "a"}]}, "missing property 'mountPath'"),
        ({"logLevel": "INFO"}, "'/logLevel': value must be one of"),
    ],
)
def test_misspelt_value_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        render(values)


LONG = "a" * 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replay": {"application": "local:///a #b"}}, "'/replay/application': .* not match"),
        ({"replay": {"application": "local:///"}}, "'/replay/application': .* not match"),
        ({"revisionHistoryLimit": 1e30}, "'/revisionHistoryLimit': maximum: got"),
        ({"terminationGracePeriodSeconds": 2**31}, "'/terminationGracePeriodSeconds': maximum"),
        ({"livenessProbe": {"periodSeconds": 1e30}}, "'/livenessProbe/periodSeconds': maximum"),
        ({"podSecurityContext": {"runAsUser": 2**53 + 1}}, "'/podSecurityContext/runAsUser': max"),
        ({"securityContext": {"runAsGroup": -1}}, "'/securityContext/runAsGroup': minimum"),
        ({"resources": {"requests": {"memory": 2**53 + 1}}}, "'/resources/requests/memory': max"),
        ({"resources": {"limits": {"memory": "1 gb"}}}, "'/resources/limits/memory': '1 gb'"),
        ({"resources": {"limits": {"cpu": True}}}, "'/resources/limits/cpu': got boolean"),
        ({"prometheusRule": {"runbookURL": 'https://a/"'}}, "'/prometheusRule/runbookURL': .* not"),
        ({"prometheusRule": {"alertLabels": {"a-b": "c"}}}, "invalid propertyName 'a-b'"),
        ({"credentials": {"volume": {"name": "a"}}}, "invalid propertyName 'name'"),
        ({"image": {"repository": "Redrive"}}, "'/image/repository': 'Redrive' does not match"),
        ({"image": {"repository": "a//b"}}, "'/image/repository': 'a//b' does not match"),
        ({"endpoint": {"address": "1"}}, "'/endpoint/address': '1' does not match"),
        ({"imagePullSecrets": [{"name": "a "}]}, "'/imagePullSecrets/0/name': 'a ' does not"),
        ({"serviceAccount": {"name": "a..b"}}, r"'/serviceAccount/name': 'a\.\.b' does not match"),
        ({"podLabels": {"a": "b c"}}, "'/podLabels/a': 'b c' does not match"),
        ({"commonLabels": {"a": LONG}}, "'/commonLabels/a': maxLength: got 64, want 63"),
        ({"dashboard": {"labels": {"a b": "c"}}}, "invalid propertyName 'a b'"),
        ({"commonLabels": {"rbac.authorization.k8s.io/aggregate-to-view": "true"}}, "invalid prop"),
        ({"nodeSelector": {"a": "b:c"}}, "'/nodeSelector/a': 'b:c' does not match"),
        ({"podAnnotations": {"a/b/c": "d"}}, "invalid propertyName 'a/b/c'"),
        ({"extraEnv": [{"name": "POD_NAME"}]}, "extraEnv: .* got POD_NAME; use another name"),
        ({"extraEnv": [{"name": "A"}, {"name": "A"}]}, "extraEnv: .* got A; use another name"),
        ({"extraVolumes": [{"name": "job-templates"}]}, "extraVolumes: .* got job-templates; use"),
        ({"extraVolumes": [{"name": "credentials"}]}, "extraVolumes: .* got credentials; use"),
    ],
)
def test_value_that_would_change_or_break_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        render(values)


def test_name_cut_at_dashes_ends_with_no_dash() -> None:
    rendered = render({"nameOverride": "a--b"}, release="z" * 49)
    assert the("Deployment", rendered)["metadata"]["name"] == f"{'z' * 49}-a"


def test_release_named_by_digits_needs_a_name_of_its_service() -> None:
    with pytest.raises(SandboxError, match="got 2024-redrive; set fullnameOverride, or service"):
        render({}, release="2024")
    for values in ({"fullnameOverride": "pay"}, {"service": {"enabled": False}}):
        assert the("Deployment", render(values, release="2024"))


@pytest.mark.parametrize("application", ["local:///a:", "local:///a#b", "local:///{{a}}'\""])
def test_path_of_the_job_stays_one_argument(application: str) -> None:
    deployment = the("Deployment", render({"replay": {"application": application}}))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--replay-application={application}" in container["args"]


def test_odd_but_valid_values_arrive_unchanged() -> None:
    quantities = ["1", "100m", ".5", "1.", "+1", "1E", "128974848", "1.5Gi", "5k", 0.1, 1e3]
    limits = {f"a.test/{number}": quantity for number, quantity in enumerate(quantities)}
    labels = {"a": "", "b.test/C_d": "1_000", "e": "yes", "f": "A" * 63}
    values = {
        "resources": {"requests": limits},
        "nodeSelector": labels,
        "image": {"registry": "", "repository": "team/re_drive--x/a.b", "tag": "1"},
        "extraEnv": [{"name": "A b"}, {"name": "POD"}],
        "imagePullSecrets": [{"name": "a.b-c"}],
        "endpoint": {"address": "[::1]"},
        "podSecurityContext": {"runAsUser": 2**31 - 1},
    }
    pod = the("Deployment", render(values))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == {"cpu": "100m", "memory": "128Mi", **limits}
    assert pod["nodeSelector"] == labels
    assert container["image"] == "team/re_drive--x/a.b:1"
    assert container["env"][1:] == values["extraEnv"]
    assert pod["imagePullSecrets"] == values["imagePullSecrets"]
    assert "--listen=[::1]:8080" in container["args"]
    assert pod["securityContext"]["runAsUser"] == 2**31 - 1


def test_severity_of_one_alert_has_priority_over_alert_labels() -> None:
    alerts = {"RedriveRetryStorm": {"severity": "info"}}
    values = {"enabled": True, "alertLabels": {"severity": "page"}, "alerts": alerts}
    groups = the("PrometheusRule", render({"prometheusRule": values}))["spec"]["groups"]
    rules = {rule["alert"]: rule["labels"]["severity"] for g in groups for rule in g["rules"]}
    assert rules.pop("RedriveRetryStorm") == "info"
    assert set(rules.values()) == {"page"}


def test_packaged_chart_has_license_readme_and_kinds(tmp_path: Path) -> None:
    chart.helm("package", str(chart.CHART), f"--destination={tmp_path}")
    with tarfile.open(tmp_path / f"redrive-{__version__}.tgz") as archive:
        names = {name.removeprefix("redrive/") for name in archive.getnames()}
    definitions = {f"definitions/{path.name}" for path in (CHECKOUT / "crds").glob("*.yaml")}
    assert names >= {"LICENSE", "README.md", *definitions}
