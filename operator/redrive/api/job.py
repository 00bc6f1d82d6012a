"""Pods of replay jobs: sizes, placement, and Spark properties.

Which Spark properties a connection or a Replay may set. Pure.

A list of what is open, not of what is closed: Spark has hundreds, and several of them run a program
(`extraJavaOptions`, discovery scripts, `spark.pyspark.python`), load one (`spark.jars`), mount
Secrets, or change the ServiceAccount, labels and annotations of a pod.

Parts of a pod, as far as a replay job may have them: sizes, nodes, volumes, users.

There is no volume of a Secret or of a path of the node among them, and no right that the restricted
pod security refuses.

The job of a Replay: what the Replay, its connection and the Helm chart may say about its pods.

Three layers, each on top of the one before: the chart's, the connection's, the Replay's. Each is a
model with what its author may decide. None can name a Secret to mount, a ServiceAccount, a path of
the node, or a Spark property that does: a driver may make pods in the namespace of the Replay, so
whoever decides what it runs could read the Secrets there.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, Strict, model_validator

from redrive.api import LauncherName
from redrive.api.model import (
    SET,
    VALIDATIONS,
    ApiModel,
    Form,
    LabelKey,
    ObjectName,
    Rule,
    check_one,
    exactly_one,
    one_given,
    refusing,
)
from redrive.errors import InvalidSpecError
from redrive.policy.values import Patterns

_Names = TypeVar("_Names", bound=Iterable[str])

_OPEN = frozenset(
    {
        "spark.driver.maxResultSize",
        "spark.driver.memoryOverhead",
        "spark.driver.memoryOverheadFactor",
        "spark.executor.heartbeatInterval",
        "spark.executor.memoryOverhead",
        "spark.executor.memoryOverheadFactor",
        "spark.executor.pyspark.memory",
        "spark.kubernetes.executor.deleteOnTermination",
        "spark.log.level",
        "spark.log.structuredLogging.enabled",
        "spark.scheduler.maxRegisteredResourcesWaitingTime",
        "spark.scheduler.minRegisteredResourcesRatio",
        "spark.ui.enabled",
        "spark.ui.prometheus.enabled",
    }
)
_OPEN_PREFIXES = (
    "spark.dynamicAllocation.executor",
    "spark.dynamicAllocation.scheduler",
    "spark.eventLog.",
    "spark.kubernetes.allocation.",
    "spark.network.",
    "spark.rpc.",
    "spark.task.",
)
_CLOSED = frozenset({"spark.kubernetes.allocation.pods.allocator"})
"""It names a class that makes pods."""

_PROBLEM = (
    "a Spark property is one that may be set here: that is harmless, and redrive does not set"
)
_REMEDY = "use the fields of job; docs/reference/replay-jobs.md lists the properties that are open"


def is_open_property(name: str) -> bool:
    """Whether a connection or a Replay may set the Spark property *name*."""
    return name in _OPEN or (name.startswith(_OPEN_PREFIXES) and name not in _CLOSED)


def _cel() -> str:
    prefixes = " || ".join(f"key.startsWith('{prefix}')" for prefix in _OPEN_PREFIXES)
    opened, closed = json.dumps(sorted(_OPEN)), json.dumps(sorted(_CLOSED))
    return f"self.all(key, key in {opened} || (({prefixes}) && !(key in {closed})))"


OPEN_KEYS = Rule(_cel(), _PROBLEM, _REMEDY)
"""Each name in a list, or key of a map, is open."""


def check_property_keys(names: _Names) -> _Names:
    """Return *names*, a list or the keys of a map, if all of them may be set.

    Raises:
        InvalidSpecError: one may not.
    """
    if closed := sorted(name for name in names if not is_open_property(name)):
        raise InvalidSpecError(_PROBLEM, got=closed[0], remedy=_REMEDY)
    return names


MAX_EXECUTORS = 1_000
_MEBIBYTES = {"m": 1, "g": 1024, "t": 1024 * 1024}

Memory = Annotated[
    str,
    Field(max_length=16),
    Form(
        r"[1-9][0-9]{0,6}[mgt]",
        "an amount of memory is a whole number with m, g or t, as Spark writes it",
        "write one like 2g",
    ),
]

CoreRequest = Annotated[
    str,
    Field(max_length=16),
    Form(
        r"[1-9][0-9]{0,5}m|[0-9]{1,3}[.][0-9]{1,3}|[1-9][0-9]{0,2}",
        "a request for CPU is a number of cores, or of thousandths of one with m",
        "write one like 500m",
    ),
]

Image = Annotated[
    str,
    Field(max_length=512),
    Form(
        r"[a-zA-Z0-9][-._:/@a-zA-Z0-9]*",
        "an image is named as in a pod, such as registry.example/redrive-replay:1",
        "give its whole name",
    ),
]

ImagePattern = Annotated[
    str,
    Field(max_length=512),
    Form(
        r"[a-zA-Z0-9][-._:/@*a-zA-Z0-9]*",
        "a pattern of images is the name of one, where * stands for any characters but a slash",
        "write one like registry.example/redrive-replay:*",
    ),
]

Labels = Annotated[
    Mapping[str, Annotated[str, Field(max_length=63)]],
    Field(max_length=64),
]


def mebibytes(memory: str) -> int:
    """Return how much a `Memory` is."""
    return int(memory[:-1]) * _MEBIBYTES[memory[-1]]


def requested_cores(request: str) -> Decimal:
    """Return how many cores a `CoreRequest` is."""
    if request.endswith("m"):
        return Decimal(request[:-1]) / 1000
    return Decimal(request)


class PodSize(ApiModel):
    """What one pod takes of its node."""

    cores: Annotated[int, Strict(), Field(ge=1, le=256)] | None = None
    """How many tasks it works on at a time. Left out: 1."""

    memory: Memory | None = None
    """Heap of its JVM; Spark adds a share for Python. Left out: `1g`."""

    core_request: CoreRequest | None = None
    """The CPU that it requests from the node. Left out: as many as `cores`. Example: `500m`."""


_BOUNDS = Rule(
    "!has(self.minExecutors) || !has(self.maxExecutors) || self.minExecutors <= self.maxExecutors",
    "minExecutors is at most maxExecutors",
    "lower it, or raise maxExecutors",
)


class DynamicAllocation(ApiModel):
    """A number of executors that follows the work."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_BOUNDS.to_schema()]})

    min_executors: Annotated[int, Strict(), Field(ge=1, le=MAX_EXECUTORS)]
    """At least so many."""

    max_executors: Annotated[int, Strict(), Field(ge=1, le=MAX_EXECUTORS)]
    """At most so many."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(DynamicAllocation._check_bounds)(self)
        return self

    def _check_bounds(self) -> None:
        if self.min_executors > self.max_executors:
            got = f"{self.min_executors} and {self.max_executors}"
            raise InvalidSpecError(_BOUNDS.problem, got=got, remedy=_BOUNDS.remedy)


class TolerationOperator(enum.StrEnum):
    """How a toleration compares."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(enum.StrEnum):
    """What a taint does to pods that don't tolerate it."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(ApiModel):
    """A taint of nodes that the pods tolerate, as in a pod."""

    key: LabelKey | None = None
    """The taint's key. Left out: any, with `operator: Exists`."""

    operator: TolerationOperator | None = None
    """`Exists`: whatever its value. `Equal`: its value is `value`. Left out: `Equal`."""

    value: Annotated[str, Field(max_length=63)] | None = None
    """The taint's value."""

    effect: TaintEffect | None = None
    """`NoSchedule`, `PreferNoSchedule` or `NoExecute`. Left out: all of them."""

    toleration_seconds: Annotated[int, Strict(), Field(ge=0, le=31_536_000)] | None = None
    """How long a pod stays after a taint with `NoExecute` came. Left out: for ever."""


class EmptyDir(ApiModel):
    """Scratch space that goes with the pod."""

    size_limit: Annotated[str, Field(max_length=16, pattern=r"^[1-9][0-9]{0,6}[KMGT]i$")] | None = (
        None
    )
    """The pod is evicted when it holds more. Left out: as much as the node has. Example: `1Gi`."""


class VolumeClaim(ApiModel):
    """A PersistentVolumeClaim of the Replay's namespace."""

    claim_name: ObjectName
    """Its name."""


class VolumeConfigMap(ApiModel):
    """A ConfigMap of the Replay's namespace."""

    name: ObjectName
    """Its name."""


class JobVolume(ApiModel):
    """A volume of driver and executors, mounted at `/mnt/` and its name."""

    KEPT_EMPTY = frozenset({"emptyDir", "empty_dir"})
    ONE: ClassVar[Rule] = exactly_one("a volume", "emptyDir", "persistentVolumeClaim", "configMap")
    model_config = ConfigDict(json_schema_extra=one_given(ONE, beside=1))

    name: Annotated[
        str,
        Field(max_length=40),
        Form(
            r"[a-z0-9]([-a-z0-9]*[a-z0-9])?",
            "a volume has a name of lower-case letters, digits and '-'",
            "choose such a name; it is mounted at /mnt/ and that name",
        ),
    ]
    """Its name."""

    empty_dir: EmptyDir | None = None
    """Scratch space."""

    persistent_volume_claim: VolumeClaim | None = None
    """What a claim holds."""

    config_map: VolumeConfigMap | None = None
    """What a ConfigMap holds, read-only."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refusing(JobVolume._check_one)(self)
        return self

    def _check_one(self) -> None:
        check_one(self.ONE, self.empty_dir, self.persistent_volume_claim, self.config_map)


class JobUser(ApiModel):
    """Who the processes of a pod are. Root is refused."""

    run_as_user: Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)] | None = None
    """The id of the user. Left out: that of the image."""

    run_as_group: Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)] | None = None
    """The id of the group. Left out: that of the image."""

    fs_group: Annotated[int, Strict(), Field(ge=1, le=2**31 - 1)] | None = None
    """The id of the group that may write into volumes. Left out: as the volumes have it."""


SparkConf = Annotated[
    Mapping[str, Annotated[str, Field(max_length=1024)]],
    Field(max_length=64),
    OPEN_KEYS,
    AfterValidator(refusing(check_property_keys)),
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
        OPEN_KEYS,
        AfterValidator(refusing(check_property_keys)),
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
