"""A dry run shows the effect of a Replay, and changes nothing."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive.api.replay_status import ReplayRun
from redrive.reading import broker
from redrive.replay import ledger as ledgers
from redrive.replay.job import run as runs
from redrive.replay.job.plan import PlannedRange, Scan
from redrive.replay.job.progress import Progress
from redrive.replay.ledger import Ledger
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice
from tests.support.local_engine import Local
from tests.support.local_runs import Notes, job_of, replay

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("replay_token")


def test_dry_run_moves_nothing_and_leaves_the_ledger_alone(
    provision_policy: ProvisionPolicy,
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    provisioned.bury(3)
    replay(provisioned)
    provisioned.bury(6, "TimeoutError")
    provisioned.bury(2, "ValueError")
    job = dataclasses.replace(job_of(provisioned), dry_run=True)
    with Ledger.open(job.service_url, job.policy.ledger_topic, "running") as running:
        before = running.records

        preview = runs.preview(job, Local(), Notes())

        running.write("plan/other", None)  # it was not fenced off
    account = preview.account
    assert (account.scanned, account.matched, account.moved, account.left) == (8, 8, 0, 8)
    numbers = {failure.cause: figures.messages for failure, figures in preview.causes.items()}
    assert numbers == {"TimeoutError": 6, "ValueError": 2}
    assert len(preview.samples) == 8
    with broker.connect(job.service_url) as client:
        after = ledgers.read(client, job.policy.ledger_topic, ledgers.mounted_key())
    assert (after.ranges, after.plans, after.owner) == (before.ranges, before.plans, "running")
    assert len(provisioned.in_target()) == 3
    assert provisioned.backlog_of_dead_letters() == 8


def test_selection_counted_by_spark_is_shown_in_status(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    provisioned = provision_policy()
    provisioned.bury(5, "TimeoutError")
    provisioned.bury(4, "ValueError")
    provisioned.bury_batch("TimeoutError", "ValueError")
    job, progress = make_job(provisioned, "cause_type = 'TimeoutError'")
    job = dataclasses.replace(job, dry_run=True)

    engine = Spark(spark, job)
    progress.preview(runs.preview(job, engine, progress))

    status, scanned = progress.read(), engine.scanned
    assert (scanned.messages, scanned.refused) == (11, Counter(PartOfBatch=1))
    (figures,) = scanned.causes.values()
    assert (figures.messages, figures.replayed) == (5, 0)
    assert 0 < figures.first <= figures.last
    counts = status.counts
    assert (counts.scanned, counts.matched, counts.refused, counts.left) == (11, 6, 1, 5)
    assert [(count.cause, count.messages) for count in status.preview.causes] == [
        ("TimeoutError", 5)
    ]
    assert [(count.cause, count.messages) for count in status.preview.refused] == [
        ("PartOfBatch", 1)
    ]
    assert len(status.preview.samples) == 5
    assert len(provisioned.unacknowledged()) == 11


class Watched(Local):
    """Continues once the status shows the messages of the first range."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self.shown: ReplayRun | None = None

    def scan(self, scans: Sequence[Scan]) -> Iterable[PlannedRange]:
        deadline = time.monotonic() + 60
        for planned in super().scan(scans):
            yield planned
            while self.shown is None:
                assert time.monotonic() < deadline
                status = self._progress.read()
                self.shown = status if status.counts.scanned else None


@pytest.mark.parametrize("limit", [None, 12])
def test_counts_by_cause_are_shown_before_all_is_scanned(
    provision_policy: ProvisionPolicy, make_job: MakeJob, limit: int | None
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    for key in range(12):
        provisioned.bury(1, "TimeoutError", partition_key=str(key))
    job, _ = make_job(provisioned)
    job = dataclasses.replace(job, dry_run=True, choice=Choice(limit=limit))
    progress = Progress(job)
    engine = Watched(progress)

    progress.preview(runs.preview(job, engine, progress))

    first, last = engine.shown, progress.read()
    assert first is not None
    scanned = first.counts.scanned
    assert scanned is not None
    assert 0 < scanned < 12
    # Of a limited one scans look at more than it takes.
    shown = None if first.preview is None else first.preview.causes
    numbers = None if shown is None else [(count.cause, count.messages) for count in shown]
    assert numbers == ([("TimeoutError", scanned)] if limit is None else None)
    assert last.counts.scanned == 12
    assert last.preview is not None
    assert (last.preview.causes[0].messages, last.preview.estimated_seconds) == (12, 1)


def test_selection_requires_all_its_parts(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    provisioned = provision_policy(dead_partitions=2)
    for key in ("eu", "us"):
        provisioned.bury(3, "TimeoutError", partition_key=key)
        provisioned.bury(3, "ValueError", partition_key=key)
    provisioned.bury(1, "TimeoutError", partition_key="de", replays=2)
    job, _ = make_job(provisioned)
    engine = Spark(spark, job)
    by_key = Choice(keys=("eu",))
    samples = runs.preview(dataclasses.replace(job, choice=by_key), Local(), Notes()).samples
    assert len(samples) == 6
    published = [message.publish_timestamp() for message in provisioned.unacknowledged()]
    whole = {"since": min(published), "until": max(published) + 1}
    for choice, count in (
        (by_key, 6),
        (Choice(samples, limit=4), 4),
        (Choice((samples[0],), ("us",)), 0),
        (Choice(**whole), 13),
        (Choice(max_replays=2), 12),
        (Choice(since=whole["until"]), 0),
        (Choice(until=whole["since"]), 0),
    ):
        everything = dataclasses.replace(job, choice=choice)
        assert runs.preview(everything, Local(), Notes()).account.left == count
    for choice, count in (
        (Choice(keys=("eu", "de"), max_replays=2, **whole), 3),
        (Choice(samples, limit=4), 3),
    ):
        selective = dataclasses.replace(job, choice=choice, where="cause_type = 'TimeoutError'")
        assert runs.preview(selective, Spark(spark, selective), Notes()).account.left == count
    assert (
        runs.run(dataclasses.replace(job, choice=Choice(samples, limit=4)), engine, Notes()).moved
        == 4
    )
    assert {message.partition_key() for message in provisioned.replayed()} == {"eu"}
    assert len(provisioned.unacknowledged()) == 9
