"""Manifests at a real API server: `redrive diff`, job templates, and Spark applications."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from redrive.api.connection import ReplayIdentity
from redrive.api.job import JobTemplate
from redrive.api.replay import ReplayEngine
from redrive.cli.diff import diff
from redrive.kube.client import Kubernetes
from redrive.kube.context import Settings
from redrive.kube.job_templates import JobTemplates
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.reasons import Reason
from redrive.replay.controller import launch
from redrive.replay.controller.launch import ChosenTemplate, key_source, pod_access
from redrive.replay.controller.spark_operators import JOB, LAUNCHERS, Launcher
from redrive.replay.spec import ReplayJob
from sandbox import spark
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster
from tests.support.manifests import manifest
from tests.support.reasons import raises

pytestmark = pytest.mark.xdist_group("control plane")

ROLE = "shop-fulfilment"
REPLAY = {
    "metadata": {"name": "after.fix", "namespace": "default", "uid": "u"},
    "spec": {"policyRef": {"name": "orders"}},
}
POD_TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "shop"}, "annotations": {"owner": "shop"}},
    "spec": {
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoSchedule"}],
        "imagePullSecrets": [{"name": "registry"}],
        "securityContext": {"runAsUser": 185, "runAsGroup": 185, "fsGroup": 185},
        "volumes": [
            {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            {"name": "settings", "configMap": {"name": "settings"}},
        ],
        "containers": [
            {
                "name": "redrive",
                "resources": {
                    "requests": {"cpu": "100m", "memory": "1500Mi"},
                    "limits": {"cpu": 1},
                },
                "env": [{"name": "TZ", "value": "UTC"}],
            }
        ],
    },
}
EVERYTHING: dict[str, Any] = {
    "image": "registry/other:1",
    "metadata": {"labels": {"queue": "batch"}, "annotations": {"cost": "7"}},
    "job": POD_TEMPLATE,
    "driver": POD_TEMPLATE,
    "executor": POD_TEMPLATE,
    "executors": 2,
    "sparkConf": {"spark.task.maxFailures": "8"},
}


def run(cluster: Cluster, namespace: str, file: Path, **spec: object) -> Result:
    """Compare a policy with *spec* to the one in the cluster."""
    file.write_text(yaml.safe_dump(manifest("RetryPolicy", "orders", **spec)), "utf-8")
    arguments = [str(file), "--kubeconfig", str(cluster.kubeconfig), "-n", namespace]
    return CliRunner().invoke(diff, arguments, standalone_mode=False, catch_exceptions=False)


def test_diff_shows_consequences_of_a_changed_policy(
    cluster: Cluster, kube_namespace: str, tmp_path: Path
) -> None:
    cluster.objects.put(
        manifest("BrokerConnection", "main", policyDefaults={"maxRetries": 5}), kube_namespace
    )
    new = run(cluster, kube_namespace, tmp_path / "a.yaml")
    assert new.return_value == 1
    assert "+consumers, maxRetries: 5" in new.stdout.splitlines()

    cluster.objects.put(manifest("RetryPolicy", "orders"), kube_namespace)
    same = run(cluster, kube_namespace, tmp_path / "a.yaml")
    assert (same.return_value, same.stdout) == (0, "")

    changed = run(cluster, kube_namespace, tmp_path / "a.yaml", maxRetries=3, consumerRoles=[ROLE])
    assert changed.return_value == 1
    lines = changed.stdout.splitlines()
    assert {"-consumers, maxRetries: 5", "+consumers, maxRetries: 3"} <= set(lines)
    assert f"+rights of {ROLE} on orders-fulfilment-RETRY: consume, produce" in lines

    moved = run(cluster, kube_namespace, tmp_path / "a.yaml", subscription="billing")
    assert "error: spec.subscription can't change; create another RetryPolicy" in moved.stdout
    listed = cluster.kubectl("get", "rpol", "-n", kube_namespace, "-o", "name").split()
    assert listed == ["retrypolicy.redrive.io/orders"]


def test_diff_that_cannot_run_exits_with_2(
    cluster: Cluster, kube_namespace: str, tmp_path: Path
) -> None:
    invalid = run(cluster, kube_namespace, tmp_path / "a.yaml", maxRetries=-1)
    assert invalid.return_value == 2
    assert "spec.maxRetries: maxRetries must be from 0 to 1000" in invalid.stderr
    absent = CliRunner().invoke(
        diff, ["-", "--kubeconfig", str(tmp_path / "absent")], standalone_mode=False
    )
    assert absent.return_value == 2
    assert absent.stderr.startswith("error: there is no kubeconfig")


async def read(folder: Path, **templates: object) -> JobTemplates:
    """Return the job templates of a file, as the operator reads them."""
    file = folder / "templates.yaml"
    file.write_text(yaml.safe_dump(templates))
    store = JobTemplates(file)
    async with Kubernetes.connect() as kubernetes:
        await store.read(kubernetes, "default")
    return store


@pytest.fixture
def kubeconfig(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect the client to the cluster of the test."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))


@pytest.mark.usefixtures("kubeconfig")
@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ({"spec": {"nodeSelectors": {"a": "b"}}}, 'unknown field "template.spec.nodeSelectors"'),
        ({"spec": {"tolerations": [{"operator": "Sometimes"}]}}, "tolerations"),
        ({"spec": {"containers": [{"env": [{"name": "A", "values": 1}]}]}}, "env\\[0\\].values"),
        ({"spec": {"volumes": [{"name": "A B", "emptyDir": {}}]}}, "volumes\\[0\\].name"),
        ({"spec": {"containers": [{"volumeMounts": [{"name": "a", "mountPath": "/a"}]}]}}, "Not f"),
        ({"metadata": {"labels": {"a b": "c"}}}, "labels"),
        ({"spec": {"priorityClassName": 5}}, "priorityClassName"),
    ],
)
@pytest.mark.parametrize("role", ["driver", "executor"])
async def test_template_that_api_server_refuses_is_invalid(
    tmp_path: Path, role: str, pod: dict[str, Any], message: str
) -> None:
    store = await read(tmp_path, large={role: pod})
    with raises(Reason.JOB_TEMPLATE_INVALID, match=message):
        store.find("large")


@pytest.mark.usefixtures("kubeconfig")
async def test_whole_template_is_admitted_and_not_stored(cluster: Cluster, tmp_path: Path) -> None:
    pod = {
        "metadata": {"labels": {"team": "shop"}},
        "spec": {
            "securityContext": {"runAsUser": 1_000_700_000, "fsGroup": 1_000_700_000},
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
            ],
            "initContainers": [{"name": "wait", "image": "busybox", "restartPolicy": "Always"}],
            "containers": [
                {"name": "proxy", "image": "proxy:1"},
                {"name": "redrive", "resources": {"requests": {"cpu": 0.5, "memory": "2Gi"}}},
            ],
        },
    }
    store = await read(tmp_path, large={"driver": pod, "executor": pod}, small={})
    assert store.names == ("default", "large", "small")
    assert [store.problem(name) for name in store.names] == [None] * 3
    stored = json.loads(cluster.kubectl("get", "podtemplates", "-n", "default", "-o", "json"))
    assert stored["items"] == []


@pytest.fixture(scope="module")
def _applications(cluster: Cluster) -> None:
    cluster.define(spark.definitions())


def application_manifest(launcher: Launcher, template: dict[str, Any]) -> dict[str, Any]:
    key = {"secretRef": {"name": "replayer", "key": "token"}}
    tls = {"caRef": {"name": "authority", "key": "ca.crt"}}
    identity = {"role": "replayer", "authentication": {"type": "Token", "token": key}, "tls": tls}
    access = pod_access(ReplayIdentity.model_validate(identity), (), key_source("orders-ledger"))
    policy = Policy(TopicName("shop", "prod", "orders"), "fulfilment", name="shop/orders")
    job = ReplayJob("default", "after.fix", "u", policy, "pulsar://p:6650", "http://p:8080", None)
    engine = ReplayEngine.JOB if launcher is JOB else ReplayEngine.SPARK
    chosen = ChosenTemplate("default", JobTemplate.model_validate(template), 2, engine)
    settings = Settings(
        "here", (), Key("redrive", "replay"), "local:///replay.py", "redrive-replay"
    )
    through = Key("default", "main")
    made = launch.application(
        REPLAY, through, job, access, chosen, settings, image="registry/job:1"
    )
    return dict(launcher.manifest(made))


@pytest.mark.usefixtures("_applications")
@pytest.mark.parametrize("template", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.resource.group)
def test_application_is_admitted_with_all_its_fields(
    cluster: Cluster, launcher: Launcher, template: dict[str, Any]
) -> None:
    made = application_manifest(launcher, template)
    admitted = cluster.objects.put(made, dry_run=True)
    assert admitted["apiVersion"] == launcher.resource.api_version
    assert holds(admitted["spec"], made["spec"])
    made["spec"]["unheardOf"] = 1
    with pytest.raises(SandboxError, match="unheardOf"):
        cluster.objects.put(made, dry_run=True)


POD = ("driverSpec", "podTemplateSpec", "spec")


@pytest.mark.usefixtures("_applications")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ((*POD, "nodeSelectors"), {"disk": "ssd"}, "unknown field .*nodeSelectors"),
        ((*POD, "tolerations", 0, "keys"), ["a"], "unknown field .*keys"),
        ((*POD, "containers", 0, "envs"), [], "unknown field .*envs"),
        ((*POD, "volumes", 0, "emptyDirs"), {}, "unknown field .*emptyDirs"),
        (("applicationTolerations", "restarts"), 3, "unknown field .*restarts"),
        (("applicationTolerations", "restartConfig", "restartPolicy"), "Sometimes", "Unsupported"),
        (("applicationTolerations", "ttlAfterStopMillis"), "1d", "must be of type integer"),
        (("driverArgs",), [1], "must be of type string"),
        (("sparkConf", "spark.executor.instances"), 2, "must be of type string"),
        (("runtimeVersions",), {}, "sparkVersion: Required"),
        (("mainApplicationFile",), "local:///replay.py", "unknown field .*mainApplicationFile"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_field_or_value_unknown_to_apache_api_is_refused(
    cluster: Cluster, field: tuple[str | int, ...], value: object, message: str
) -> None:
    (launcher,) = (
        launcher for launcher in LAUNCHERS if launcher.resource.api_version == "spark.apache.org/v1"
    )
    made = json.loads(json.dumps(application_manifest(launcher, EVERYTHING)))
    place = made["spec"]
    for name in field[:-1]:
        place = place[name]
    place[field[-1]] = value
    with pytest.raises(SandboxError, match=message):
        cluster.objects.put(made, dry_run=True)


def holds(whole: Any, part: Any) -> bool:  # noqa: ANN401  JSON
    """Return True if *whole* has all values of *part*; it may have defaults besides."""
    match part:
        case dict():
            return all(name in whole and holds(whole[name], part[name]) for name in part)
        case list():
            return len(whole) == len(part) and all(map(holds, whole, part))
        case _:
            return bool(whole == part)
