"""A `JobApplication` for the Kubeflow Spark operator, `sparkoperator.k8s.io/v1beta2`. Pure."""

from __future__ import annotations

from typing import Any

from redrive.kube import resources
from redrive.kube.resources import Body
from redrive.replay.controller.application import JobApplication, JobPod


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
        "spec": _given(spec),
    }


def _pod(job: JobApplication, size: JobPod) -> dict[str, Any]:
    return _given(
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


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is empty."""
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}
