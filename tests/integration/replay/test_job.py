"""A whole run: real broker, real Spark, real status, with the replay role's own rights."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import SparkSession

from redrive.policy import envelope
from redrive.policy.properties import CAUSE_TYPE, REPLAY
from redrive.replay import job as jobs
from redrive.replay import query, slices
from redrive.replay.broker import AlreadyRunningError, connect, open_producer
from redrive.replay.progress import Numbers

SetStage = Callable[..., Any]
MakeJob = Callable[..., Any]


def test_a_selective_run_moves_exactly_the_selected_and_the_next_run_only_the_rest(
    set_stage: SetStage, make_job: MakeJob, spark: SparkSession
) -> None:
    stage = set_stage(partitions=3)
    event_time = int(datetime(2026, 11, 20, 9, tzinfo=UTC).timestamp() * 1_000)
    stage.bury(15, "TimeoutError", partition_key="k", event_timestamp=event_time)
    stage.bury(7, "ValueError", content=None, ordering_key="o")
    stage.bury(3, "TimeoutError")
    before = {m.properties()["id"]: m for m in stage.resting()}

    job, progress = make_job(
        stage, "cause_type = 'TimeoutError' and event_time >= '2026-11-20 09:00:00'"
    )
    jobs.run(job, spark, progress)

    moved = stage.replayed()
    assert len(moved) == 15
    assert {m.properties()[CAUSE_TYPE] for m in moved} == {"TimeoutError"}
    assert len(stage.resting()) == 10
    status = progress.read()
    assert (status.matched, status.replayed, status.skipped, status.duplicates) == (15, 15, 10, 0)
    assert status.snapshot.target_partitions == 3

    job, progress = make_job(stage)
    jobs.run(job, spark, progress)

    moved += stage.replayed()
    assert stage.resting() == []
    assert stage.ids(moved) == sorted(before)
    for message in moved:
        source = before[message.properties()["id"]]
        assert message.data() == source.data()
        assert message.has_null_value() == source.has_null_value()
        assert message.partition_key() == source.partition_key()
        assert message.ordering_key() == source.ordering_key()
        assert message.event_timestamp() == source.event_timestamp()
        assert message.properties() == envelope.for_replay(
            source.properties(), replay=message.properties()[REPLAY]
        )


def test_a_long_run_reports_on_its_way_and_takes_every_partition(
    set_stage: SetStage, make_job: MakeJob, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "SLICE_ENTRIES", 4)
    stage = set_stage(dead_partitions=2)
    stage.bury(18)
    job, progress = make_job(stage)
    reports: list[int] = []
    report = progress.report

    def note_and_report(numbers: Numbers) -> None:
        reports.append(numbers.replayed)
        report(numbers)

    monkeypatch.setattr(progress, "report", note_and_report)

    jobs.run(job, spark, progress)

    assert reports == sorted(set(reports))
    assert len(reports) >= 3
    assert reports[-1] == progress.read().replayed == len(stage.replayed()) == 18
    assert stage.resting() == []


def test_a_run_goes_on_to_the_end_it_had_fixed_when_it_first_began(
    set_stage: SetStage, make_job: MakeJob, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = set_stage(partitions=2)
    stage.bury(5)
    job, progress = make_job(stage)
    with monkeypatch.context() as patch:
        patch.setattr(query, "move", _fails)
        with pytest.raises(RuntimeError, match="killed"):
            jobs.run(job, spark, progress)
    begun = progress.read()
    assert (begun.matched, begun.replayed) == (5, 0)
    stage.bury(4)

    jobs.run(job, spark, progress)

    assert len(stage.replayed()) == 5
    assert len(stage.resting()) == 4
    assert progress.read().snapshot == begun.snapshot


def _fails(*_: object) -> None:
    msg = "killed before the first message was sent"
    raise RuntimeError(msg)


def test_two_runs_over_one_dead_letter_topic_never_overlap(
    set_stage: SetStage, make_job: MakeJob, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "FENCE_SECONDS", 1.0)
    stage = set_stage()
    stage.bury(2)
    job, progress = make_job(stage)
    with connect(stage.broker.service_url) as other:
        name = f"redrive-replay-of-{stage.policy.dead_letter_topic}"
        open_producer(other, stage.policy.retry_topic, name)
        with pytest.raises(AlreadyRunningError, match="another process holds the producer"):
            jobs.run(job, spark, progress)
    assert len(stage.resting()) == 2


def test_an_empty_topic_is_replayed_at_once(
    set_stage: SetStage, make_job: MakeJob, spark: SparkSession
) -> None:
    stage = set_stage()
    job, progress = make_job(stage)
    jobs.run(job, spark, progress)
    status = progress.read()
    assert (status.matched, status.replayed, status.skipped) == (0, 0, 0)
    assert [end.end for end in status.snapshot.partitions] == ["-1:-1"]
