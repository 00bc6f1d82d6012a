"""SparkApplications that a Replay launches: template, driver and entrypoint."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.api.connection import ReplayIdentity
from redrive.api.job import JobDefaults, JobRequest, JobTemplate, is_open_property
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess
from redrive.errors import InvalidSpecError, JobNotPermittedError
from redrive.kube.context import Settings
from redrive.kube.resources import Key
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.controller.launch import ACCESS_FOLDER, PodAccess, pod_access, resolve_template
from redrive.replay.controller.spark_operators import kubeflow_manifest
from redrive.replay.spec import ReplayJob

SETTINGS = Settings(
    "here", (), Key("redrive", "replay"), "local:///opt/redrive/replay.py", "redrive-replay"
)
TOKEN = {"secretRef": {"name": "pulsar-replayer", "key": "token"}}
HOSTS = ("broker-*.pulsar", "other")


def identity(method: str, value: object = None, **fields: object) -> ReplayIdentity:
    credentials = {method.lower(): value} if value else {}
    return ReplayIdentity.model_validate(
        {"role": "replayer", "authentication": {"type": method, **credentials}, **fields}
    )


ACCESS = pod_access(identity("Token", TOKEN), HOSTS)
POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", name="shop/orders", generation=3)
JOB = ReplayJob(
    "shop", "after-fix", "uid-1", POLICY, "pulsar://pulsar:6650", "http://pulsar:8080", "key = 'ü'"
)


def manifest(
    template: dict[str, Any] | None = None, job: ReplayJob = JOB, access: PodAccess = ACCESS
) -> Any:  # noqa: ANN401  a manifest
    """Return the SparkApplication of the Kubeflow Spark operator."""
    pods = JobDefaults.model_validate(template or {})
    made = launch.application(replay(), job, access, pods, SETTINGS, image="registry/redrive:1")
    return kubeflow_manifest(made)


def replay(name: str = "after-fix", uid: str = "uid-1") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "shop", "uid": uid}}


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True), st.uuids())
def test_application_name_is_valid_for_spark(name: str, uid: object) -> None:
    made = launch.name_of(replay(name, str(uid)))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made)
    assert len(made) <= 45
    assert made == launch.name_of(replay(name, str(uid)))


def test_recreated_replay_gets_another_application() -> None:
    assert launch.name_of(replay(uid="uid-1")) != launch.name_of(replay(uid="uid-2"))


def test_application_is_owned_by_its_replay() -> None:
    (owner,) = manifest()["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Replay", "after-fix", "uid-1")
    assert owner["controller"] is True


CA = {"caRef": {"name": "authority", "key": "ca.pem"}}
CLIENT = {
    "issuerURL": "https://issuer/$(PATH)",
    "clientID": "replay",
    "clientSecret": {"secretRef": {"name": "client", "key": "password"}},
    "audience": "urn:pulsar",
    "caRef": {"kind": "Secret", "name": "issuer", "key": "ca.pem"},
}


@pytest.mark.parametrize(
    ("role", "sources"),
    [
        (identity("Token", TOKEN), [("secret", "pulsar-replayer", {"token": "credentials/token"})]),
        (
            identity("TLS", {"secretRef": {"name": "certificate"}}, tls=CA),
            [
                (
                    "secret",
                    "certificate",
                    {"tls.crt": "credentials/tls.crt", "tls.key": "credentials/tls.key"},
                ),
                ("configMap", "authority", {"ca.pem": "ca/ca.crt"}),
            ],
        ),
        (
            identity("OAuth2", CLIENT),
            [
                ("secret", "client", {"password": "credentials/client-secret"}),
                ("secret", "issuer", {"ca.pem": "issuer-ca/ca.crt"}),
            ],
        ),
        (identity("None", tls=CA), [("configMap", "authority", {"ca.pem": "ca/ca.crt"})]),
        (identity("None"), []),
    ],
)
def test_pods_mount_only_credentials_of_replay_role(
    role: ReplayIdentity, sources: list[tuple[str, str, dict[str, str]]]
) -> None:
    spec = manifest(access=pod_access(role, HOSTS))["spec"]
    mounted = [
        (kind, by["name"], {item["key"]: item["path"] for item in by["items"]})
        for volume in spec.get("volumes", [])
        for source in volume["projected"]["sources"]
        for kind, by in source.items()
    ]
    assert mounted == sources
    mount = {"name": "redrive-access", "mountPath": ACCESS_FOLDER, "readOnly": True}
    for pod in (spec["driver"], spec["executor"]):
        assert pod.get("volumeMounts", []) == [mount] * bool(sources)
        ((name, value),) = [(variable["name"], variable["value"]) for variable in pod["env"]]
        assert name == ACCESS_VARIABLE
        assert "$" not in value  # a kubelet would put in variables
        decoded = BrokerAccess.decode(value)
        assert (decoded.folder, decoded.redirect_hosts) == (ACCESS_FOLDER, HOSTS)
        assert decoded.issuer_url == (CLIENT["issuerURL"] if decoded.method == "oauth2" else None)
    assert "pulsar-replayer" not in json.dumps(spec["arguments"])


@pytest.mark.parametrize("wrong", ["", "{}", "[]", "null", '{"method": "magic"}'])
def test_invalid_access_document_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match=ACCESS_VARIABLE):
        BrokerAccess.decode(wrong)


def test_job_runs_with_image_and_account_of_the_operator() -> None:
    spec = manifest()["spec"]
    assert spec["image"] == "registry/redrive:1"
    assert spec["mainApplicationFile"] == "local:///opt/redrive/replay.py"
    assert spec["driver"]["serviceAccount"] == "redrive-replay"
    assert spec["sparkConf"]["spark.speculation"] == "false"


def test_spark_version_is_the_tested_one() -> None:
    spec = manifest()["spec"]
    assert spec["sparkVersion"] == metadata.version("pyspark")


def test_argument_contains_the_whole_job() -> None:
    (argument,) = manifest()["spec"]["arguments"]
    assert ReplayJob.decode(argument) == JOB


def test_argument_contains_no_kubelet_variables() -> None:
    """`$(NAME)` in a container's arguments stands for a variable."""
    job = replace(JOB, where="key > '$(REDRIVE_PULSAR_ACCESS)'")
    (argument,) = manifest(job=job)["spec"]["arguments"]
    assert "$" not in argument
    assert ReplayJob.decode(argument) == job


@pytest.mark.parametrize("wrong", ["", "{}", "[]", "null", '{"namespace": 1}'])
def test_invalid_job_argument_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match="the JSON document that the operator writes"):
        ReplayJob.decode(wrong)


RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def test_pods_pass_restricted_pod_security() -> None:
    spec = manifest()["spec"]
    assert [spec[pod]["securityContext"] for pod in ("driver", "executor")] == [RESTRICTED] * 2
    user = {"runAsUser": 185, "runAsGroup": 185, "fsGroup": 1000}
    spec = manifest({"securityContext": user})["spec"]
    for pod in (spec["driver"], spec["executor"]):
        assert pod["securityContext"] == {**RESTRICTED, "runAsUser": 185, "runAsGroup": 185}
        assert pod["podSecurityContext"] == {"fsGroup": 1000}


def test_template_cannot_replace_settings_of_redrive() -> None:
    properties = {
        "spark.speculation": "true",
        "spark.kubernetes.executor.podNamePrefix": "theirs",
        "spark.kubernetes.executor.disableConfigMap": "false",
        "spark.task.maxFailures": "8",
    }
    assert manifest({"sparkConf": properties})["spec"]["sparkConf"] == {
        "spark.speculation": "false",
        "spark.kubernetes.executor.podNamePrefix": launch.name_of(replay()),
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.task.maxFailures": "8",
    }


def test_template_fields_reach_the_pods() -> None:
    taint = {"key": "spot", "operator": "Exists"}
    spec = manifest(
        {
            "image": "registry/other:1",
            "imagePullSecrets": ["registry"],
            "driver": {"memory": "2g"},
            "executor": {"cores": 2, "coreRequest": "500m"},
            "executors": 3,
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [taint],
            "labels": {"team": "shop"},
            "annotations": {"sidecar": "no"},
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
            "timeToLiveSeconds": 600,
        }
    )["spec"]
    assert spec["image"] == "registry/other:1"
    assert spec["imagePullSecrets"] == ["registry"]
    assert spec["timeToLiveSeconds"] == 600
    assert spec["volumes"][0] == {"name": "job-scratch", "emptyDir": {"sizeLimit": "1Gi"}}
    assert (spec["driver"]["memory"], spec["driver"]["cores"]) == ("2g", 1)
    assert (spec["executor"]["cores"], spec["executor"]["coreRequest"]) == (2, "500m")
    assert spec["executor"]["instances"] == 3
    for pod in (spec["driver"], spec["executor"]):
        assert pod["nodeSelector"] == {"disk": "ssd"}
        assert pod["tolerations"] == [taint]
        assert (pod["labels"], pod["annotations"]) == ({"team": "shop"}, {"sidecar": "no"})
        mounted = {mount["name"]: mount["mountPath"] for mount in pod["volumeMounts"]}
        assert mounted == {"job-scratch": "/mnt/scratch", "redrive-access": ACCESS_FOLDER}


@pytest.mark.parametrize(("executors", "initial"), [(None, 2), (3, 3), (9, 4)])
def test_dynamic_allocation_begins_within_its_bounds(executors: int | None, initial: int) -> None:
    template = {"dynamicAllocation": {"minExecutors": 2, "maxExecutors": 4}, "executors": executors}
    spec = manifest(template)["spec"]
    assert spec["dynamicAllocation"] == {
        "enabled": True,
        "initialExecutors": initial,
        "minExecutors": 2,
        "maxExecutors": 4,
    }
    assert spec["executor"]["instances"] == initial


def settings_with(**template: object) -> Settings:
    return replace(SETTINGS, replay_job=JobDefaults.model_validate(template))


def resolved(
    asked: dict[str, Any] | None = None,
    connection: dict[str, Any] | None = None,
    chart: Settings = SETTINGS,
) -> JobDefaults:
    return resolve_template(
        chart,
        None if connection is None else JobTemplate.model_validate(connection),
        None if asked is None else JobRequest.model_validate(asked),
    )


def test_replay_precedes_connection_and_connection_chart() -> None:
    chart = settings_with(
        driver={"memory": "1g", "coreRequest": "100m"},
        executors=1,
        sparkConf={"spark.task.maxFailures": "1", "spark.rpc.message.maxSize": "1"},
        labels={"team": "platform"},
    )
    connection = {
        "driver": {"memory": "2g"},
        "executors": 2,
        "sparkConf": {"spark.task.maxFailures": "2"},
        "overrides": {"maxExecutors": 4},
    }
    template = resolved({"executors": 3}, connection, chart).to_manifest()
    assert template["driver"] == {"memory": "2g", "coreRequest": "100m"}
    assert template["executors"] == 3
    assert template["sparkConf"] == {
        "spark.task.maxFailures": "2",
        "spark.rpc.message.maxSize": "1",
    }
    assert template["labels"] == {"team": "platform"}


ASKED: list[dict[str, Any]] = [
    {"image": "registry/other:1"},
    {"driver": {"cores": 3}},
    {"executor": {"cores": 3}},
    {"executor": {"coreRequest": "2001m"}},
    {"executor": {"coreRequest": "2.5"}},
    {"driver": {"memory": "3g"}},
    {"driver": {"memory": "2049m"}},
    {"executors": 5},
    {"dynamicAllocation": {"minExecutors": 1, "maxExecutors": 5}},
    {"nodeSelector": {"disk": "ssd"}},
    {"tolerations": [{"operator": "Exists"}]},
    {"sparkConf": {"spark.task.maxFailures": "9"}},
]
SOME_OVERRIDES = {
    "images": ["registry/redrive-*:1"],
    "maxCores": 2,
    "maxMemory": "2g",
    "maxExecutors": 4,
    "sparkConf": ["spark.rpc.message.maxSize"],
}


@pytest.mark.parametrize("overrides", [None, {}, SOME_OVERRIDES], ids=["none", "empty", "some"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_replay_beyond_permitted_overrides_is_refused(
    asked: dict[str, Any], overrides: dict[str, Any] | None
) -> None:
    chart = settings_with(images=["registry/*"])
    with pytest.raises(JobNotPermittedError, match=f"got '.*{next(iter(asked))[:4]}"):
        resolved(asked, {"overrides": overrides}, chart)


def test_replay_within_permitted_overrides_is_granted() -> None:
    asked = {
        "image": "registry/redrive-replay:1",
        "driver": {"cores": 2, "memory": "2048m", "coreRequest": "2"},
        "executors": 4,
        "nodeSelector": {"disk": "ssd"},
        "sparkConf": {"spark.rpc.message.maxSize": "9"},
        "timeToLiveSeconds": 60,
    }
    overrides = {"overrides": {**SOME_OVERRIDES, "placement": True}}
    template = resolved(asked, overrides, settings_with(images=["registry/*"])).to_manifest()
    assert template.items() >= asked.items()


def test_chart_overrides_apply_if_connection_has_none() -> None:
    chart = settings_with(overrides={"maxExecutors": 4})
    assert resolved({"executors": 4}, {"executors": 2}, chart).executors == 4
    with pytest.raises(JobNotPermittedError):
        resolved({"executors": 4}, {"overrides": {"maxExecutors": 3}}, chart)


@pytest.mark.parametrize("asking", ["connection", "replay"])
def test_image_must_be_permitted_by_the_operator(asking: str) -> None:
    """Whoever chooses it has the rights of the ServiceAccount in the namespace of the Replay."""

    def ask(image: str, chart: Settings = SETTINGS) -> JobDefaults:
        if asking == "connection":
            return resolved(None, {"image": image}, chart)
        return resolved({"image": image}, {"overrides": {"images": ["r*", "r*/*"]}}, chart)

    for image in ("registry/other:1", "registry/redrive-replay:1"):
        with pytest.raises(JobNotPermittedError, match=r"replay\.job\.images"):
            ask(image)
    assert ask("r/the-charts:1", settings_with(image="r/the-charts:1")).image == "r/the-charts:1"
    permitting = settings_with(images=["registry/redrive-*:2"])
    assert ask("registry/redrive-x:2", permitting).image == "registry/redrive-x:2"
    for image in ("registry/redrive-x:2/x:2", "registry/redrive-x/y:2", "registry/redrive-x:22"):
        with pytest.raises(JobNotPermittedError):
            ask(image, permitting)


CLOSED = [
    "spark.driver.extraJavaOptions",
    "spark.executor.extraJavaOptions",
    "spark.driver.defaultJavaOptions",
    "spark.driver.extraClassPath",
    "spark.executor.resource.gpu.discoveryScript",
    "spark.executorEnv.REDRIVE_PULSAR_ACCESS",
    "spark.extraListeners",
    "spark.files",
    "spark.jars",
    "spark.jars.packages",
    "spark.kubernetes.authenticate.driver.serviceAccountName",
    "spark.kubernetes.allocation.pods.allocator",
    "spark.kubernetes.container.image",
    "spark.kubernetes.driver.annotation.iam",
    "spark.kubernetes.driver.label.app",
    "spark.kubernetes.driver.podTemplateFile",
    "spark.kubernetes.driver.secretKeyRef.A",
    "spark.kubernetes.driver.secrets.other",
    "spark.kubernetes.driver.volumes.hostPath.a.mount.path",
    "spark.kubernetes.driverEnv.A",
    "spark.kubernetes.executor.disableConfigMap",
    "spark.kubernetes.executor.podNamePrefix",
    "spark.kubernetes.executor.secrets.other",
    "spark.kubernetes.namespace",
    "spark.master",
    "spark.plugins",
    "spark.pyspark.python",
    "spark.python.worker.module",
    "spark.speculation",
    "spark.submit.pyFiles",
    "spark.ui.filters",
    "SPARK.TASK.cpus",
    "",
]


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("model", [JobTemplate, JobRequest])
def test_closed_spark_properties_are_refused(name: str, model: type[JobRequest]) -> None:
    with pytest.raises(ValueError, match="a Spark property is one that may be set here"):
        model.model_validate({"sparkConf": {"spark.task.maxFailures": "1", name: "x"}})
    with pytest.raises(ValueError, match="a Spark property is one that may be set here"):
        JobTemplate.model_validate({"overrides": {"sparkConf": [name]}})


@given(st.text(max_size=30))
def test_only_listed_spark_properties_are_open(end: str) -> None:
    for prefix in ("spark.kubernetes.driver.", "spark.kubernetes.executor.secrets.", "spark.jars"):
        assert not is_open_property(prefix + end)


@pytest.mark.parametrize(
    "field",
    [
        {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]},
        {"volumes": [{"name": "a", "secret": {"secretName": "b"}}]},
        {"volumes": [{"name": "../etc", "emptyDir": {}}]},
        {"volumes": [{"name": "a"}]},
        {"serviceAccount": "admin"},
        {"env": []},
        {"labels": {"a": "b"}},
        {"annotations": {"a": "b"}},
        {"images": ["*"]},
        {"securityContext": {"privileged": True}},
        {"securityContext": {"runAsUser": 0}},
    ],
    ids=str,
)
def test_connection_template_has_no_dangerous_fields(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        JobTemplate.model_validate(field)


@pytest.mark.parametrize("field", ["imagePullSecrets", "securityContext", "volumes", "overrides"])
def test_replay_template_has_fewer_fields_than_connection(field: str) -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        JobRequest.model_validate({field: {"maxExecutors": 2}})


ENTRYPOINT = Path(__file__).parents[4] / "images" / "replay-entrypoint.sh"
DRIVER = (
    "trap 'echo terminated; exit 9' TERM; echo begun; until [ -e end ]; do /bin/sleep 0.05; done; "
    "exit 7"
)


@contextmanager
def running_driver(folder: Path, grace: str) -> Iterator[subprocess.Popen[str]]:
    """Run a driver that ends when there is a file `end`, or by SIGTERM.

    Args:
        folder: of the test.
        grace: the command that takes as long as the driver has after SIGTERM.
    """
    sleep = folder / "sleep"
    sleep.write_text(f"#!/bin/sh\n{grace}\n")
    sleep.chmod(0o755)
    with subprocess.Popen(
        ["/bin/bash", ENTRYPOINT, "drain", "/bin/bash", "-c", DRIVER],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process


def test_driver_that_ends_in_time_gets_no_signal(tmp_path: Path) -> None:
    with running_driver(
        tmp_path, "touch asked; while [ -e asked ]; do /bin/sleep 0.05; done"
    ) as process:
        process.terminate()
        while not (tmp_path / "asked").exists():
            assert process.poll() is None
        process.terminate()  # once more does not shorten its time
        (tmp_path / "end").touch()
        assert process.wait(30) == 7
        (tmp_path / "asked").unlink()
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_driver_past_its_grace_period_is_terminated(tmp_path: Path) -> None:
    with running_driver(tmp_path, "true") as process:
        process.terminate()
        assert process.wait(30) == 9
        assert process.stdout is not None
        assert process.stdout.read() == "terminated\n"


def test_exit_code_of_driver_is_that_of_container(tmp_path: Path) -> None:
    with running_driver(tmp_path, "false") as process:
        (tmp_path / "end").touch()
        assert process.wait(30) == 7
