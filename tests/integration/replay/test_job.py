"""A whole run: real broker, real Spark, real status, with the replay role's own rights."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from pyspark.sql import SparkSession

from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.context import wall_clock
from redrive.policy import envelope
from redrive.policy.envelope import CAUSE_TYPE, REPLAY, REPLAY_PROOF, REPLAY_SOURCE, REPLAYS
from redrive.policy.naming import TopicName
from redrive.replay import spark as replay_spark
from redrive.replay.__main__ import main
from redrive.replay.account import Account
from redrive.replay.job import dispatch, run
from redrive.replay.job import run as jobs
from redrive.replay.job.plan import DesiredState, Pause, ReplayGoneError, Scanned
from redrive.replay.job.progress import Progress
from redrive.replay.ledger import mounted_key
from redrive.replay.spark import Spark
from redrive.replay.spec import Choice, ReplayJob, RunJob
from sandbox.kubernetes import Cluster
from tests.support.documented import REPLAYS_PAGE, block
from tests.support.engines import Local
from tests.support.local_runs import wait_until_moved
from tests.support.reasons import raises
from tests.support.waiting import wait_until

ProvisionPolicy = Callable[..., Any]
MakeJob = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("pulsar_namespace")


def test_selective_run_leaves_the_rest_to_the_next_run(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    spark: SparkSession,
) -> None:
    provisioned = provision_policy(partitions=3)
    event_time = int(datetime(2026, 11, 20, 9, tzinfo=UTC).timestamp() * 1_000)
    provisioned.bury(15, "TimeoutError", partition_key="k", event_timestamp=event_time)
    provisioned.bury(7, "ValueError", content=None, ordering_key="o")
    provisioned.bury(3, "TimeoutError")
    before = {m.properties()["id"]: m for m in provisioned.unacknowledged()}

    job, progress = make_job(
        provisioned, "cause_type = 'TimeoutError' and event_time >= '2026-11-20 09:00:00'"
    )
    job = dataclasses.replace(job, batch=True)
    jobs.run(job, Spark(spark, job), progress)

    moved = provisioned.replayed()
    assert len(moved) == 15
    assert {m.properties()[CAUSE_TYPE] for m in moved} == {"TimeoutError"}
    assert len(provisioned.unacknowledged()) == 10
    counts = progress.read().counts
    assert (counts.scanned, counts.matched, counts.moved, counts.left) == (25, 15, 15, 0)

    job, progress = make_job(provisioned)
    job = dataclasses.replace(job, batch=True)
    jobs.run(job, Spark(spark, job), progress)

    moved += provisioned.replayed()
    assert provisioned.unacknowledged() == []
    assert provisioned.ids(moved) == sorted(before)
    for message in moved:
        source = before[message.properties()["id"]]
        assert message.data() == source.data()
        assert message.has_null_value() == source.has_null_value()
        assert message.partition_key() == source.partition_key()
        assert message.ordering_key() == source.ordering_key()
        assert message.event_timestamp() == source.event_timestamp()
        carried = message.properties()
        proof, target = carried.pop(REPLAY_PROOF), provisioned.policy.retry_topic
        assert mounted_key().proves(proof, carried[REPLAY_SOURCE], target)
        assert carried == envelope.for_replay(
            source.properties(), replay=carried[REPLAY], source=carried[REPLAY_SOURCE]
        )


def test_messages_replayed_too_often_are_parked(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    spec = yaml.safe_load(block(REPLAYS_PAGE, "Parking", "yaml"))
    provisioned = provision_policy(partitions=2)
    parked = provisioned.policy.topic.sibling(TopicName.parse(spec["target"]["topic"]).local)
    provisioned.create(parked, "people", partitions=2)
    provisioned.deduplicate(parked)
    provisioned.grant(parked, "produce", "consume")
    for replays in range(5):
        provisioned.bury(2, replays=replays)
    often = provisioned.ids(
        message for message in provisioned.unacknowledged()
        if int(message.properties().get(REPLAYS, "0")) >= 3
    )  # fmt: skip
    job, progress = make_job(provisioned, spec["select"]["where"])
    job = dataclasses.replace(job, target=parked)

    account = jobs.run(job, Spark(spark, job), progress)

    assert (account.matched, account.moved, account.left) == (4, 4, 0)
    assert provisioned.in_target(parked) == often
    assert provisioned.in_target() == []
    assert len(provisioned.unacknowledged()) == 6
    provisioned.check_audit(parked)


@pytest.mark.parametrize("where", [None, "size > 0"])
def test_causes_and_fingerprints_select_in_spark(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession, where: str | None
) -> None:
    provisioned = provision_policy(partitions=2)
    zeros, ones = "0" * 16, "1" * 16
    provisioned.bury(2, "WarehouseDown", fingerprint=zeros)
    selected = provisioned.ids(provisioned.unacknowledged())
    provisioned.bury(2, "WarehouseDown", fingerprint=ones)
    provisioned.bury(2, "WarehouseDown")
    provisioned.bury(2, "TimeoutError", fingerprint=zeros)
    job, progress = make_job(provisioned, where)
    choice = Choice(causes=("WarehouseDown",), fingerprints=(zeros,))
    job = dataclasses.replace(job, choice=choice)

    account = jobs.run(job, Spark(spark, job), progress)

    assert (account.scanned, account.matched, account.moved) == (8, 2, 2)
    assert provisioned.in_target() == selected
    provisioned.check_audit()


def test_rate_limit_changes_while_a_run_moves(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_api: Cluster,
    replay_token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert replay_token
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.2)
    count = 300
    provisioned = provision_policy()
    provisioned.bury_many(count)
    job, progress = make_job(provisioned, rateLimit={"messages": 1})
    job = dataclasses.replace(job, rate_limit=1.0)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(jobs.run, job, Local(), progress)
        wait_until_moved(provisioned, 1)
        replay_api.kubectl(
            "--namespace", job.namespace, "patch", resources.REPLAYS.plural, job.name,
            "--type=merge", "--patch", json.dumps({"spec": {"rateLimit": {"messages": 1_000}}}),
        )  # fmt: skip
        assert run.result(count // 3).moved == count


def test_run_takes_every_range_and_reports_progress(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.0)
    count = 4_000
    provisioned = provision_policy(dead_partitions=2)
    provisioned.bury_many(count)
    job, progress = make_job(provisioned, "size > 0")
    moved: list[int] = []
    scans: list[int] = []
    report: Callable[..., DesiredState] = progress.report

    def note_and_report(account: Account, *, pause: Pause | None = None) -> DesiredState:
        assert account.matched == account.moved + account.left == count
        moved.append(account.moved)
        return report(account, pause=pause)

    def note_scan(scanned: Scanned) -> None:
        assert not moved
        scans.append(scanned.messages)

    def limit_until_reported(_: RunJob) -> float | None:
        # Stored messages are acknowledged every second: a faster run may show no progress between.
        return 250 if len(set(moved)) < 4 else None

    monkeypatch.setattr(progress, "report", note_and_report)
    monkeypatch.setattr(progress, "report_scan", note_scan)
    monkeypatch.setattr(progress, "rate_limit", limit_until_reported)
    monkeypatch.setattr(run, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(run, "POLL_SECONDS", 0.01)

    engine = Spark(spark, job)
    jobs.run(job, engine, progress)

    assert scans == sorted(scans)
    assert engine.scanned.messages == count >= scans[-1]
    assert moved == sorted(moved)
    assert len(set(moved)) > 3
    assert progress.read().counts.moved == moved[-1] == count
    assert provisioned.in_target() == [f"{number:07}" for number in range(count)]
    assert provisioned.backlog_of_dead_letters() == 0


def test_canceled_scan_ends_its_spark_job(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    job, _ = make_job(provision_policy())
    engine = Spark(spark, job)
    error = RedriveError("the run has ended", remedy="none", reason="Canceled")
    sleepers = spark.sparkContext.parallelize([90.0], 1).map(time.sleep)
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        collected = threads.submit(sleepers.collect)
        while not collected.done():
            engine.cancel(error)
            time.sleep(0.1)
        assert "cancel" in str(collected.exception())
    assert time.monotonic() - begun < 60


def test_resumed_run_keeps_the_end_fixed_at_its_start(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert replay_token
    provisioned = provision_policy(partitions=2)
    provisioned.bury(5)
    job, progress = make_job(provisioned)
    with monkeypatch.context() as patch:
        patch.setattr(Local, "move", _fails)
        with pytest.raises(RuntimeError, match="killed"):
            jobs.run(job, Local(), progress)
    begun = progress.read().counts
    assert (begun.matched, begun.moved, begun.left) == (5, 0, 5)
    provisioned.bury(4)

    jobs.run(job, Local(), progress)

    assert len(provisioned.replayed()) == 5
    assert len(provisioned.unacknowledged()) == 4
    assert progress.read().counts.matched == 5


def _fails(*_: object) -> None:
    msg = "killed before the first message was sent"
    raise RuntimeError(msg)


def test_failed_job_writes_the_refusal_into_the_status(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_api: Cluster,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provisioned = provision_policy(deduplicate=False)
    provisioned.bury(2)
    job, progress = make_job(provisioned)
    monkeypatch.setattr(
        replay_spark, "spark_session", lambda _job: nullcontext(spark)
    )  # which other tests use later
    with raises("DeduplicationOff", match="deduplication is off") as refused:
        main([job.encode()])
    status = progress.read()
    assert status.failure.reason == "DeduplicationOff"
    assert status.failure.message == str(refused.value)
    assert not status.finished

    def begin_and_lose_the_replay(_job: ReplayJob) -> Any:  # noqa: ANN401
        replay_api.kubectl(
            "--namespace", job.namespace, "delete", resources.REPLAYS.plural, job.name
        )
        raise RuntimeError("Spark does not start")

    # A failed write of the status hides no error: the log has it, and the exit code.
    monkeypatch.setattr(replay_spark, "spark_session", begin_and_lose_the_replay)
    with pytest.raises(RuntimeError, match="Spark does not start"):
        main([job.encode()])


def test_an_empty_topic_is_replayed_at_once(
    provision_policy: ProvisionPolicy, make_job: MakeJob, spark: SparkSession
) -> None:
    provisioned = provision_policy()
    job, progress = make_job(provisioned)
    jobs.run(job, Spark(spark, job), progress)
    progress.finish()
    status = progress.read()
    assert (status.counts.matched, status.counts.moved, status.counts.left) == (0, 0, 0)
    assert status.finished


def test_lost_plan_is_not_made_again(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan of now would take dead letters that came later, such as those that died again."""
    assert replay_token
    monkeypatch.setattr(replay_spark, "spark_session", nullcontext)
    monkeypatch.setattr(replay_spark, "Spark", lambda *_: Local())
    provisioned = provision_policy()
    provisioned.bury(2)
    job, progress = make_job(provisioned)
    jobs.run(job, Local(), progress)
    provisioned.make_again(provisioned.policy.ledger_topic)
    provisioned.bury(2)

    with raises("LedgerLost", match="create another Replay"):
        main([job.encode()])

    assert progress.read().failure.reason == "LedgerLost"
    again = Progress(job)
    again.begin()
    again.finish()
    main([job.encode()])  # it is done, whatever the ledger says
    assert len(provisioned.unacknowledged()) == 2


def test_job_of_a_deleted_replay_moves_nothing_and_succeeds(
    provision_policy: ProvisionPolicy, make_job: MakeJob, replay_api: Cluster, replay_token: str
) -> None:
    assert replay_token
    provisioned = provision_policy()
    provisioned.bury(5)
    job, progress = make_job(provisioned)
    replay_api.kubectl("--namespace", job.namespace, "delete", resources.REPLAYS.plural, job.name)
    with pytest.raises(ReplayGoneError):
        jobs.run(job, Local(), progress)
    main([job.encode()])  # a Spark operator starts a failed job again
    assert provisioned.in_target() == []


def test_run_above_its_bound_waits_for_approval(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_api: Cluster,
    replay_token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert replay_token
    monkeypatch.setattr(dispatch, "REPORT_SECONDS", 0.2)
    provisioned = provision_policy()
    provisioned.bury(5)
    job, _ = make_job(provisioned)
    job = dataclasses.replace(job, approval_above=4)
    with monkeypatch.context() as patch:
        patch.setenv("KUBECONFIG", "/nowhere")  # an unknown approval counts as none
        assert Progress(job).report(Account(left=5)) is DesiredState.SUSPEND
    assert Progress(job).report(Account(left=4)) is DesiredState.RUN
    progress = Progress(job)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(jobs.run, job, Local(), progress)
        wait_until(lambda: run.done() or progress.read().awaits_approval)
        assert not run.done()
        assert provisioned.in_target() == []
        replay_api.objects.put(
            {
                "apiVersion": resources.APPROVALS.api_version,
                "kind": resources.APPROVALS.kind,
                "metadata": {"name": job.name},
                "spec": {"replayRef": {"name": job.name, "uid": job.uid}, "messages": 5},
            },
            job.namespace,
        )
        assert run.result(180).moved == 5
    assert not progress.read().awaits_approval


def test_run_past_its_deadline_fails_and_does_not_restart(
    provision_policy: ProvisionPolicy,
    make_job: MakeJob,
    replay_api: Cluster,
    replay_token: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of the driver is two hours ahead: that of the API server counts."""
    ahead = "redrive.replay.job.progress.wall_clock"
    monkeypatch.setattr(ahead, lambda: wall_clock() + timedelta(hours=2))
    assert replay_token
    provisioned = provision_policy()
    provisioned.bury(5)
    job, progress = make_job(provisioned, deadline="1h")

    def patch(**status: str) -> None:
        replay_api.kubectl(
            "--namespace", job.namespace, "patch", resources.REPLAYS.plural, job.name,
            "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}),
        )  # fmt: skip

    patch(startTime=(wall_clock() - timedelta(minutes=59)).isoformat())
    assert progress.report(Account()) is DesiredState.RUN
    patch(startTime=(wall_clock() - timedelta(minutes=61)).isoformat())
    with raises("DeadlineExceeded", match="got 5; create another Replay with a longer one"):
        jobs.run(job, Local(), progress)
    patch(phase="Failed")
    main([job.encode()])
    assert provisioned.in_target() == []
    assert len(provisioned.unacknowledged()) == 5
