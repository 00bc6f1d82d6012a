"""The APIs of the Spark operators admit the applications of redrive, and drop no field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from redrive.api.connection import ReplayIdentity
from redrive.api.job import JobTemplate
from redrive.api.replay import ReplayEngine
from redrive.kube.context import Settings
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.controller.launch import ChosenTemplate, key_source, pod_access
from redrive.replay.controller.spark_operators import JOB, LAUNCHERS, Launcher
from redrive.replay.spec import ReplayJob
from sandbox import spark
from sandbox.errors import SandboxError
from sandbox.kubernetes import Cluster

pytestmark = pytest.mark.xdist_group("control plane")

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


@pytest.fixture(scope="module", autouse=True)
def _applications(cluster: Cluster) -> None:
    cluster.define(spark.definitions())


def manifest(launcher: Launcher, template: dict[str, Any]) -> dict[str, Any]:
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


@pytest.mark.parametrize("template", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.resource.group)
def test_application_is_admitted_with_all_its_fields(
    cluster: Cluster, launcher: Launcher, template: dict[str, Any]
) -> None:
    made = manifest(launcher, template)
    admitted = cluster.objects.put(made, dry_run=True)
    assert admitted["apiVersion"] == launcher.resource.api_version
    assert holds(admitted["spec"], made["spec"])
    made["spec"]["unheardOf"] = 1
    with pytest.raises(SandboxError, match="unheardOf"):
        cluster.objects.put(made, dry_run=True)


POD = ("driverSpec", "podTemplateSpec", "spec")


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
    made = json.loads(json.dumps(manifest(launcher, EVERYTHING)))
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
