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
from redrive.api.job import ACCESS_FOLDER, RESTRICTED, SPARK_ROLES, JobTemplate, Role
from redrive.api.replay import ReplayEngine
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess
from redrive.errors import InvalidSpecError
from redrive.kube.context import Settings
from redrive.kube.resources import Key, keep_of
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.controller.launch import (
    ChosenTemplate,
    JobApplication,
    PodAccess,
    key_source,
    pod_access,
)
from redrive.replay.controller.spark_operators import (
    LAUNCHERS,
    Launcher,
    job_manifest,
    kubeflow_manifest,
)
from redrive.replay.spec import PodSize, ReplayJob

SETTINGS = Settings(
    "here", (), Key("redrive", "replay"), "local:///opt/redrive/replay.py", "redrive-replay"
)
TOKEN = {"secretRef": {"name": "pulsar-replayer", "key": "token"}}
HOSTS = ("broker-*.pulsar", "other")
KEY_SECRET = "orders-ledger-0f4a9c31d2"  # noqa: S105  its name
KEY_SOURCE = ("secret", KEY_SECRET, {"key": "ledger/key"})


def identity(method: str, value: object = None, **fields: object) -> ReplayIdentity:
    credentials = {method.lower(): value} if value else {}
    return ReplayIdentity.model_validate(
        {"role": "replayer", "authentication": {"type": method, **credentials}, **fields}
    )


ACCESS = pod_access(identity("Token", TOKEN), HOSTS, key_source(KEY_SECRET))
POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", name="shop/orders", generation=3)
JOB = ReplayJob(
    "shop", "after-fix", "uid-1", POLICY, "pulsar://pulsar:6650", "http://pulsar:8080", "key = 'ü'"
)


def manifest(
    template: dict[str, Any] | None = None,
    job: ReplayJob = JOB,
    access: PodAccess = ACCESS,
    executors: int = 1,
) -> Any:  # noqa: ANN401  a manifest
    """Return the SparkApplication of the Kubeflow Spark operator."""
    return kubeflow_manifest(application(template, job, access, executors))


def application(
    template: dict[str, Any] | None = None,
    job: ReplayJob = JOB,
    access: PodAccess = ACCESS,
    executors: int = 1,
    engine: ReplayEngine = ReplayEngine.SPARK,
) -> JobApplication:
    """Return the application of a Replay, whichever engine runs it."""
    chosen = ChosenTemplate(
        "default", JobTemplate.model_validate(template or {}), executors, engine
    )
    image, through = "registry/redrive:1", Key("shop", "main")
    return launch.application(replay(), through, job, access, chosen, SETTINGS, image=image)


def own_container(pod: dict[str, Any]) -> dict[str, Any]:
    """Return Spark's container of a pod of the application."""
    container: dict[str, Any] = pod["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.resource.group)
def test_launch_records_the_connection_that_the_cache_retains(launcher: Launcher) -> None:
    template = {"metadata": {"annotations": {"team": "shop", "redrive.io/connection": "a/b"}}}
    engine = ReplayEngine.JOB if launcher.name is None else ReplayEngine.SPARK
    made = dict(launcher.manifest(application(template, engine=engine)))
    assert made["metadata"]["annotations"]["team"] == "shop"
    made["metadata"] = {**made["metadata"], "uid": "u", "resourceVersion": "1"}
    kept = keep_of(launcher.resource)(made)
    assert launch.launched_through(kept) == launch.launched_through(made) == Key("shop", "main")
    for changed in ("", "main", "/main", "shop/"):
        made["metadata"]["annotations"]["redrive.io/connection"] = changed
        assert launch.launched_through(made) == Key("", "")  # counts for each connection


def test_job_has_one_pod_of_its_template_and_no_spark() -> None:
    own = {"resources": {"requests": {"cpu": 2, "memory": "2Gi"}}, "imagePullPolicy": "Always"}
    template = {
        "metadata": {"labels": {"queue": "batch"}},
        "job": {"spec": {"containers": [own], "nodeSelector": {"disk": "ssd"}}},
        "driver": {"spec": {"nodeSelector": {"disk": "hdd"}}},
    }
    made = job_manifest(application(template, engine=ReplayEngine.JOB))
    assert made["metadata"]["labels"] == {"queue": "batch", **LABELS}
    spec, pod = made["spec"], made["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (3, "Failed")
    assert spec["podFailurePolicy"]["rules"] == [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
    ]
    assert spec["template"]["metadata"]["labels"] == LABELS
    assert (pod["serviceAccountName"], pod["restartPolicy"]) == ("redrive-job", "Never")
    assert (pod["nodeSelector"], pod["automountServiceAccountToken"]) == ({"disk": "ssd"}, True)
    (container,) = pod["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry/redrive:1", "Always")
    assert container["resources"]["limits"] == {"memory": "2048Mi"}
    assert container["args"][:4] == ["drain", "python3", "-m", "redrive.replay"]
    job = ReplayJob.decode(container["args"][4])
    assert job == replace(JOB, pod=PodSize(2, 2 * 2**30))


LABELS = {
    "app.kubernetes.io/managed-by": "redrive",
    "app.kubernetes.io/name": "redrive",
    "app.kubernetes.io/component": "replay",
    "redrive.io/policy": "orders",
    "redrive.io/replay": "after-fix",
}


def replay(name: str = "after-fix", uid: str = "uid-1") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "shop", "uid": uid}
    return {"metadata": metadata, "spec": {"policyRef": {"name": "orders"}}}


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
def test_pods_mount_only_key_and_credentials_of_replay_role(
    role: ReplayIdentity, sources: list[tuple[str, str, dict[str, str]]]
) -> None:
    spec = manifest(access=pod_access(role, HOSTS, key_source(KEY_SECRET)))["spec"]
    mounted = [
        (kind, by["name"], {item["key"]: item["path"] for item in by["items"]})
        for volume in spec["driver"]["template"]["spec"]["volumes"]
        for source in volume["projected"]["sources"]
        for kind, by in source.items()
    ]
    assert mounted == [*sources, KEY_SOURCE]
    mount = {"name": "redrive-access", "mountPath": ACCESS_FOLDER, "readOnly": True}
    for pod in map(own_container, (spec["driver"], spec["executor"])):
        assert pod["volumeMounts"] == [mount]
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


def test_argument_with_encoded_names_is_ascii() -> None:
    """Java passes on no other character where the locale is that of C."""
    policy = Policy(TopicName("shop", "prod", "größe"), "über")
    job = replace(JOB, policy=policy, where="key = 'ü😀'")
    (argument,) = manifest(job=job)["spec"]["arguments"]
    assert argument.isascii()
    assert ReplayJob.decode(argument) == job


def test_argument_contains_no_kubelet_variables() -> None:
    """`$(NAME)` in a container's arguments stands for a variable."""
    job = replace(JOB, where="key > '$(REDRIVE_PULSAR_ACCESS)'")
    (argument,) = manifest(job=job)["spec"]["arguments"]
    assert "$" not in argument
    assert ReplayJob.decode(argument) == job


@pytest.mark.parametrize("wrong", ["", "{}", "[]", "null", '{"namespace": 1}'])
def test_invalid_job_argument_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match="the argument of the job can't be read"):
        ReplayJob.decode(wrong)


def test_pods_pass_restricted_pod_security() -> None:
    spec = manifest()["spec"]
    contexts = [own_container(spec[role])["securityContext"] for role in SPARK_ROLES]
    assert contexts == [RESTRICTED] * 2


def test_properties_of_redrive_are_set() -> None:
    conf = manifest({"sparkConf": {"spark.task.maxFailures": "8"}}, executors=3)["spec"][
        "sparkConf"
    ]
    expected = {
        "spark.speculation": "false",
        "spark.kubernetes.executor.podNamePrefix": launch.name_of(replay()),
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.task.maxFailures": "8",
        "spark.executor.instances": "3",
        "spark.dynamicAllocation.maxExecutors": "3",
    }
    assert conf.items() >= expected.items()


def test_template_fields_reach_the_pods() -> None:
    taint = {"key": "spot", "operator": "Exists"}
    pod = {
        "metadata": {"labels": {"team": "shop"}, "annotations": {"sidecar": "no"}},
        "spec": {
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [taint],
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
            "containers": [
                {
                    "name": "redrive",
                    "imagePullPolicy": "Always",
                    "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}},
                    "volumeMounts": [{"name": "scratch", "mountPath": "/mnt/scratch"}],
                    "env": [{"name": "TZ", "value": "UTC"}],
                }
            ],
        },
    }
    metadata = {"labels": {"queue": "night"}, "annotations": {"cost": "7"}}
    template = {"image": "r/i:1", "driver": pod, "executor": pod, "metadata": metadata}
    made = manifest(template, executors=3)
    assert made["metadata"]["labels"].items() >= {"queue": "night", **LABELS}.items()
    assert made["metadata"]["annotations"]["cost"] == "7"
    spec = made["spec"]
    assert (spec["image"], spec["imagePullPolicy"]) == ("r/i:1", "Always")
    assert spec["executor"]["instances"] == 3
    assert "volumes" not in spec
    for role in SPARK_ROLES:
        sizes = {"cores": 1, "memory": "1462m", "memoryOverhead": "586m"}
        assert spec[role].items() >= sizes.items()
        made_pod = spec[role]["template"]
        assert made_pod["metadata"]["labels"] == {"team": "shop", **LABELS}
        assert made_pod["metadata"]["annotations"] == {"sidecar": "no"}
        assert made_pod["spec"]["nodeSelector"] == {"disk": "ssd"}
        assert made_pod["spec"]["tolerations"] == [taint]
        assert made_pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert made_pod["spec"]["automountServiceAccountToken"] is (role is Role.DRIVER)
        names = [volume["name"] for volume in made_pod["spec"]["volumes"]]
        assert names == ["scratch", "redrive-access"]
        own = own_container(spec[role])
        mounts = {mount["name"]: mount["mountPath"] for mount in own["volumeMounts"]}
        assert mounts == {"scratch": "/mnt/scratch", "redrive-access": ACCESS_FOLDER}
        assert [variable["name"] for variable in own["env"]] == ["TZ", ACCESS_VARIABLE]


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
