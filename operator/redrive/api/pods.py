"""Parts of a pod, as far as a replay job may have them: sizes, nodes, volumes, users.

There is no volume of a Secret or of a path of the node among them, and no right that the restricted
pod security refuses.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, ClassVar, Self

from pydantic import ConfigDict, Field, Strict, model_validator

from redrive.api.fields import LabelKey, ObjectName
from redrive.api.model import ApiModel
from redrive.api.oneof import check_one, exactly_one, one_given
from redrive.api.rules import VALIDATIONS, Form, Rule, refusing
from redrive.errors import InvalidSpecError

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
    "self.minExecutors <= self.maxExecutors",
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
