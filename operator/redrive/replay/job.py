"""A replay, from its first to its last message: the program that Spark runs for a Replay.

Called by `__main__`, in the driver. It may be killed at any point and started again: what was
sent is not stored twice and what was not sent is sent, see `move`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from pyspark.sql import SparkSession

from redrive.api.replay import PartitionEnd, Snapshot
from redrive.errors import RedriveError
from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.replay import broker, query, slices, snapshot
from redrive.replay.progress import Numbers, Progress
from redrive.replay.snapshot import Partition
from redrive.replay.spec import ReplayJob

FENCE_SECONDS = 60.0

logger = logging.getLogger(__name__)


class NotAcknowledgedError(RedriveError):
    """Messages were moved, and yet rest in the dead-letter topic."""

    reason: ClassVar[str] = "NotAcknowledged"


def run(job: ReplayJob, spark: SparkSession, progress: Progress) -> Numbers:
    """Move the selected dead letters to the retry topic, report on the way, return the end result.

    Raises:
        Exception: the run did not come to its end; another `run` of the same job goes on with it.
    """
    status = progress.read()
    target_partitions = _target_partitions(job)
    with _alone(job, target_partitions):
        resting = _look(job)
        bounds = status.snapshot or _bounds(resting, target_partitions)
        looked_at, selected = query.count(spark, job, slices.whole(resting, bounds))
        numbers = Numbers.at_begin(status, looked_at=looked_at, selected=selected)
        progress.begin(bounds, numbers)
        for pieces in slices.rounds(resting, bounds):
            tally = query.move(spark, job, pieces, bounds.target_partitions)
            numbers = numbers.after(tally)
            progress.report(numbers)
            logger.info("replay %s/%s: %s", job.namespace, job.name, numbers)
        _check_acknowledged(job, spark, bounds, numbers)
    return numbers


@contextmanager
def _alone(job: ReplayJob, target_partitions: int) -> Iterator[None]:
    """Let no other replay of this dead-letter topic run: two would both move its messages.

    The operator runs one at a time, but a driver may outlive the object it was launched for. So
    each holds a producer with a name made from the dead-letter topic; it sends nothing.
    """
    first = 0 if target_partitions else broker.UNPARTITIONED
    topic = broker.partition_of(job.policy.retry_topic, first)
    name = f"redrive-replay-of-{job.policy.dead_letter_topic}"
    deadline = time.monotonic() + FENCE_SECONDS
    with broker.connect(job.service_url) as client:
        while True:
            try:
                broker.open_producer(client, topic, name)
                break
            except broker.AlreadyRunningError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        yield


def _look(job: ReplayJob) -> tuple[Partition, ...]:
    topic = job.policy.dead_letter_topic
    return asyncio.run(snapshot.take(job.admin_url, topic, DEAD_LETTER_SUBSCRIPTION))


def _target_partitions(job: ReplayJob) -> int:
    return asyncio.run(snapshot.count_partitions(job.admin_url, job.policy.retry_topic))


def _bounds(resting: tuple[Partition, ...], target_partitions: int) -> Snapshot:
    """Fix the end of the run, and the partitions of the target: a repetition must not change it.

    A message must be sent where it was sent before, even if the target has grown since.
    """
    ends = tuple(PartitionEnd(partition=p.index, end=str(p.end)) for p in resting)
    return Snapshot(partitions=ends, target_partitions=target_partitions)


def _check_acknowledged(
    job: ReplayJob, spark: SparkSession, bounds: Snapshot, numbers: Numbers
) -> None:
    """Make sure that nothing selected rests where it was: acknowledgements have no receipt."""
    _, selected = query.count(spark, job, slices.whole(_look(job), bounds))
    if selected > numbers.kept:
        raise NotAcknowledgedError(
            "messages were moved and yet rest in the dead-letter topic: their acknowledgements "
            "were lost on the way to the broker",
            got=selected - numbers.kept,
            remedy="the job is started again by itself and acknowledges them",
        )
