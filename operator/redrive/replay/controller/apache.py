"""The Apache Spark operator, `spark.apache.org/v1`. Pure.

It has no webhook: what Spark has no property for stands in a template of the pods. It deletes the
driver once a run has ended, whatever `resourceRetainPolicy` says where a run may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from redrive.api.conditions import moment_of
from redrive.api.launcher_name import LauncherName
from redrive.api.replay import Phase
from redrive.kube import resources
from redrive.kube.kept import in_order
from redrive.kube.resources import Body, Key
from redrive.replay.controller.application import JobApplication, JobPod
from redrive.replay.controller.launcher import Launcher, SparkRun, given
from redrive.replay.controller.spark_errors import root_cause

_TERMINATED = ("ResourceReleased", "TerminatedWithoutReleaseResources")
"""The last states. The one before, which is not shown any more, says how the run ended."""
_STARTING = ("Submitted", "ScheduledToRestart", "DriverRequested")
_FAILURES = frozenset(
    {
        "DriverStartTimedOut",
        "DriverReadyTimedOut",
        "ExecutorsStartTimedOut",
        "DriverEvicted",
        "Failed",
        "SchedulingFailure",
    }
)


def manifest(job: JobApplication) -> Body:
    """Return the SparkApplication to create."""
    restarts = {
        "restartPolicy": "OnFailure",
        "maxRestartAttempts": job.retries,
        "restartBackoffMillis": job.retry_seconds * 1000,
    }
    seconds = job.time_to_live_seconds
    lasting = {} if seconds is None else {"ttlAfterStopMillis": seconds * 1000}
    return {
        "apiVersion": resources.APACHE_SPARK_APPLICATIONS.api_version,
        "kind": resources.APACHE_SPARK_APPLICATIONS.kind,
        "metadata": job.metadata,
        "spec": {
            "runtimeVersions": {"sparkVersion": job.spark_version},
            "pyFiles": job.program,
            "driverArgs": [job.argument],
            "sparkConf": {**job.spark_conf, **_properties(job)},
            "applicationTolerations": {"restartConfig": restarts, **lasting},
            "driverSpec": {"podTemplateSpec": _template(job, "driver")},
            "executorSpec": {"podTemplateSpec": _template(job, "executor")},
        },
    }


def run(application: Body) -> SparkRun:
    """Return how *application* stands."""
    key = Key.of(application)
    status = application.get("status") or {}
    current = status.get("currentState") or {}
    state = current.get("currentStateSummary", "")
    ended = _before_last(status) if state in _TERMINATED else current
    requested = current.get("lastTransitionTime") if state == "DriverRequested" else None
    return SparkRun(
        key=key,
        created=datetime.fromisoformat(application["metadata"]["creationTimestamp"]),
        state=state,
        phase=_phase(state, ended.get("currentStateSummary", "")),
        error=_error(ended, current),
        submitted=moment_of(requested),
        pods=f"spark.operator/spark-app-name={key.name}",
        serving=f"have the Spark operator watch the namespace {key.namespace} "
        "(workloadResources.namespaces.data in its Helm chart), or start it",
    )


def _phase(state: str, ended: str) -> Phase:
    if state in _TERMINATED:
        return Phase.COMPLETED if ended == "Succeeded" else Phase.FAILED
    if state == "Succeeded":
        return Phase.COMPLETED
    return Phase.SUBMITTED if not state or state in _STARTING else Phase.RUNNING


def _before_last(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state before the one that a run has ended in."""
    history = status.get("stateTransitionHistory") or {}
    states = [history[number] for number in in_order(history)]
    known = [each for each in states if each.get("currentStateSummary") not in _TERMINATED]
    return known[-1] if known else {}


def _error(ended: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    if ended.get("currentStateSummary") not in _FAILURES:
        return ""
    place = ".status.stateTransitionHistory"
    said = [root_cause(each.get("message") or "", place) for each in (ended, current)]
    return "; ".join(dict.fromkeys(filter(None, said))) or str(ended["currentStateSummary"])


def _properties(job: JobApplication) -> dict[str, str]:
    return {
        "spark.kubernetes.container.image": job.image,
        **_if_any("spark.kubernetes.container.image.pullSecrets", ",".join(job.image_pull_secrets)),
        "spark.kubernetes.authenticate.driver.serviceAccountName": job.service_account,
        **_size("driver", job.driver),
        **_size("executor", job.executor),
        "spark.executor.instances": str(job.executors),
        **_allocation(job),
    }


def _size(name: str, pod: JobPod) -> dict[str, str]:
    return {
        f"spark.{name}.cores": str(pod.cores),
        f"spark.{name}.memory": pod.memory,
        **_if_any(f"spark.kubernetes.{name}.request.cores", pod.core_request or ""),
    }


def _allocation(job: JobApplication) -> dict[str, str]:
    if job.allocation is None:
        return {}
    prefix = "spark.dynamicAllocation"
    return {
        f"{prefix}.enabled": "true",
        f"{prefix}.shuffleTracking.enabled": "true",
        f"{prefix}.initialExecutors": str(job.executors),
        f"{prefix}.minExecutors": str(job.allocation.min_executors),
        f"{prefix}.maxExecutors": str(job.allocation.max_executors),
    }


def _template(job: JobApplication, container: str) -> dict[str, Any]:
    """Return the template of a pod; Spark takes its first container for its own."""
    metadata = {"labels": dict(job.labels), "annotations": dict(job.annotations)}
    spec = {
        "nodeSelector": dict(job.node_selector),
        "tolerations": list(job.tolerations),
        "securityContext": job.pod_security,
        "volumes": list(job.volumes),
    }
    own = {
        "name": f"spark-kubernetes-{container}",
        "env": list(job.environment),
        "securityContext": job.container_security,
        "volumeMounts": list(job.mounts),
    }
    template = {
        "metadata": given(metadata),
        "spec": {**given(spec), "containers": [given(own)]},
    }
    return given(template)


def _if_any(name: str, value: str) -> dict[str, str]:
    return {name: value} if value else {}


LAUNCHER = Launcher(LauncherName.APACHE, resources.APACHE_SPARK_APPLICATIONS, manifest, run)
