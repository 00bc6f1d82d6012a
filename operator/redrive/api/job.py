"""The job of a Replay: what the Replay, its connection and the Helm chart may say about its pods.

Three layers, each on top of the one before: the chart's, the connection's, the Replay's. Each is a
model with what its author may decide. None can name a Secret to mount, a ServiceAccount, a path of
the node, or a Spark property that does: a driver may make pods in the namespace of the Replay, so
whoever decides what it runs could read the Secrets there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, Strict

from redrive.api import spark_properties
from redrive.api.fields import SET, ObjectName
from redrive.api.launcher_name import LauncherName
from redrive.api.model import ApiModel
from redrive.api.pods import (
    MAX_EXECUTORS,
    DynamicAllocation,
    Image,
    ImagePattern,
    JobUser,
    JobVolume,
    Labels,
    Memory,
    PodSize,
    Toleration,
)
from redrive.api.rules import refusing
from redrive.policy.patterns import Patterns

SparkConf = Annotated[
    Mapping[str, Annotated[str, Field(max_length=1024)]],
    Field(max_length=64),
    spark_properties.OPEN_KEYS,
    AfterValidator(refusing(spark_properties.check_keys)),
]

_T = TypeVar("_T", bound="JobRequest")


class JobRequest(ApiModel):
    """The pods of a replay job, as its author asks for them: as far as the connection permits."""

    image: Image | None = None
    """The image of driver and executors. Left out: that of the connection, else of the operator."""

    driver: PodSize | None = None
    """The size of the driver, which plans and keeps the account."""

    executor: PodSize | None = None
    """The size of each executor; they move the messages."""

    executors: Annotated[int, Strict(), Field(ge=1, le=MAX_EXECUTORS)] | None = None
    """How many executors; with `dynamicAllocation`, how many at first. Left out: 1."""

    dynamic_allocation: DynamicAllocation | None = None
    """A number of executors that follows the work. Left out: it stays as it is."""

    node_selector: Labels | None = None
    """Labels of the nodes to run on. Left out: any node."""

    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] | None = None
    """Taints that the pods tolerate. Left out: none."""

    spark_conf: SparkConf | None = None
    """Spark properties. Those by which redrive, or another field, decides something can't be set;
    nor those that run programs, mount anything or say who a pod is."""

    time_to_live_seconds: Annotated[int, Strict(), Field(ge=60, le=31_536_000)] | None = None
    """After so many seconds the SparkApplication of a run that has ended is deleted, with its pods
    and their logs. Left out: it stays as long as its Replay."""

    def on_top_of(self, lower: _T) -> _T:
        """Return *lower* with what is given here in its place.

        The sizes of pods are given field by field and Spark properties one by one; all others are
        replaced as a whole.
        """
        fields = lower.to_manifest()
        for name, value in self.to_manifest().items():
            merged = name in {"driver", "executor", "sparkConf"}
            fields[name] = {**fields.get(name, {}), **value} if merged else value
        return type(lower).model_validate(fields)


class JobOverrides(ApiModel):
    """What Replays may ask for in their own `job`. Left out of it: no more than without."""

    images: Annotated[tuple[ImagePattern, ...], Field(max_length=64, json_schema_extra=SET)] = ()
    """Images, as patterns: `*` stands for any characters but a slash. The operator has to permit
    them as well. Left out: no other image."""

    max_cores: Annotated[int, Strict(), Field(ge=1, le=256)] | None = None
    """The most `cores`, and the highest `coreRequest`, of one pod. Left out: none of its own."""

    max_memory: Memory | None = None
    """The most `memory` of one pod. Left out: none of its own."""

    max_executors: Annotated[int, Strict(), Field(ge=1, le=MAX_EXECUTORS)] | None = None
    """The most `executors`, and the highest `dynamicAllocation.maxExecutors`. Left out: none of its
    own."""

    placement: Annotated[bool, Strict()] = False
    """Whether a Replay chooses its nodes: `nodeSelector` and `tolerations`. Left out: no."""

    spark_conf: Annotated[
        tuple[Annotated[str, Field(max_length=128)], ...],
        Field(max_length=64, json_schema_extra=SET),
        spark_properties.OPEN_KEYS,
        AfterValidator(refusing(spark_properties.check_keys)),
    ] = ()
    """Names of the Spark properties that a Replay sets. Left out: none."""


class JobTemplate(JobRequest):
    """The pods of the replay jobs of a connection."""

    launcher: LauncherName | None = None
    """The Spark operator that runs the jobs: `Kubeflow` (sparkoperator.k8s.io) or `Apache`
    (spark.apache.org). Left out: the one that is installed; of both, Kubeflow's."""

    image_pull_secrets: (
        Annotated[tuple[ObjectName, ...], Field(max_length=8, json_schema_extra=SET)] | None
    ) = None
    """Secrets of the Replay's namespace to pull the image with."""

    security_context: JobUser | None = None
    """Who the processes are. Pods pass the restricted pod security in any case."""

    volumes: (
        Annotated[
            tuple[JobVolume, ...],
            Field(
                max_length=16,
                json_schema_extra={
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                },
            ),
        ]
        | None
    ) = None
    """Volumes of driver and executors, each mounted at `/mnt/` and its name."""

    overrides: JobOverrides | None = None
    """What Replays may ask for otherwise. Left out: nothing but `timeToLiveSeconds`."""


class JobDefaults(JobTemplate):
    """What the operator was started with: what connections leave out, and which images there are.

    Labels and annotations can say to others who a pod is, so they are here alone.
    """

    spark_conf: Mapping[str, str] | None = None
    """Spark properties, any; those that redrive sets stay as they are."""

    images: tuple[ImagePattern, ...] = ()
    """Images that connections and Replays may name, beside the operator's own, as patterns."""

    labels: Labels | None = None
    """Labels of the pods."""

    annotations: Mapping[str, str] | None = None
    """Annotations of the pods."""

    def permits(self, image: str) -> bool:
        """Whether connections and Replays may name *image*."""
        return is_among(image, self.images)


def is_among(image: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of *patterns* is for *image*."""
    return Patterns(patterns, but="/").match(image)
