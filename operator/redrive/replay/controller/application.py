"""`JobApplication`: what a Spark operator is to run, whichever operator it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redrive.api.pods import DynamicAllocation

RESTRICTED: Mapping[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The security context of containers: a namespace with the restricted pod security admits it."""


@dataclass(frozen=True)
class JobPod:
    """The size of one pod.

    Attributes:
        core_request: as Kubernetes writes it; None for what `cores` says.
    """

    cores: int = 1
    memory: str = "1g"
    core_request: str | None = None


@dataclass(frozen=True)
class JobApplication:
    """One run of Spark, with nothing left to decide.

    Attributes:
        metadata: of the object: name, namespace, labels, owner.
        program: a `local://` URL in the image.
        argument: the one that the program takes.
        spark_conf: properties beside those that the other attributes are written as.
        allocation: bounds between which the number of executors follows the work; None keeps
            `executors`.
        container_security: the security context of each container.
        pod_security: that of each pod.
        volumes: of the application.
        mounts: of each container; every one of them mounts all.
        environment: variables of each container.
        time_to_live_seconds: how long the object stays after the run; None for ever.
    """

    metadata: Mapping[str, Any]
    image: str
    image_pull_secrets: tuple[str, ...]
    program: str
    argument: str
    service_account: str
    spark_version: str
    spark_conf: Mapping[str, str]
    driver: JobPod
    executor: JobPod
    executors: int
    allocation: DynamicAllocation | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    container_security: Mapping[str, Any]
    pod_security: Mapping[str, Any]
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    environment: tuple[Mapping[str, Any], ...]
    time_to_live_seconds: int | None
    retries: int
    retry_seconds: int
