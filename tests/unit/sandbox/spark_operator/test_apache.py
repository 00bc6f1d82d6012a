"""The second API of the stand-in is read as the first, and its status is a history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from sandbox.spark_operator import apache
from sandbox.spark_operator.objects import State, Status

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def read(status: dict[str, Any] | None = None, **fields: object) -> Any:  # noqa: ANN401
    spec = {"runtimeVersions": {"sparkVersion": "4.3.0"}, "pyFiles": "local:///job.py", **fields}
    metadata = {"namespace": "shop", "name": "job", "uid": "1"}
    return apache.read({"metadata": metadata, "spec": spec, "status": status or {}})


def test_fields_mean_what_those_of_the_first_api_mean() -> None:
    mount = {"name": "v", "mountPath": "/v"}
    template = {
        "spec": {
            "volumes": [{"name": "v", "projected": {"sources": []}}],
            "containers": [{"name": "c", "env": [{"name": "A"}], "volumeMounts": [mount]}],
        }
    }
    app = read(
        driverArgs=["--run"],
        sparkConf={"spark.kubernetes.authenticate.driver.serviceAccountName": "runner"},
        applicationTolerations={
            "restartConfig": {
                "restartPolicy": "OnFailure",
                "maxRestartAttempts": 2,
                "restartBackoffMillis": 7000,
            },
            "ttlAfterStopMillis": 60_000,
        },
        driverSpec={"podTemplateSpec": template},
        executorSpec={"podTemplateSpec": template},
    )
    assert app.service_account == "runner"
    assert (app.spec["mainApplicationFile"], app.spec["arguments"]) == (
        "local:///job.py",
        ["--run"],
    )
    assert app.spec["timeToLiveSeconds"] == 60
    assert app.spec["restartPolicy"]["onFailureRetries"] == 2
    assert app.spec["restartPolicy"]["onFailureRetryInterval"] == 7
    assert app.spec["volumes"] == [{"name": "v", "projected": {"sources": []}}]
    for pod in ("driver", "executor"):
        assert app.spec[pod]["env"] == [{"name": "A"}]
        assert app.spec[pod]["volumeMounts"] == [mount]


def went_through(*states: State) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for number, state in enumerate(states):
        error = "broker is down" if state is State.FAILING else ""
        reached = Status(state=state, error_message=error)
        written = apache.history(written, reached, NOW + timedelta(seconds=number))
    return written


def names(written: dict[str, Any]) -> list[str]:
    history = written["stateTransitionHistory"]
    return [history[str(number)]["currentStateSummary"] for number in range(len(history))]


def test_a_run_that_succeeds_has_its_resources_released() -> None:
    done = went_through(State.SUBMITTED, State.RUNNING, State.SUCCEEDING, State.COMPLETED)
    assert names(done) == [
        *("Submitted", "DriverRequested", "DriverStarted", "DriverReady", "RunningHealthy"),
        *("Succeeded", "ResourceReleased"),
    ]
    assert done["currentState"]["currentStateSummary"] == "ResourceReleased"
    found = read(done).status
    assert (found.state, found.termination) == (State.COMPLETED, NOW + timedelta(seconds=2))


def test_a_failure_tells_its_cause_and_is_repeated() -> None:
    again = went_through(
        State.SUBMITTED, State.FAILING, State.PENDING_RERUN, State.SUBMITTED, State.FAILING
    )
    assert names(again) == [
        *("Submitted", "DriverRequested", "Failed", "ScheduledToRestart", "DriverRequested"),
        "Failed",
    ]
    assert again["currentState"]["message"] == "broker is down"
    found = read(again).status
    assert (found.state, found.execution_attempts) == (State.FAILING, 2)
    assert found.last_submission_attempt == NOW + timedelta(seconds=3)
    ended = apache.history(again, Status(state=State.FAILED), NOW)
    assert read(ended).status.state is State.FAILED


def test_a_submission_that_is_refused_is_tried_again() -> None:
    again = went_through(State.SUBMISSION_FAILED, State.SUBMISSION_FAILED, State.SUBMITTED)
    assert names(again) == [
        *("Submitted", "SchedulingFailure", "ScheduledToRestart", "SchedulingFailure"),
        *("ScheduledToRestart", "DriverRequested"),
    ]


def test_an_application_without_a_status_is_new() -> None:
    assert read().status == Status()
