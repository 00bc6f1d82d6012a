"""The Spark queries of a replay job: count what is selected, move what is selected.

Called by `job`, in the driver; the only builder of a SparkSession.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession, functions

from redrive.policy.naming import DEAD_LETTER_SUBSCRIPTION
from redrive.replay import selection, sink, slices
from redrive.replay.datasource import PulsarDataSource
from redrive.replay.move import Tally
from redrive.replay.slices import Slice
from redrive.replay.spec import ReplayJob


@contextmanager
def session(job: ReplayJob) -> Iterator[SparkSession]:
    """Open the Spark session of a job, which knows the data source `pulsar`."""
    spark = (
        SparkSession.builder.appName(f"replay {job.namespace}/{job.name}")
        # A moment without a time zone in a selection is meant in UTC.
        .config("spark.sql.session.timeZone", "UTC")
        # Else '${env:NAME}' in a selection stands for what the driver's environment holds.
        .config("spark.sql.variable.substitute", "false")
        # A second copy of a task would find its producers taken, and fail the stage.
        .config("spark.speculation", "false")
        .getOrCreate()
    )
    spark.dataSource.register(PulsarDataSource)
    try:
        yield spark
    finally:
        spark.stop()


def count(spark: SparkSession, job: ReplayJob, pieces: Sequence[Slice]) -> tuple[int, int]:
    """Return how many messages rest in *pieces*, and how many of them are selected."""
    if not pieces:
        return 0, 0
    looked_at, selected = (
        _dead_letters(spark, job, pieces)
        .agg(functions.count("*"), functions.count_if(_condition(job)))
        .collect()[0]
    )
    return int(looked_at), int(selected)


def move(
    spark: SparkSession, job: ReplayJob, pieces: Sequence[Slice], target_partitions: int
) -> Tally:
    """Move the selected messages of *pieces* to the retry topic, and return what became of them.

    Raises:
        PySparkException: a task failed; what it has not moved, a repetition moves.
    """
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder, "tally.json")
        selected = _dead_letters(spark, job, pieces).where(_condition(job))
        sinking = selected.write.format("pulsar").mode("append")
        sinking.options(
            serviceUrl=job.service_url,
            source=str(job.policy.dead_letter_topic),
            subscription=DEAD_LETTER_SUBSCRIPTION,
            target=str(job.policy.retry_topic),
            targetPartitions=target_partitions,
            producer=f"redrive-replay-{job.uid}",
            replay=f"{job.namespace}/{job.name}",
            tally=str(tally),
        ).save()
        return sink.read_tally(tally)


def _dead_letters(spark: SparkSession, job: ReplayJob, pieces: Sequence[Slice]) -> DataFrame:
    reading = spark.read.format("pulsar")
    return reading.options(
        serviceUrl=job.service_url,
        adminUrl=job.admin_url,
        topic=str(job.policy.dead_letter_topic),
        subscription=DEAD_LETTER_SUBSCRIPTION,
        slices=slices.encode(pieces),
    ).load()


def _condition(job: ReplayJob) -> Column:
    return functions.expr("TRUE" if job.where is None else selection.to_sql(job.where))
