"""What chart, connection and Replay say about a job's pods, and what none of them can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redrive.api.job import JobDefaults, JobRequest, JobTemplate, is_open_property
from redrive.errors import JobNotPermittedError
from redrive.kube.context import Settings
from redrive.replay.controller.launch import resolve_template

OWN = "registry/redrive-replay:1"
SETTINGS = Settings("here", (), OWN, "local:///opt/redrive/replay.py", "redrive-replay")


def settings(**said: object) -> Settings:
    return replace(SETTINGS, replay_job=JobDefaults.model_validate(said))


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


def test_the_replay_comes_before_the_connection_and_that_before_the_chart() -> None:
    chart = settings(
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
    found = resolved({"executors": 3}, connection, chart).to_manifest()
    assert found["driver"] == {"memory": "2g", "coreRequest": "100m"}
    assert found["executors"] == 3
    assert found["sparkConf"] == {"spark.task.maxFailures": "2", "spark.rpc.message.maxSize": "1"}
    assert found["labels"] == {"team": "platform"}


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
    {"nodeSelector": {}},
    {"nodeSelector": {"disk": "ssd"}},
    {"tolerations": [{"operator": "Exists"}]},
    {"sparkConf": {"spark.task.maxFailures": "9"}},
]
SOME = {
    "images": ["registry/redrive-*:1"],
    "maxCores": 2,
    "maxMemory": "2g",
    "maxExecutors": 4,
    "sparkConf": ["spark.rpc.message.maxSize"],
}


@pytest.mark.parametrize("overrides", [None, {}, SOME], ids=["none", "empty", "some"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_replay_gets_no_more_than_its_connection_permits(
    asked: dict[str, Any], overrides: dict[str, Any] | None
) -> None:
    chart = settings(images=["registry/*"])
    with pytest.raises(JobNotPermittedError, match=f"got '.*{next(iter(asked))[:4]}"):
        resolved(asked, {"overrides": overrides}, chart)


def test_a_replay_gets_what_its_connection_permits() -> None:
    asked = {
        "image": "registry/redrive-replay:1",
        "driver": {"cores": 2, "memory": "2048m", "coreRequest": "2"},
        "executors": 4,
        "nodeSelector": {"disk": "ssd"},
        "sparkConf": {"spark.rpc.message.maxSize": "9"},
        "timeToLiveSeconds": 60,
    }
    found = resolved(asked, {"overrides": {**SOME, "placement": True}}).to_manifest()
    assert found.items() >= asked.items()


def test_the_chart_permits_overrides_where_a_connection_says_nothing_of_them() -> None:
    chart = settings(overrides={"maxExecutors": 4})
    assert resolved({"executors": 4}, {"executors": 2}, chart).executors == 4
    with pytest.raises(JobNotPermittedError):
        resolved({"executors": 4}, {"overrides": {}}, chart)


@pytest.mark.parametrize("asking", ["connection", "replay"])
def test_an_image_is_one_that_the_operator_permits(asking: str) -> None:
    """Whoever chooses it has the rights of the ServiceAccount in the namespace of the Replay."""

    def ask(image: str, chart: Settings = SETTINGS) -> JobDefaults:
        if asking == "connection":
            return resolved(None, {"image": image}, chart)
        return resolved({"image": image}, {"overrides": {"images": ["r*", "r*/*"]}}, chart)

    assert ask(OWN).image == OWN
    for image in ("registry/other:1", f"{OWN}1", f"r/{OWN}"):
        with pytest.raises(JobNotPermittedError, match=r"replay\.job\.images"):
            ask(image)
    assert ask("r/the-charts:1", settings(image="r/the-charts:1")).image == "r/the-charts:1"
    permitting = settings(images=["registry/redrive-*:2"])
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
def test_no_property_of_connection_or_replay_runs_or_mounts_something(
    name: str, model: type[JobRequest]
) -> None:
    with pytest.raises(ValueError, match="a Spark property is one that may be set here"):
        model.model_validate({"sparkConf": {"spark.task.maxFailures": "1", name: "x"}})
    with pytest.raises(ValueError, match="a Spark property is one that may be set here"):
        JobTemplate.model_validate({"overrides": {"sparkConf": [name]}})


@given(st.text(max_size=30))
def test_only_properties_of_the_list_are_open(end: str) -> None:
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
        {"labels": {}},
        {"annotations": {}},
        {"images": ["*"]},
        {"securityContext": {"privileged": True}},
        {"securityContext": {"runAsUser": 0}},
    ],
    ids=str,
)
def test_a_connection_has_no_field_for_what_it_can_not_decide(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        JobTemplate.model_validate(field)


@pytest.mark.parametrize("field", ["imagePullSecrets", "securityContext", "volumes", "overrides"])
def test_a_replay_has_fewer_fields_than_its_connection(field: str) -> None:
    with pytest.raises(ValueError, match="Extra inputs"):
        JobRequest.model_validate({field: {}})
