"""Replay: one run that moves dead letters back to be processed again."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import ConfigDict, Field

from redrive.api.conditions import Conditions, Timestamp
from redrive.api.fields import ObjectName
from redrive.api.model import ApiModel, StatusModel
from redrive.api.rules import VALIDATIONS, Rule

_ONE_RUN = Rule(
    "self == oldSelf",
    "the spec of a Replay can't change: it is one run, like a Job",
    "make another Replay",
)


class PolicyRef(ApiModel):
    """Names a RetryPolicy of the same namespace."""

    name: ObjectName
    """Name of the RetryPolicy."""


class Selection(ApiModel):
    """Which dead letters a replay moves."""

    where: Annotated[str, Field(min_length=1, max_length=4096)]
    """A condition in SQL over the columns of a dead letter; those for which it is true are moved,
    the others stay where they are. Example: `cause_type = 'TimeoutError'`."""


class ReplaySpec(ApiModel):
    """What to replay. Immutable: a Replay is one run, like a Job; make another for another run."""

    model_config = ConfigDict(json_schema_extra={VALIDATIONS: [_ONE_RUN.to_schema()]})

    policy_ref: PolicyRef
    """The RetryPolicy, in the same namespace, whose dead letters are moved to its retry topic."""

    select: Selection | None = None
    """Which dead letters to move. Left out: all that are there when the run begins."""


class Phase(enum.StrEnum):
    """The phase of a replay; Completed and Failed are final."""

    PENDING = "Pending"
    SUBMITTED = "Submitted"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"


FINAL = frozenset({Phase.COMPLETED, Phase.FAILED})


class PartitionEnd(StatusModel):
    """Where the replay of one partition ends."""

    partition: int
    """Index of the partition of the dead-letter topic; -1 for a topic without partitions."""

    end: Annotated[str, Field(max_length=64)]
    """The last entry that belongs to the run, as `ledger:entry`."""


class Snapshot(StatusModel):
    """The bounds of a run, fixed before its first message is sent; a restarted job keeps them."""

    partitions: Annotated[tuple[PartitionEnd, ...], Field(max_length=10_000)]
    """The end of each partition of the dead-letter topic."""

    target_partitions: int
    """The number of partitions of the retry topic; 0 for a topic without partitions."""


class ReplayStatus(StatusModel):
    """The progress of the run. Numbers are of messages."""

    observed_generation: int | None = None
    """The `metadata.generation` that this status is about."""

    warnings: Annotated[str, Field(max_length=1024)] | None = None
    """The types of the conditions that need attention although the object is ready, separated by
    commas; not there while there is none."""

    phase: Phase | None = None
    """Pending, Submitted, Running, Completed or Failed; the last two are final."""

    matched: int | None = None
    """How many dead letters were selected so far."""

    replayed: int | None = None
    """How many of them were sent to the retry topic, confirmed by the broker and acknowledged."""

    skipped: int | None = None
    """How many dead letters were read and not selected; they stay where they are."""

    duplicates: int | None = None
    """How many had been sent before a restart of the job; the broker kept one of each."""

    spark_application: str | None = None
    """The SparkApplication, in the same namespace, that does the work."""

    snapshot: Snapshot | None = None
    """The bounds of the run, fixed before its first message is sent."""

    start_time: Timestamp | None = None
    """When the job was launched."""

    completion_time: Timestamp | None = None
    """When the run reached its final phase."""

    conditions: Conditions = ()
    """Ready: the run has completed. Reconciling and Stalled are there only while true."""
