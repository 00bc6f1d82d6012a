"""Kubernetes Jobs of one pod (`batch/v1`) as a third API of the stand-in.

Pure. No kubelet runs here, and so the pods of Jobs would never start. A Job is translated into an
application without Spark, whose program is the command of its first container.
"""

from __future__ import annotations

from datetime import datetime

from .objects import Application, Object, State, Status, expanded, moment, written

_RETRY_SECONDS = 10
_DRAIN = "drain"
"""First argument for the entrypoint of the image, which then delays SIGTERM."""
_ENDS = {
    State.COMPLETED: ("SuccessCriteriaMet", "Complete"),
    State.FAILED: ("FailureTarget", "Failed"),
}


def read(raw: Object) -> Application:
    """Read a Job of the API server."""
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
    active = status.state in (State.SUBMITTED, State.RUNNING)
    succeeded = status.state in (State.SUCCEEDING, State.COMPLETED)
    result: Object = {
        "startTime": before.get("startTime", written(now)),
        "active": int(active),
        "ready": int(status.state is State.RUNNING),
        "failed": max(0, status.execution_attempts - int(active or succeeded)),
        "uncountedTerminatedPods": {},
    }
    if types := _ENDS.get(status.state):
        result["conditions"] = [_condition(name, status, now) for name in types]
    if status.state is State.COMPLETED:
        result |= {"completionTime": written(now), "succeeded": 1}
    return result


def _condition(name: str, status: Status, now: datetime) -> Object:
    failed = {"reason": "BackoffLimitExceeded", "message": status.error_message}
    return {
        "type": name,
        "status": "True",
        "lastProbeTime": written(now),
        "lastTransitionTime": written(now),
        **(failed if status.state is State.FAILED else {"reason": "CompletionsReached"}),
    }


def _spec(raw: Object) -> Object:
    template = raw["template"]
    pod = template["spec"]
    own = pod["containers"][0]
    program = [*own.get("command", []), *own.get("args", [])]
    times = raw.get("backoffLimit", 6)
    return {
        "mode": "cluster",
        "program": program[1:] if program[:1] == [_DRAIN] else program,
        "restartPolicy": {
            "type": "OnFailure",
            "onFailureRetries": times,
            "onFailureRetryInterval": _RETRY_SECONDS,
            "onSubmissionFailureRetries": times,
            "onSubmissionFailureRetryInterval": _RETRY_SECONDS,
        },
        "driver": {
            "template": template,
            "serviceAccount": pod.get("serviceAccountName", "default"),
        },
        "executor": {},
    }


def _status(raw: Object) -> Status:
    ends = [condition["type"] for condition in raw.get("conditions", [])]
    failed, active = raw.get("failed", 0), raw.get("active", 0)
    if "Complete" in ends:
        state = State.COMPLETED
    elif "Failed" in ends:
        state = State.FAILED
    elif active:
        state = State.RUNNING
    else:
        state = State.PENDING_RERUN if failed else State.NEW
    return Status(
        state=state,
        last_submission_attempt=moment(raw.get("startTime")),
        termination=moment(raw.get("completionTime")),
        submission_attempts=failed + active,
        execution_attempts=failed + active,
    )
