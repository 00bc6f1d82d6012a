"""A Replay becomes one SparkApplication that holds no secret."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.api.connection import ReplayIdentity
from redrive.api.job import JobDefaults
from redrive.auth.method import ACCESS_VARIABLE, BrokerAccess
from redrive.errors import InvalidSpecError
from redrive.kube.context import Settings
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.replay.controller import launch
from redrive.replay.controller.launch import ACCESS_FOLDER, PodAccess, pod_access
from redrive.replay.controller.spark_operators import kubeflow_manifest
from redrive.replay.spec import ReplayJob

SETTINGS = Settings(
    "here", (), "registry/redrive:1", "local:///opt/redrive/replay.py", "redrive-replay"
)
TOKEN = {"secretRef": {"name": "pulsar-replayer", "key": "token"}}
HOSTS = ("broker-*.pulsar", "other")


def identity(method: str, given: object, **fields: object) -> ReplayIdentity:
    return ReplayIdentity.model_validate(
        {"role": "replayer", "authentication": {method: given}, **fields}
    )


ACCESS = pod_access(identity("token", TOKEN), HOSTS)
POLICY = Policy(TopicName("shop", "prod", "orders"), "fulfilment", name="shop/orders", generation=3)
JOB = ReplayJob(
    "shop", "after-fix", "uid-1", POLICY, "pulsar://pulsar:6650", "http://pulsar:8080", "key = 'ü'"
)


def manifest(
    template: dict[str, Any] | None = None, job: ReplayJob = JOB, access: PodAccess = ACCESS
) -> Any:  # noqa: ANN401  a manifest
    """Return the SparkApplication of the Kubeflow Spark operator."""
    pods = JobDefaults.model_validate(template or {})
    return kubeflow_manifest(launch.application(replay(), job, access, pods, SETTINGS))


def replay(name: str = "after-fix", uid: str = "uid-1") -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "shop", "uid": uid}}


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True), st.uuids())
def test_every_replay_has_a_name_that_spark_can_build_on(name: str, uid: object) -> None:
    made = launch.name_of(replay(name, str(uid)))
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made)
    assert len(made) <= 45
    assert made == launch.name_of(replay(name, str(uid)))


def test_a_replay_made_anew_gets_another_application() -> None:
    assert launch.name_of(replay(uid="uid-1")) != launch.name_of(replay(uid="uid-2"))


def test_the_application_is_owned_by_the_replay() -> None:
    (owner,) = manifest()["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Replay", "after-fix", "uid-1")
    assert owner["controller"] is True


CA = {"caRef": {"name": "authority", "key": "ca.pem"}}
CLIENT = {
    "issuerUrl": "https://issuer/$(PATH)",
    "clientId": "replay",
    "clientSecret": {"secretRef": {"name": "client", "key": "password"}},
    "audience": "urn:pulsar",
    "caRef": {"kind": "Secret", "name": "issuer", "key": "ca.pem"},
}


@pytest.mark.parametrize(
    ("of", "sources"),
    [
        (identity("token", TOKEN), [("secret", "pulsar-replayer", {"token": "credentials/token"})]),
        (
            ReplayIdentity.model_validate({"role": "replayer", "token": TOKEN}),  # the old field
            [("secret", "pulsar-replayer", {"token": "credentials/token"})],
        ),
        (
            identity("tls", {"secretRef": {"name": "certificate"}}, tls=CA),
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
            identity("oauth2", CLIENT),
            [
                ("secret", "client", {"password": "credentials/client-secret"}),
                ("secret", "issuer", {"ca.pem": "issuer-ca/ca.crt"}),
            ],
        ),
        (identity("none", {}, tls=CA), [("configMap", "authority", {"ca.pem": "ca/ca.crt"})]),
        (identity("none", {}), []),
    ],
)
def test_driver_and_executors_mount_the_credentials_of_the_replay_role_and_no_other_key(
    of: ReplayIdentity, sources: list[tuple[str, str, dict[str, str]]]
) -> None:
    spec = manifest(access=pod_access(of, HOSTS))["spec"]
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
        ((name, value),) = [(each["name"], each["value"]) for each in pod["env"]]
        assert name == ACCESS_VARIABLE
        assert "$" not in value  # a kubelet would put in variables
        told = BrokerAccess.decode(value)
        assert (told.folder, told.redirect_hosts) == (ACCESS_FOLDER, HOSTS)
        assert told.issuer_url == (CLIENT["issuerUrl"] if told.method == "oauth2" else None)
    assert "pulsar-replayer" not in json.dumps(spec["arguments"])


@pytest.mark.parametrize("wrong", ["", "{}", "[]", "null", '{"method": "magic"}'])
def test_an_access_that_the_operator_did_not_write_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match=ACCESS_VARIABLE):
        BrokerAccess.decode(wrong)


def test_the_job_runs_as_the_operator_was_told() -> None:
    spec = manifest()["spec"]
    assert spec["image"] == "registry/redrive:1"
    assert spec["mainApplicationFile"] == "local:///opt/redrive/replay.py"
    assert spec["driver"]["serviceAccount"] == "redrive-replay"
    assert spec["sparkConf"]["spark.speculation"] == "false"


def test_the_version_asked_for_is_the_one_that_the_tests_run() -> None:
    spec = manifest()["spec"]
    assert spec["sparkVersion"] == metadata.version("pyspark")


def test_the_argument_tells_the_whole_job() -> None:
    (argument,) = manifest()["spec"]["arguments"]
    assert ReplayJob.decode(argument) == JOB


def test_a_selection_cannot_have_a_kubelet_put_a_variable_into_the_arguments() -> None:
    """`$(NAME)` in a container's arguments stands for a variable."""
    job = replace(JOB, where="key > '$(REDRIVE_PULSAR_ACCESS)'")
    (argument,) = manifest(job=job)["spec"]["arguments"]
    assert "$" not in argument
    assert ReplayJob.decode(argument) == job


@pytest.mark.parametrize("wrong", ["", "{}", "[]", "null", '{"namespace": 1}'])
def test_any_other_argument_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSpecError, match="the JSON document that the operator writes"):
        ReplayJob.decode(wrong)


RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def test_pods_pass_the_restricted_pod_security_whatever_is_said_about_them() -> None:
    spec = manifest()["spec"]
    assert [spec[pod]["securityContext"] for pod in ("driver", "executor")] == [RESTRICTED] * 2
    user = {"runAsUser": 185, "runAsGroup": 185, "fsGroup": 1000}
    spec = manifest({"securityContext": user})["spec"]
    for pod in (spec["driver"], spec["executor"]):
        assert pod["securityContext"] == {**RESTRICTED, "runAsUser": 185, "runAsGroup": 185}
        assert pod["podSecurityContext"] == {"fsGroup": 1000}


def test_nothing_that_is_said_about_pods_replaces_what_redrive_sets() -> None:
    said = {
        "spark.speculation": "true",
        "spark.kubernetes.executor.podNamePrefix": "theirs",
        "spark.kubernetes.executor.disableConfigMap": "false",
        "spark.task.maxFailures": "8",
    }
    assert manifest({"sparkConf": said})["spec"]["sparkConf"] == {
        "spark.speculation": "false",
        "spark.kubernetes.executor.podNamePrefix": launch.name_of(replay()),
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.task.maxFailures": "8",
    }


def test_what_is_said_about_pods_reaches_them() -> None:
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
        mounted = {each["name"]: each["mountPath"] for each in pod["volumeMounts"]}
        assert mounted == {"job-scratch": "/mnt/scratch", "redrive-access": ACCESS_FOLDER}


@pytest.mark.parametrize(("executors", "initial"), [(None, 2), (3, 3), (9, 4)])
def test_a_dynamic_allocation_begins_within_its_bounds(executors: int | None, initial: int) -> None:
    said = {"dynamicAllocation": {"minExecutors": 2, "maxExecutors": 4}, "executors": executors}
    spec = manifest(said)["spec"]
    assert spec["dynamicAllocation"] == {
        "enabled": True,
        "initialExecutors": initial,
        "minExecutors": 2,
        "maxExecutors": 4,
    }
    assert spec["executor"]["instances"] == initial
