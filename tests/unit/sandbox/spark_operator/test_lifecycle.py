"""States of SparkApplications of both operators, and the stand-in's independence of redrive."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sandbox import spark_operator
from sandbox.spark_operator import apache, lifecycle
from sandbox.spark_operator.cluster import PodState
from sandbox.spark_operator.lifecycle import (
    Delete,
    Move,
    Observation,
    Phase,
    Rest,
    Submit,
    decide,
)
from sandbox.spark_operator.objects import Application, State, Status

NOW = datetime(2026, 11, 21, 9, tzinfo=UTC)
PENDING = Observation(Phase.PENDING)
RUNNING = Observation(Phase.RUNNING)
SUCCEEDED = Observation(Phase.SUCCEEDED)
FAILED = Observation(Phase.FAILED, "it broke")

MakeApplication = Callable[..., Application]


def at(state: State, **fields: Any) -> Status:  # noqa: ANN401 - fields of a status
    """Return the status of an application that was submitted once, a second ago."""
    once = Status(
        last_submission_attempt=NOW - timedelta(seconds=1),
        submission_attempts=1,
        execution_attempts=1,
        driver_pod="job-driver",
        spark_application_id="spark-1",
    )
    return replace(once, state=state, **fields)


LOST = {"termination": NOW, "error_message": "driver pod not found"}
BROKEN = {"termination": NOW, "error_message": "it broke"}


@pytest.mark.parametrize(
    ("status", "driver", "step"),
    [
        (Status(state=State.NEW), None, Submit()),
        (Status(state=State.PENDING_RERUN), None, Submit()),
        (Status(state=State.RESUMING), None, Submit()),
        (at(State.SUBMITTED), PENDING, Rest()),
        (at(State.SUBMITTED), RUNNING, Move(at(State.RUNNING))),
        (at(State.SUBMITTED), FAILED, Move(at(State.FAILING, **BROKEN))),
        (at(State.SUBMITTED), None, Move(at(State.FAILING, **LOST))),
        (at(State.RUNNING), RUNNING, Rest()),
        (at(State.RUNNING), SUCCEEDED, Move(at(State.SUCCEEDING, termination=NOW))),
        (at(State.RUNNING), FAILED, Move(at(State.FAILING, **BROKEN))),
        (at(State.RUNNING), None, Move(at(State.FAILING, **LOST))),
        (
            at(State.SUCCEEDING, termination=NOW),
            SUCCEEDED,
            Move(at(State.COMPLETED, termination=NOW)),
        ),
        (at(State.FAILING, termination=NOW), SUCCEEDED, Move(at(State.FAILED, termination=NOW))),
        (
            at(State.SUBMISSION_FAILED, error_message="no"),
            None,
            Move(at(State.FAILED, error_message="no", termination=NOW)),
        ),
        (
            at(State.INVALIDATING),
            RUNNING,
            Move(Status(state=State.PENDING_RERUN), stop_driver=True),
        ),
    ],
)
def test_state_follows_the_driver(
    application: MakeApplication,
    status: Status,
    driver: Observation | None,
    step: lifecycle.Decision,
) -> None:
    assert decide(application(), status, driver, NOW) == step


def test_always_policy_reruns_after_success(application: MakeApplication) -> None:
    app = application(restartPolicy={"type": "Always"})
    step = decide(app, at(State.SUCCEEDING, termination=NOW), SUCCEEDED, NOW)
    assert isinstance(step, Move)
    assert step.stop_driver
    assert step.status == at(State.PENDING_RERUN, driver_pod="", spark_application_id="")


def test_failed_run_is_repeated_after_growing_interval(
    application: MakeApplication,
) -> None:
    policy = {"type": "OnFailure", "onFailureRetries": 2, "onFailureRetryInterval": 10}
    app = application(restartPolicy=policy)
    status = at(State.FAILING, submission_attempts=2, execution_attempts=2)
    due = NOW + timedelta(seconds=19)
    assert decide(app, status, FAILED, NOW) == Rest(due)
    step = decide(app, status, FAILED, due)
    assert isinstance(step, Move)
    assert (step.status.state, step.stop_driver) == (State.PENDING_RERUN, True)


def test_repeats_are_limited_by_the_policy(application: MakeApplication) -> None:
    app = application(restartPolicy={"type": "OnFailure", "onFailureRetries": 2})
    later = NOW + timedelta(hours=1)
    ends = []
    for attempts in (1, 2, 3):
        step = decide(app, at(State.FAILING, execution_attempts=attempts), FAILED, later)
        assert isinstance(step, Move)
        ends.append(step.status.state)
    assert ends == [State.PENDING_RERUN, State.PENDING_RERUN, State.FAILED]


def test_on_failure_without_count_repeats_nothing(application: MakeApplication) -> None:
    app = application(restartPolicy={"type": "OnFailure"})
    step = decide(app, at(State.FAILING), FAILED, NOW + timedelta(hours=1))
    assert isinstance(step, Move)
    assert step.status.state is State.FAILED


def test_refused_submission_is_repeated(application: MakeApplication) -> None:
    policy = {"type": "OnFailure", "onSubmissionFailureRetries": 1}
    app = application(restartPolicy=policy)
    status = at(State.SUBMISSION_FAILED)
    assert decide(app, status, None, NOW) == Rest(NOW + timedelta(seconds=4))
    assert decide(app, status, None, NOW + timedelta(seconds=4)) == Submit()


def test_suspend_stops_the_driver_and_resume_submits(
    application: MakeApplication,
) -> None:
    suspended, resumed = application(suspend=True), application(suspend=False)
    first = decide(suspended, at(State.RUNNING), RUNNING, NOW)
    assert first == Move(at(State.SUSPENDING))
    second = decide(suspended, at(State.SUSPENDING), RUNNING, NOW)
    assert second == Move(
        at(State.SUSPENDED, driver_pod="", spark_application_id=""), stop_driver=True
    )
    assert decide(suspended, at(State.SUSPENDED), None, NOW) == Rest()
    assert decide(resumed, at(State.SUSPENDED), None, NOW) == Move(at(State.RESUMING))


def test_suspended_application_does_not_start(
    application: MakeApplication,
) -> None:
    step = decide(application(suspend=True), Status(), None, NOW)
    assert step == Move(Status(state=State.SUSPENDING))


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
def test_ended_application_is_deleted_after_its_ttl(
    application: MakeApplication, state: State
) -> None:
    app = application(timeToLiveSeconds=60, suspend=True)
    status = at(state, termination=NOW)
    due = NOW + timedelta(seconds=60)
    assert decide(app, status, None, NOW) == Rest(due)
    assert decide(app, status, None, due) == Delete()
    assert decide(application(), status, None, due) == Rest()


def test_submission_counts_from_its_attempt(application: MakeApplication) -> None:
    attempt = lifecycle.attempted(application(), Status(), "id", NOW)
    assert attempt == Status(
        submission_id="id",
        driver_pod="job-driver",
        last_submission_attempt=NOW,
        submission_attempts=1,
    )
    accepted = lifecycle.submitted(attempt, "spark-1")
    assert (accepted.state, accepted.execution_attempts) == (State.SUBMITTED, 1)
    refused = lifecycle.refused(attempt, "no")
    assert (refused.state, refused.error_message) == (State.SUBMISSION_FAILED, "no")
    assert refused.execution_attempts == 0


def test_status_is_read_as_it_was_written(application: MakeApplication) -> None:
    status = at(State.FAILED, termination=NOW, error_message="it broke", submission_id="s")
    assert application(status=status.written()).status == status
    assert Status().written() == {"applicationState": {"state": ""}, "driverInfo": {}}


def test_only_suspend_and_ttl_change_without_rerun(application: MakeApplication) -> None:
    app = application()
    assert application(suspend=True, timeToLiveSeconds=1).run_spec == app.run_spec
    assert application(arguments=["x"]).run_spec != app.run_spec


BEGUN = datetime(2026, 11, 22, tzinfo=UTC)


def apache_application(status: dict[str, Any] | None = None, **fields: object) -> Any:  # noqa: ANN401
    spec = {"runtimeVersions": {"sparkVersion": "4.3.0"}, "pyFiles": "local:///job.py", **fields}
    metadata = {"namespace": "shop", "name": "job", "uid": "1"}
    return apache.read({"metadata": metadata, "spec": spec, "status": status or {}})


def test_apache_fields_match_those_of_kubeflow() -> None:
    mount = {"name": "v", "mountPath": "/v"}
    template = {
        "spec": {
            "volumes": [{"name": "v", "projected": {"sources": []}}],
            "containers": [{"name": "c", "env": [{"name": "A"}], "volumeMounts": [mount]}],
        }
    }
    app = apache_application(
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
        written = apache.history(written, reached, BEGUN + timedelta(seconds=number))
    return written


def state_names(written: dict[str, Any]) -> list[str]:
    history = written["stateTransitionHistory"]
    return [history[str(number)]["currentStateSummary"] for number in range(len(history))]


def test_apache_success_releases_resources() -> None:
    done = went_through(State.SUBMITTED, State.RUNNING, State.SUCCEEDING, State.COMPLETED)
    assert state_names(done) == [
        *("Submitted", "DriverRequested", "DriverStarted", "DriverReady", "RunningHealthy"),
        *("Succeeded", "ResourceReleased"),
    ]
    assert done["currentState"]["currentStateSummary"] == "ResourceReleased"
    status = apache_application(done).status
    assert (status.state, status.termination) == (State.COMPLETED, BEGUN + timedelta(seconds=2))


def test_apache_failure_has_cause_and_is_repeated() -> None:
    again = went_through(
        State.SUBMITTED, State.FAILING, State.PENDING_RERUN, State.SUBMITTED, State.FAILING
    )
    assert state_names(again) == [
        *("Submitted", "DriverRequested", "Failed", "ScheduledToRestart", "DriverRequested"),
        "Failed",
    ]
    assert again["currentState"]["message"] == "broker is down"
    status = apache_application(again).status
    assert (status.state, status.execution_attempts) == (State.FAILING, 2)
    assert status.last_submission_attempt == BEGUN + timedelta(seconds=3)
    ended = apache.history(again, Status(state=State.FAILED), BEGUN)
    assert apache_application(ended).status.state is State.FAILED


def test_apache_refused_submission_is_repeated() -> None:
    again = went_through(State.SUBMISSION_FAILED, State.SUBMISSION_FAILED, State.SUBMITTED)
    assert state_names(again) == [
        *("Submitted", "SchedulingFailure", "ScheduledToRestart", "SchedulingFailure"),
        *("ScheduledToRestart", "DriverRequested"),
    ]


def test_apache_application_without_status_is_new() -> None:
    assert apache_application().status == Status()


def test_pod_state_has_owner_run_and_exit() -> None:
    pod = {
        "metadata": {
            "ownerReferences": [{"uid": "1"}],
            "labels": {"spark-app-selector": "spark-7"},
        },
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
        },
    }
    assert PodState.read(pod) == PodState(("1",), "Failed", "spark-7", 1, "Error")


def test_pending_pod_has_no_owner_or_run() -> None:
    assert PodState.read({"metadata": {}, "status": {"phase": "Pending"}}) == PodState(
        (), "Pending", "", None, ""
    )


def test_evicted_pod_has_its_reason() -> None:
    pod = {"metadata": {}, "status": {"phase": "Failed", "reason": "Evicted"}}
    assert PodState.read(pod).reason == "Evicted"


PACKAGE = Path(spark_operator.__file__).parent
MODULES = sorted(PACKAGE.glob("*.py"))
OTHERS = {"aiohttp", "kubernetes", "psutil"}


def imported(module: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_modules_import_only_siblings_and_clients(
    module: Path,
) -> None:
    foreign = {
        name
        for name in imported(module)
        if (name.startswith("..") or not name.startswith("."))
        and name.partition(".")[0] not in sys.stdlib_module_names | OTHERS
    }
    assert foreign == set()


def test_stand_in_never_mentions_the_product() -> None:
    telling = {
        file.name: line
        for file in [*MODULES, spark_operator.CRD]
        for line in file.read_text().splitlines()
        if "redrive" in line.replace("python -m sandbox.spark_operator", "")
    }
    assert telling == {}
