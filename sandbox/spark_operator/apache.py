"""The second API of the stand-in: SparkApplication of `spark.apache.org/v1`.

Pure. Its fields are translated into those of the first API, so that all other modules handle one
form. Its status is a history of states, of which the last is the current one.
"""

from __future__ import annotations

from datetime import datetime

from .objects import Application, Object, State, Status, expanded, moment, written

_SECOND = 1000
_ACCOUNT = "spark.kubernetes.authenticate.driver.serviceAccountName"

# A state of the first API → the states that this API passes through; the last one is shown.
_STATES: dict[State, tuple[str, ...]] = {
    State.SUBMITTED: ("DriverRequested",),
    State.RUNNING: ("DriverStarted", "DriverReady", "RunningHealthy"),
    State.SUCCEEDING: ("Succeeded",),
    State.COMPLETED: ("ResourceReleased",),
    State.FAILING: ("Failed",),
    State.FAILED: ("ResourceReleased",),
    State.SUBMISSION_FAILED: ("SchedulingFailure",),
    State.PENDING_RERUN: ("ScheduledToRestart",),
    State.INVALIDATING: ("ScheduledToRestart",),
}
_READ = {
    "Submitted": State.SUBMITTED,
    "DriverRequested": State.SUBMITTED,
    "DriverStarted": State.RUNNING,
    "DriverReady": State.RUNNING,
    "RunningHealthy": State.RUNNING,
    "Succeeded": State.SUCCEEDING,
    "Failed": State.FAILING,
    "SchedulingFailure": State.SUBMISSION_FAILED,
    "ScheduledToRestart": State.PENDING_RERUN,
}
_RELEASED = "ResourceReleased"


def read(raw: Object) -> Application:
    """Read an object of the API server."""
    metadata = raw["metadata"]
    return Application(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        deleting="deletionTimestamp" in metadata,
        spec=expanded(_spec(raw["spec"])),
        status=_status(raw.get("status", {})),
    )


def history(before: Object, status: Status, now: datetime) -> Object:
    """Return the new `.status` for *status*; *before* is the current one."""
    states = dict(before.get("stateTransitionHistory", {}))
    last = before.get("currentState", {}).get("currentStateSummary")
    begun = () if last else ("Submitted",)
    tried = status.state in (State.SUBMITTED, State.SUBMISSION_FAILED)
    again = ("ScheduledToRestart",) if tried and last == "SchedulingFailure" else ()
    for name in (*begun, *again, *_STATES[status.state]):
        entry = {"currentStateSummary": name, "lastTransitionTime": written(now)}
        if status.error_message:
            entry["message"] = status.error_message
        states[str(len(states))] = entry
    attempt = {"id": max(0, status.execution_attempts - 1)}
    return {
        "currentState": states[str(len(states) - 1)],
        "stateTransitionHistory": states,
        "currentAttemptSummary": {"attemptInfo": attempt},
    }


def _spec(raw: Object) -> Object:
    conf = dict(raw.get("sparkConf", {}))
    tolerations = raw.get("applicationTolerations", {})
    driver, executor = (
        {"template": raw.get(name, {}).get("podTemplateSpec", {})}
        for name in ("driverSpec", "executorSpec")
    )
    spec: Object = {
        "type": "Python",
        "mode": "cluster",
        "sparkVersion": raw["runtimeVersions"]["sparkVersion"],
        "mainApplicationFile": raw["pyFiles"],
        "arguments": raw.get("driverArgs", []),
        "sparkConf": conf,
        "restartPolicy": _restarts(tolerations.get("restartConfig", {})),
        "driver": {**driver, "serviceAccount": conf.get(_ACCOUNT, "default")},
        "executor": executor,
    }
    lasting = tolerations.get("ttlAfterStopMillis", -1)
    if lasting >= 0:
        spec["timeToLiveSeconds"] = lasting // _SECOND
    return spec


def _restarts(config: Object) -> Object:
    times = config.get("maxRestartAttempts", 3)
    seconds = max(1, config.get("restartBackoffMillis", 30_000) // _SECOND)
    return {
        "type": config.get("restartPolicy", "Never"),
        "onFailureRetries": times,
        "onFailureRetryInterval": seconds,
        "onSubmissionFailureRetries": times,
        "onSubmissionFailureRetryInterval": seconds,
    }


def _status(raw: Object) -> Status:
    entries = raw.get("stateTransitionHistory", {})
    states = [entries[str(number)] for number in range(len(entries))]
    if not states:
        return Status()
    names = [entry["currentStateSummary"] for entry in states]
    ended = names[-1] == _RELEASED
    last = states[-2] if ended else states[-1]
    state = _READ[last["currentStateSummary"]]
    if ended:
        state = State.COMPLETED if state is State.SUCCEEDING else State.FAILED
    return Status(
        state=state,
        error_message=last.get("message", ""),
        last_submission_attempt=_last(states, "DriverRequested"),
        termination=moment(last["lastTransitionTime"]) if ended else None,
        submission_attempts=names.count("DriverRequested") + names.count("SchedulingFailure"),
        execution_attempts=names.count("DriverRequested"),
    )


def _last(states: list[Object], name: str) -> datetime | None:
    times = [
        state["lastTransitionTime"] for state in states if state["currentStateSummary"] == name
    ]
    return moment(times[-1]) if times else None
