"""A run by the Apache Spark operator: what is created for it, and what its history says."""

from __future__ import annotations

from typing import Any

import pytest

from redrive.api.job import JobDefaults
from redrive.api.replay import Phase
from redrive.replay.controller import launch
from redrive.replay.controller.spark_operators import apache_manifest, apache_run
from tests.unit.replay.controller.test_launch import ACCESS, JOB, RESTRICTED, SETTINGS, replay


def spec(**template: object) -> dict[str, Any]:
    """Return the spec of the SparkApplication."""
    pods = JobDefaults.model_validate(template)
    made = apache_manifest(launch.application(replay(), JOB, ACCESS, pods, SETTINGS))
    assert (made["apiVersion"], made["kind"]) == ("spark.apache.org/v1", "SparkApplication")
    assert made["metadata"]["name"] == launch.name_of(replay())
    found: dict[str, Any] = made["spec"]
    return found


def test_program_argument_image_and_account_stand_where_it_reads_them() -> None:
    made = spec()
    assert made["pyFiles"] == "local:///opt/redrive/replay.py"
    assert made["driverArgs"] == [JOB.encode()]
    assert made["runtimeVersions"] == {"sparkVersion": launch.SPARK_VERSION}
    conf = made["sparkConf"]
    assert conf["spark.kubernetes.container.image"] == "registry/redrive:1"
    assert conf["spark.kubernetes.authenticate.driver.serviceAccountName"] == "redrive-replay"
    assert conf["spark.executor.instances"] == "1"
    assert all(isinstance(value, str) for value in conf.values())


def test_a_failed_run_is_repeated_and_an_ended_one_is_deleted_in_time() -> None:
    restarts = {
        "restartPolicy": "OnFailure",
        "maxRestartAttempts": 3,
        "restartBackoffMillis": 10_000,
    }
    assert spec()["applicationTolerations"] == {"restartConfig": restarts}
    lasting = spec(timeToLiveSeconds=600)["applicationTolerations"]
    assert lasting == {"restartConfig": restarts, "ttlAfterStopMillis": 600_000}


def test_what_is_said_about_pods_reaches_them() -> None:
    made = spec(
        driver={"memory": "2g", "coreRequest": "100m"},
        executor={"cores": 2},
        executors=3,
        dynamicAllocation={"minExecutors": 1, "maxExecutors": 4},
        imagePullSecrets=["one", "two"],
        nodeSelector={"disk": "ssd"},
        tolerations=[{"operator": "Exists"}],
        labels={"team": "shop"},
        volumes=[{"name": "scratch", "emptyDir": {}}],
        securityContext={"runAsUser": 185, "fsGroup": 1000},
    )
    expected = {
        "spark.kubernetes.container.image.pullSecrets": "one,two",
        "spark.driver.memory": "2g",
        "spark.kubernetes.driver.request.cores": "100m",
        "spark.executor.cores": "2",
        "spark.executor.instances": "3",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "3",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "4",
    }
    assert made["sparkConf"].items() >= expected.items()
    assert "spark.kubernetes.executor.request.cores" not in made["sparkConf"]
    for name in ("driver", "executor"):
        template = made[f"{name}Spec"]["podTemplateSpec"]
        assert template["metadata"] == {"labels": {"team": "shop"}}
        pod = template["spec"]
        assert pod["nodeSelector"] == {"disk": "ssd"}
        assert pod["tolerations"] == [{"operator": "Exists"}]
        assert pod["securityContext"] == {"fsGroup": 1000}
        assert [volume["name"] for volume in pod["volumes"]] == ["job-scratch", "redrive-access"]
        (container,) = pod["containers"]
        assert container["securityContext"] == {**RESTRICTED, "runAsUser": 185}
        assert container["env"] == [ACCESS.variable]
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert mounted == ["job-scratch", "redrive-access"]


def test_no_property_that_the_chart_sets_replaces_what_redrive_writes() -> None:
    theirs = {
        "spark.kubernetes.authenticate.driver.serviceAccountName": "admin",
        "spark.kubernetes.container.image": "other",
        "spark.speculation": "true",
    }
    assert not theirs.items() & spec(sparkConf=theirs)["sparkConf"].items()


def stands(*states: str, **messages: str) -> Any:  # noqa: ANN401  a SparkRun
    """Return how an application stands that went through *states*, in this order."""
    history = {
        str(number): {
            "currentStateSummary": state,
            "lastTransitionTime": f"2026-11-22T00:00:{number:02}.123456789Z",
            **({"message": messages[state]} if state in messages else {}),
        }
        for number, state in enumerate(states)
    }
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    current = history[str(len(states) - 1)] if states else None
    status = {"currentState": current, "stateTransitionHistory": history} if states else None
    return apache_run({"metadata": metadata, "status": status})


BEGUN = ("Submitted", "DriverRequested", "DriverStarted", "DriverReady", "RunningHealthy")
AGAIN = ("Failed", "ScheduledToRestart", "DriverRequested", "DriverStarted", "DriverReady")


@pytest.mark.parametrize(
    ("states", "phase"),
    [
        ((), Phase.SUBMITTED),
        (BEGUN[:1], Phase.SUBMITTED),
        (BEGUN[:2], Phase.SUBMITTED),
        (BEGUN[:3], Phase.RUNNING),
        (BEGUN, Phase.RUNNING),
        ((*BEGUN, "RunningWithPartialCapacity"), Phase.RUNNING),
        ((*BEGUN, "Failed"), Phase.RUNNING),  # it may be repeated
        ((*BEGUN, *AGAIN[:2]), Phase.SUBMITTED),
        ((*BEGUN, "Succeeded"), Phase.COMPLETED),
        ((*BEGUN, "Succeeded", "ResourceReleased"), Phase.COMPLETED),
        ((*BEGUN, "Succeeded", "TerminatedWithoutReleaseResources"), Phase.COMPLETED),
        ((*BEGUN, "Failed", "ResourceReleased"), Phase.FAILED),
        ((*BEGUN, *AGAIN, "RunningHealthy", "Succeeded", "ResourceReleased"), Phase.COMPLETED),
        ((*BEGUN, *AGAIN, "Failed", "ResourceReleased"), Phase.FAILED),
        (
            (
                *BEGUN, "Succeeded",
                "TerminatedWithoutReleaseResources", "ResourceReleased",
            ),
            Phase.COMPLETED,
        ),
        (("Submitted", "SchedulingFailure", "ResourceReleased"), Phase.FAILED),
        (("ResourceReleased",), Phase.FAILED),
    ],
    ids=lambda given: given.value if isinstance(given, Phase) else "-".join(given[-3:]),
)  # fmt: skip
def test_a_run_is_what_its_history_says(states: tuple[str, ...], phase: Phase) -> None:
    found = stands(*states)
    assert found.phase is phase
    assert found.state == (states[-1] if states else "")


def test_a_failed_run_tells_why_although_its_last_state_is_another() -> None:
    failed = stands(*BEGUN, "Failed", "ResourceReleased", Failed="exit code 1")
    assert failed.error == "exit code 1"
    both = stands(*BEGUN, "Failed", "ResourceReleased", Failed="1", ResourceReleased="3 restarts")
    assert both.error == "1; 3 restarts"
    assert stands(*BEGUN, "DriverEvicted", "ResourceReleased").error == "DriverEvicted"
    assert stands(*BEGUN, "Succeeded", "ResourceReleased", ResourceReleased="done").error == ""


def test_a_driver_that_was_requested_and_does_not_run_shows_since_when() -> None:
    requested = stands("Submitted", "DriverRequested")
    assert requested.submitted is not None
    assert requested.submitted.second == 1
    assert requested.pods == "spark.operator/spark-app-name=a"
    assert stands(*BEGUN).submitted is None


def test_a_state_that_somebody_forged_is_read_as_far_as_it_can_be() -> None:
    forged = {
        "currentStateSummary": "DriverRequested",
        "lastTransitionTime": "0000-01-01T00:00:00Z",
    }
    metadata = {"name": "a", "namespace": "shop", "creationTimestamp": "2026-11-22T00:00:00Z"}
    assert apache_run({"metadata": metadata, "status": {"currentState": forged}}).submitted is None
    history = {
        "9": {"currentStateSummary": "Failed"},
        "10": {"currentStateSummary": "Succeeded"},
        "no number": {"message": "no state"},
        "": {},
    }
    ended = {"currentStateSummary": "ResourceReleased"}
    status = {"currentState": ended, "stateTransitionHistory": history}
    assert apache_run({"metadata": metadata, "status": status}).phase is Phase.FAILED
    del history["no number"]
    assert apache_run({"metadata": metadata, "status": status}).phase is Phase.COMPLETED
