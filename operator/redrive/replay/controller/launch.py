"""A Replay that may run → the SparkApplication that runs it. Pure.

Called by `reconcile`, which creates it once and never changes it: a Spark operator answers a
changed spec by killing the run and starting another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from redrive.kube import resources
from redrive.kube.context import Settings
from redrive.kube.resources import Body, Key
from redrive.replay.controller.mounts import PodAccess
from redrive.replay.spec import ReplayJob

SPARK_VERSION = "4.3.0"

_RETRIES = 3
_RETRY_SECONDS = 10
_NAME_ROOM = 26
"""What is left of a Replay's name: Spark makes longer names from ours, of 63 characters at most."""


POD: Mapping[str, Any] = {
    "cores": 1,
    "memory": "1g",
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
}
"""What driver and executors are, unless the operator was started with something else.

A namespace with the restricted pod security admits them.
"""


def name_of(replay: Body) -> str:
    """Return the name of the SparkApplication of *replay*: its own, whoever asks and how often.

    A Replay that is created again under the same name gets another one.
    """
    metadata = replay["metadata"]
    digest = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:10]
    readable = metadata["name"][:_NAME_ROOM].replace(".", "-").strip("-")
    return f"replay-{readable}-{digest}"


def application(replay: Body, job: ReplayJob, access: PodAccess, settings: Settings) -> Body:
    """Return the SparkApplication to create for *replay*.

    A failed run is started again a few times: it goes on where it was.

    Args:
        access: what gives driver and executors the credentials of the replay role.
    """
    pod = {
        **POD,
        **settings.replay_pod,
        "env": [access.variable],
        "volumeMounts": [*settings.replay_pod.get("volumeMounts", ()), *access.mounts],
    }
    return {
        "apiVersion": resources.SPARK_APPLICATIONS.api_version,
        "kind": resources.SPARK_APPLICATIONS.kind,
        "metadata": {
            "name": name_of(replay),
            "namespace": Key.of(replay).namespace,
            "labels": {
                "app.kubernetes.io/name": "redrive",
                "app.kubernetes.io/component": "replay",
                "app.kubernetes.io/managed-by": "redrive",
            },
            "ownerReferences": [resources.owner_reference(resources.REPLAYS, replay)],
        },
        "spec": {
            "type": "Python",
            "pythonVersion": "3",
            "mode": "cluster",
            "sparkVersion": SPARK_VERSION,
            "image": settings.replay_image,
            "mainApplicationFile": settings.replay_application,
            "arguments": [job.encode()],
            # A second copy of a task would find its producers taken, and fail the stage.
            "sparkConf": {"spark.speculation": "false"},
            "restartPolicy": {
                "type": "OnFailure",
                "onFailureRetries": _RETRIES,
                "onFailureRetryInterval": _RETRY_SECONDS,
                "onSubmissionFailureRetries": _RETRIES,
                "onSubmissionFailureRetryInterval": _RETRY_SECONDS,
            },
            "volumes": list(access.volumes),
            "driver": {**pod, "serviceAccount": settings.replay_service_account},
            "executor": {**pod, "instances": 1},
        },
    }
