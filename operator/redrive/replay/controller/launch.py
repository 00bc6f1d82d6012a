"""A Replay that may run → the application that runs it. Pure.

Called by `reconcile`, which creates it once and never changes it: a Spark operator answers a
changed spec by killing the run and starting another.
"""

from __future__ import annotations

import hashlib
from typing import Any

from redrive.api.job import JobDefaults
from redrive.api.pods import JobUser, JobVolume, PodSize
from redrive.kube import resources
from redrive.kube.context import Settings
from redrive.kube.resources import Body, Key
from redrive.replay.controller.application import RESTRICTED, JobApplication, JobPod
from redrive.replay.controller.mounts import PodAccess
from redrive.replay.spec import ReplayJob

SPARK_VERSION = "4.3.0"

_RETRIES = 3
_RETRY_SECONDS = 10
_NAME_ROOM = 26
"""What is left of a Replay's name: Spark makes longer names from ours, of 63 characters at most."""


def name_of(replay: Body) -> str:
    """Return the name of the application of *replay*: its own, whoever asks and how often.

    A Replay that is created again under the same name gets another one.
    """
    metadata = replay["metadata"]
    digest = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:10]
    readable = metadata["name"][:_NAME_ROOM].replace(".", "-").strip("-")
    return f"replay-{readable}-{digest}"


def application(
    replay: Body, job: ReplayJob, access: PodAccess, template: JobDefaults, settings: Settings
) -> JobApplication:
    """Return the application to create for *replay*.

    A failed run is started again a few times: it goes on where it was.

    Args:
        access: what gives driver and executors the credentials of the replay role.
        template: what is said about the pods, see `template.resolve`.
    """
    user = template.security_context or JobUser()
    volumes = template.volumes or ()
    return JobApplication(
        metadata=_metadata(replay),
        image=template.image or settings.replay_image,
        image_pull_secrets=template.image_pull_secrets or (),
        program=settings.replay_application,
        argument=job.encode(),
        service_account=settings.replay_service_account,
        spark_version=SPARK_VERSION,
        spark_conf={**(template.spark_conf or {}), **_properties(name_of(replay))},
        driver=_pod(template.driver),
        executor=_pod(template.executor),
        executors=_executors(template),
        allocation=template.dynamic_allocation,
        labels=template.labels or {},
        annotations=template.annotations or {},
        node_selector=template.node_selector or {},
        tolerations=tuple(each.to_manifest() for each in template.tolerations or ()),
        container_security={**RESTRICTED, **_identity(user)},
        pod_security={} if user.fs_group is None else {"fsGroup": user.fs_group},
        volumes=(*map(_volume, volumes), *access.volumes),
        mounts=(*map(_mount, volumes), *access.mounts),
        environment=(access.variable,),
        time_to_live_seconds=template.time_to_live_seconds,
        retries=_RETRIES,
        retry_seconds=_RETRY_SECONDS,
    )


def _metadata(replay: Body) -> dict[str, Any]:
    return {
        "name": name_of(replay),
        "namespace": Key.of(replay).namespace,
        "labels": {
            "app.kubernetes.io/name": "redrive",
            "app.kubernetes.io/component": "replay",
            "app.kubernetes.io/managed-by": "redrive",
        },
        "ownerReferences": [resources.owner_reference(resources.REPLAYS, replay)],
    }


def _properties(name: str) -> dict[str, str]:
    """Return the Spark properties that nothing overrides."""
    return {
        # A second copy of a task would find its producers taken, and fail the stage.
        "spark.speculation": "false",
        # Else it is made of the name of the Replay, which may be too long, or begin with a digit.
        "spark.kubernetes.executor.podNamePrefix": name,
        # Executors need no file of the driver's configuration, so a driver needs no right to
        # ConfigMaps: it could write those of others.
        "spark.kubernetes.executor.disableConfigMap": "true",
    }


def _pod(size: PodSize | None) -> JobPod:
    return JobPod(**(size or PodSize()).model_dump(exclude_none=True))


def _executors(template: JobDefaults) -> int:
    """Return how many executors there are at first, within the bounds of a dynamic allocation."""
    wanted, bounds = template.executors or 1, template.dynamic_allocation
    if bounds is None:
        return wanted
    return min(max(wanted, bounds.min_executors), bounds.max_executors)


def _identity(user: JobUser) -> dict[str, Any]:
    given = user.to_manifest()
    return {name: given[name] for name in ("runAsUser", "runAsGroup") if name in given}


def _volume(volume: JobVolume) -> dict[str, Any]:
    return {**volume.to_manifest(), "name": _volume_name(volume)}


def _mount(volume: JobVolume) -> dict[str, Any]:
    return {"name": _volume_name(volume), "mountPath": f"/mnt/{volume.name}"}


def _volume_name(volume: JobVolume) -> str:
    """Return its name among the volumes of a pod, which Spark and redrive add others to."""
    return f"job-{volume.name}"
