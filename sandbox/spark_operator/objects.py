"""A SparkApplication and its status as values, used by all modules of the stand-in.

The schema in `crd.yaml` has already validated the types.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

Object = dict[str, Any]


class State(StrEnum):
    """Values of `.status.applicationState.state`; COMPLETED and FAILED are final."""

    NEW = ""
    SUBMITTED = "SUBMITTED"
    RUNNING = "RUNNING"
    SUCCEEDING = "SUCCEEDING"
    COMPLETED = "COMPLETED"
    FAILING = "FAILING"
    FAILED = "FAILED"
    SUBMISSION_FAILED = "SUBMISSION_FAILED"
    PENDING_RERUN = "PENDING_RERUN"
    INVALIDATING = "INVALIDATING"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    RESUMING = "RESUMING"


@dataclass(frozen=True)
class Status:
    """The content of `.status`; times are in UTC and in whole seconds, as in the API."""

    state: State = State.NEW
    error_message: str = ""
    submission_id: str = ""
    spark_application_id: str = ""
    driver_pod: str = ""
    last_submission_attempt: datetime | None = None
    termination: datetime | None = None
    submission_attempts: int = 0
    execution_attempts: int = 0

    @classmethod
    def read(cls, raw: Object) -> Status:
        """Read `.status`, which is empty for a new object."""
        state = raw.get("applicationState", {})
        return cls(
            state=State(state.get("state", "")),
            error_message=state.get("errorMessage", ""),
            submission_id=raw.get("submissionID", ""),
            spark_application_id=raw.get("sparkApplicationId", ""),
            driver_pod=raw.get("driverInfo", {}).get("podName", ""),
            last_submission_attempt=moment(raw.get("lastSubmissionAttemptTime")),
            termination=moment(raw.get("terminationTime")),
            submission_attempts=raw.get("submissionAttempts", 0),
            execution_attempts=raw.get("executionAttempts", 0),
        )

    def written(self) -> Object:
        """Return `.status` in the form of the API, without empty fields."""
        fields = {
            "submissionID": self.submission_id,
            "sparkApplicationId": self.spark_application_id,
            "lastSubmissionAttemptTime": written(self.last_submission_attempt),
            "terminationTime": written(self.termination),
            "submissionAttempts": self.submission_attempts,
            "executionAttempts": self.execution_attempts,
        }
        state = {"state": self.state.value}
        if self.error_message:
            state["errorMessage"] = self.error_message
        return {
            "applicationState": state,
            "driverInfo": {"podName": self.driver_pod} if self.driver_pod else {},
            **{name: value for name, value in fields.items() if value},
        }


@dataclass(frozen=True)
class Application:
    """One SparkApplication as the API server last showed it."""

    namespace: str
    name: str
    uid: str
    deleting: bool
    spec: Object
    status: Status

    @classmethod
    def read(cls, raw: Object) -> Application:
        """Read an object of the API server."""
        metadata = raw["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            deleting="deletionTimestamp" in metadata,
            spec=expanded(raw["spec"]),
            status=Status.read(raw.get("status", {})),
        )

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return (self.namespace, self.name)

    @property
    def conf(self) -> dict[str, str]:
        """The Spark properties that the object gives itself."""
        conf: dict[str, str] = self.spec.get("sparkConf", {})
        return conf

    @property
    def driver_pod(self) -> str:
        """Name of the driver's pod, which also names its log."""
        return self.conf.get("spark.kubernetes.driver.pod.name") or f"{self.name}-driver"

    @property
    def service_account(self) -> str:
        """ServiceAccount of the driver."""
        account: str = self.spec["driver"].get("serviceAccount", "default")
        return account

    @property
    def suspended(self) -> bool:
        """True if the job must be stopped, or must not start."""
        return self.spec.get("suspend") is True

    @property
    def run_spec(self) -> Object:
        """The part of the spec of which a change kills the run and starts another one."""
        untouched = ("suspend", "timeToLiveSeconds")
        return {field: value for field, value in self.spec.items() if field not in untouched}


def expanded(spec: Object) -> Object:
    """Return *spec* with the fields of its pod templates beside the templates themselves.

    Spark's container has the name that the Kubeflow operator gives it; else it is the first one.
    """
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    pods = {}
    for role in ("driver", "executor"):
        pod = spec[role]
        template = pod.get("template", {}).get("spec", {})
        volumes |= {volume["name"]: volume for volume in template.get("volumes", [])}
        own = own_container(template, role)
        fields = ("env", "envFrom", "volumeMounts", "securityContext")
        pods[role] = {**{field: own[field] for field in fields if field in own}, **pod}
    return {**spec, **pods, **({"volumes": list(volumes.values())} if volumes else {})}


def own_container(template: Object, role: str) -> Object:
    """Return Spark's container of the spec of a pod template; empty without any."""
    name = f"spark-kubernetes-{role}"
    containers: list[Object] = template.get("containers", [])
    named = [container for container in containers if container["name"] == name]
    return next(iter([*named, *containers]), {})


def moment(text: str | None) -> datetime | None:
    """Return the time in *text*."""
    return None if text is None else datetime.fromisoformat(text)


def written(at: datetime | None) -> str | None:
    """Return *at* as text, in whole seconds."""
    return None if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
