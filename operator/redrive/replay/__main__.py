"""Program of a replay job: `python -m redrive.replay JOB` in a Job, or by spark-submit.

Its argument is the output of `ReplayJob.encode`. A failed run writes the cause into the status of
the Replay, and as the last line of its log, because controllers only report an exit code. It
succeeds if the Replay was deleted or canceled, or has reached its deadline, because controllers
restart failed jobs.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from redrive.api.replay_status import MAX_AUDITED, AuditResult, ReplayRun
from redrive.auth.files import job_credentials
from redrive.errors import RedriveError
from redrive.kube import logs
from redrive.kube.client import NotFoundError, UnavailableError
from redrive.reading.positions import EntryId
from redrive.reading.queues import QueueCluster
from redrive.replay import audit
from redrive.replay.job import outcomes, queues
from redrive.replay.job.children import Children
from redrive.replay.job.plan import Engine, ReplayGoneError, RunEndedError
from redrive.replay.job.progress import Progress
from redrive.replay.job.queue_plan import QueueScan
from redrive.replay.job.run import Review, plan_review, preview, run
from redrive.replay.ledger import mounted_key
from redrive.replay.spec import QueueReplayJob, ReplayJob, RunJob, decode_job
from redrive.replay.transport import Pace, pause_after_read

REVIEW_SECONDS = 1.0
"""Interval of polls of a Replay in review."""
AUDIT_SECONDS = 5.0
"""Interval of the reports of an audit."""

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Run one replay."""
    logs.to_stderr("text")
    job = decode_job(arguments[0] if len(arguments) == 1 else "")
    try:
        _run(job, Progress(job))
    except (ReplayGoneError, NotFoundError, RunEndedError) as error:
        logger.info("the run ends: %s", error)


def _run(job: RunJob, progress: Progress) -> None:
    before = progress.begin()  # raises if the Replay was deleted, created again, or has ended
    _RUNS[type(job)](job, progress, before)


def _run_topic(job: ReplayJob, progress: Progress, before: ReplayRun) -> None:
    move = partial(_move, job, progress, before)
    has_moved = before.review is None if before.finished else _settled(progress, move)
    if has_moved and job.follow_for is not None:  # Spark, with its executors, has ended
        outcomes.follow(job, progress)


def _run_queues(job: QueueReplayJob, progress: Progress, before: ReplayRun) -> None:
    if not before.finished:
        _settled(progress, partial(_move_queues, job, progress, before))


_RUNS: Mapping[type[RunJob], Callable[[Any, Progress, ReplayRun], None]] = {
    ReplayJob: _run_topic,
    QueueReplayJob: _run_queues,
}


def _move_queues(job: QueueReplayJob, progress: Progress, before: ReplayRun) -> bool:
    engine = partial(_queue_scan, job) if job.pod is None or job.where is not None else None
    with QueueCluster(job.source, job_credentials()) as cluster:
        queue_run = queues.QueueRun(job, cluster, progress, mounted_key(), before, engine)
        return queue_run.run(partial(_is_confirmed, progress))


@contextmanager
def _queue_scan(job: QueueReplayJob) -> Iterator[QueueScan]:
    from redrive.replay import spark as replay_spark  # noqa: PLC0415  takes a second

    with replay_spark.spark_session(job) as spark:
        yield partial(replay_spark.scan_queues, spark, job)


def _settled(progress: Progress, move: Callable[[], bool]) -> bool:
    """Run a job, and report its end; return False if its review ended unconfirmed."""
    try:
        if not move():
            return False
    except (ReplayGoneError, NotFoundError):
        raise
    except Exception as error:
        try:
            progress.fail(error)
        except RedriveError:
            logger.exception("cause of the failure could not be written into the status")
        raise
    progress.finish()
    return True


@contextmanager
def _engine(job: ReplayJob) -> Iterator[Engine]:
    """Open the engine of a job. Only SQL conditions and executors need a JVM."""
    if job.pod is not None and job.where is None:
        with Children(job.pod) as children:
            yield children
        return
    from redrive.replay import spark as replay_spark  # noqa: PLC0415  takes a second

    with replay_spark.spark_session(job) as spark:
        yield replay_spark.Spark(spark, job)


def _move(job: ReplayJob, progress: Progress, before: ReplayRun) -> bool:
    """Run the job, and return False if its review ended unconfirmed."""
    if job.audited:
        _audit(job, progress)
        return True
    with _engine(job) as engine:
        if job.dry_run:
            progress.preview(preview(job, engine, progress))
            return True
        review = _shown(before)
        if progress.awaits_admission:
            plan, review = plan_review(job, engine, progress, review)
            progress.show_review(plan, review)
            if not _is_confirmed(progress):
                return False
        was_planned = review is None and before.counts.matched is not None
        run(job, engine, progress, was_planned=was_planned, review=review)
    return True


def _audit(job: ReplayJob, progress: Progress) -> None:
    """Compare the topics, and write the differences into the status.

    Raises:
        ReplayGoneError, RunEndedError: the Replay was deleted or canceled, or its deadline is over.
    """
    messages, due = 0, time.monotonic() + AUDIT_SECONDS
    pace, topics = Pace(), tuple(map(str, job.audited[:MAX_AUDITED]))

    def report() -> None:
        nonlocal messages, due
        messages += 1
        pause_after_read(pace, job.rate_limit)
        if time.monotonic() < due:
            return
        try:
            progress.report_audit(AuditResult(topics=topics, messages=messages))
        except UnavailableError as error:
            logger.warning("status update failed, the audit continues: %s", error)
        due = time.monotonic() + AUDIT_SECONDS

    urls, policy = (job.service_url, job.admin_url), job.policy
    dead_letters = policy.dead_letter_topic, policy.dead_letter_subscription
    findings = audit.audit(urls, *dead_letters, *job.audited, on_read=report)
    progress.show_audit(findings.result(topics, messages))


def _shown(before: ReplayRun) -> Review | None:
    """Return the review that an earlier run of the Replay has shown, without its plan."""
    if before.review is None:
        return None
    return Review({end.partition: EntryId.parse(end.entry) for end in before.review.ends})


def _is_confirmed(progress: Progress) -> bool:
    """Wait until the review is confirmed and the run admitted; return False if it has ended.

    The wait continues while the API server does not answer.
    """
    while True:
        try:
            is_confirmed = progress.is_confirmed()
        except UnavailableError as error:
            logger.warning("state of the review could not be read, retrying: %s", error)
            is_confirmed = None
        if is_confirmed is not None:
            return is_confirmed
        time.sleep(REVIEW_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
