"""The Kubeflow Spark operator, `sparkoperator.k8s.io/v1beta2`. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from redrive.api.conditions import moment_of
from redrive.api.launcher_name import LauncherName
from redrive.api.replay import Phase
from redrive.kube import resources
from redrive.kube.resources import Body, Key
from redrive.replay.controller.application import JobApplication, JobPod
from redrive.replay.controller.launcher import Launcher, SparkRun, given
from redrive.replay.controller.spark_errors import root_cause

_PHASES = {
    "RUNNING": Phase.RUNNING,
    "SUCCEEDING": Phase.RUNNING,
    "FAILING": Phase.RUNNING,
    "COMPLETED": Phase.COMPLETED,
    "FAILED": Phase.FAILED,
}
"""What its states mean; every other one is on the way to RUNNING."""


def manifest(job: JobApplication) -> Body:
    """Return the SparkApplication to create."""
    spec = {
        "type": "Python",
        "pythonVersion": "3",
        "mode": "cluster",
        "sparkVersion": job.spark_version,
        "image": job.image,
        "imagePullSecrets": list(job.image_pull_secrets),
        "mainApplicationFile": job.program,
        "arguments": [job.argument],
        "sparkConf": dict(job.spark_conf),
        "restartPolicy": {
            "type": "OnFailure",
            "onFailureRetries": job.retries,
            "onFailureRetryInterval": job.retry_seconds,
            "onSubmissionFailureRetries": job.retries,
            "onSubmissionFailureRetryInterval": job.retry_seconds,
        },
        "timeToLiveSeconds": job.time_to_live_seconds,
        "dynamicAllocation": _allocation(job),
        "volumes": list(job.volumes),
        "driver": {**_pod(job, job.driver), "serviceAccount": job.service_account},
        "executor": {**_pod(job, job.executor), "instances": job.executors},
    }
    return {
        "apiVersion": resources.SPARK_APPLICATIONS.api_version,
        "kind": resources.SPARK_APPLICATIONS.kind,
        "metadata": job.metadata,
        "spec": given(spec),
    }


def run(application: Body) -> SparkRun:
    """Return how *application* stands."""
    key = Key.of(application)
    status = application.get("status") or {}
    said = status.get("applicationState") or {}
    state = said.get("state", "")
    submitted = status.get("lastSubmissionAttemptTime") if state == "SUBMITTED" else None
    return SparkRun(
        key=key,
        created=datetime.fromisoformat(application["metadata"]["creationTimestamp"]),
        state=state,
        phase=_PHASES.get(state, Phase.SUBMITTED),
        error=root_cause(said.get("errorMessage", ""), ".status.applicationState.errorMessage"),
        submitted=moment_of(submitted),
        pods=f"sparkoperator.k8s.io/app-name={key.name}",
        serving=f"have the Spark operator serve the namespace {key.namespace} "
        "(spark.jobNamespaces in its Helm chart), or start it",
    )


def _pod(job: JobApplication, size: JobPod) -> dict[str, Any]:
    return given(
        {
            "cores": size.cores,
            "coreRequest": size.core_request,
            "memory": size.memory,
            "labels": dict(job.labels),
            "annotations": dict(job.annotations),
            "nodeSelector": dict(job.node_selector),
            "tolerations": list(job.tolerations),
            "securityContext": job.container_security,
            "podSecurityContext": job.pod_security,
            "env": list(job.environment),
            "volumeMounts": list(job.mounts),
        }
    )


def _allocation(job: JobApplication) -> dict[str, Any] | None:
    if job.allocation is None:
        return None
    return {
        "enabled": True,
        "initialExecutors": job.executors,
        "minExecutors": job.allocation.min_executors,
        "maxExecutors": job.allocation.max_executors,
    }


LAUNCHER = Launcher(LauncherName.KUBEFLOW, resources.SPARK_APPLICATIONS, manifest, run)
