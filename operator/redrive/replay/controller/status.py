"""Status of a Replay, from its application and the report of its job. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from redrive.api import Body
from redrive.api.conditions import (
    Condition,
    StatusWarning,
    failed,
    progressing,
    ready,
    waiting,
    with_condition,
    written,
)
from redrive.api.replay import Mode, ReplayEngine
from redrive.api.replay_status import (
    FINAL,
    JobFailure,
    Phase,
    ReplayRun,
    ReplayStatus,
    RunReview,
)
from redrive.errors import NOTHING, RedriveError, Requeue
from redrive.kube import resources
from redrive.policy.values import parse_duration
from redrive.reasons import Reason, requeue_of
from redrive.replay.controller.admission import is_dry_run
from redrive.replay.controller.spark_operators import SparkRun, launched_at, was_launched

_START_TIME = timedelta(minutes=1)
_GRACE = timedelta(minutes=2)
"""Time for a job to settle in-flight messages after its deadline, before its Replay fails."""

ShownStatus = tuple[tuple[Condition, ...], dict[str, Any]]
"""Conditions, and the fields of the status beside them."""


def ended_unfinished(
    reason: Reason, run: SparkRun, failure: JobFailure | None, remedy: str
) -> RedriveError:
    """Return the error of a run, of a Replay or an Inspection, that did not report its end.

    Args:
        reason: of the error.
        run: state of the application, which has ended.
        failure: the last one that its job has reported, if any.
        remedy: of the error.
    """
    end = "exited before it finished the run" if run.phase is Phase.COMPLETED else "failed"
    return reason.error(
        f"the {run.kind} {run.key.name} has {end}",
        got=f"{failure.reason}: {failure.message}" if failure else run.error or NOTHING,
        remedy=remedy,
    )


def mirror(
    replay: Body, reported: ReplayStatus, run: SparkRun | None, *, is_late: bool
) -> ShownStatus:
    """Return the status that follows from the state of the application.

    Args:
        replay: the Replay.
        reported: report of the job. If an application ends and its job has not reported the run as
            finished, the run was interrupted.
        run: state of the application; None if the application was deleted after the job reported
            the run as finished.
        is_late: True if the deadline, or the end of the review, passed more than `_GRACE` ago.

    Raises:
        ReplayFailed: the application ended before its run.
    """
    if run is None:
        return _completed(replay, reported)
    name, is_review = run.key.name, reported.run.review is not None
    if run.phase in FINAL and not reported.run.finished:
        remedy = "fix the cause and create another Replay, which moves the messages that are left"
        raise ended_unfinished(Reason.REPLAY_FAILED, run, reported.run.failure, remedy)
    is_job = run.kind == resources.JOBS.kind
    engine = ReplayEngine.JOB if is_job else ReplayEngine.SPARK
    fields: dict[str, Any] = {"phase": run.phase.value, "engine": engine.value}
    fields["job" if is_job else "sparkApplication"] = name
    if (start := launched_at(replay)) is not None:
        fields["startTime"] = written(start)
    is_over = reported.run.finished and (run.phase in FINAL or is_late or is_review)
    if is_over or (is_late and is_review):
        conditions, completed = _completed(replay, reported)
        return conditions, fields | completed
    shown = _running(replay, reported.run) if run.phase is Phase.RUNNING else None
    if shown is None:
        message = f"the {run.kind} {name} is {run.state or 'NEW'}"
        return progressing(f"{message}: {run.error}" if run.error else message), fields
    return shown[0], fields | shown[1]


def _running(replay: Body, reported: ReplayRun) -> ShownStatus | None:
    """Return the status of a running job; None if it plans or moves messages."""
    suspended = {"phase": Phase.SUSPENDED.value}
    if reported.finished:
        return progressing("all messages are moved; tracking their outcome"), {}
    if is_dry_run(replay) and reported.review is not None:
        return _in_review(reported, reported.review), suspended
    if (awaited := _awaited(reported)) is not None:
        return waiting(awaited), {}
    return (_suspended(reported), suspended) if reported.suspended else None


def _awaited(reported: ReplayRun) -> RedriveError | None:
    """Return the problem of the target that the run waits for; None if it does not wait."""
    if topic := reported.unsubscribed_topic:
        return Reason.SUBSCRIPTION_AWAITED.error(
            f"{topic}, or one of its partitions, lacks the durable subscription that has to keep "
            "messages, and nothing is moved there; in the source topic and the retry topic that is "
            "the policy's",
            remedy="create it (`pulsar-admin topics create-subscription --subscription NAME "
            f"{topic}`); then the run resumes",
        )
    if topic := reported.full_topic:
        return Reason.TARGET_FULL.error(
            f"{topic} is over its backlog quota, and takes no more messages",
            remedy="have its consumers catch up, or raise the quota; then the run resumes",
        )
    return None


def _in_review(reported: ReplayRun, review: RunReview) -> tuple[Condition, ...]:
    error = Reason.IN_REVIEW.error(
        f"the plan has {reported.counts.left} dead letters to move, and waits for a confirmation; "
        f"the Replay ends at {written(review.expiry_time)}",
        remedy="set spec.mode to Run to move them, or spec.cancel to true",
    )
    return with_condition(waiting(error), error.reason)


def _suspended(reported: ReplayRun) -> tuple[Condition, ...]:
    error: RedriveError = Reason.SUSPENDED.error(
        "the run is suspended: nothing is sent", remedy="set spec.suspend to false to resume it"
    )
    if reported.approval is not None and reported.awaits_approval:
        error = Reason.APPROVAL_REQUIRED.error(
            "the run would move more messages than it may without approval",
            got=reported.approval.messages,
            remedy="create a ReplayApproval with the name and the uid of this Replay and that "
            "number of messages, or cancel the Replay; a plan shows more of the selection",
        )
    return with_condition(waiting(error), error.reason)


def _completed(replay: Body, reported: ReplayStatus) -> ShownStatus:
    """Return the final status of a run that has settled all selected messages.

    A run fails if it refused all of them. A plan moves nothing and does not fail by refusals.
    """
    account, counts = _outcome(replay, reported.run), reported.run.counts
    fields = {"phase": Phase.COMPLETED.value}
    if reported.run.review is not None and counts.left:
        expired = f"the review was not confirmed in time: {account}"
        return ready(Reason.REVIEW_EXPIRED, expired), fields
    if is_plan(replay, reported.run) or not counts.refused:
        return ready(Reason.COMPLETED, account), fields
    if counts.moved or counts.skipped or counts.discarded:
        refused = StatusWarning(
            Reason.MESSAGES_REFUSED,
            f"{counts.refused} dead letters were refused and stay in the dead-letter topic; "
            "status.run.refusals has the cause of the first 100",
        )
        return ready(Reason.COMPLETED_WITH_REFUSALS, account, [refused]), fields
    error = Reason.ALL_REFUSED.error(
        f"{account}: nothing was moved",
        remedy="correct the causes in status.run.refusals, and create another Replay",
    )
    return failed(error), fields | {"phase": Phase.FAILED.value}


def _outcome(replay: Body, run: ReplayRun) -> str:
    """Return the account of the selected dead letters as a sentence."""
    counts, outcome = run.counts, run.outcome
    unevaluated = (
        f"; for {counts.unevaluated} others select.where can't be computed"
        if counts.unevaluated
        else ""
    )
    if replay["spec"].get("mode") == Mode.AUDIT and (audit := run.audit) is not None:
        return (
            f"an audit of {audit.messages} messages of targets: doubled {audit.doubled}, "
            f"unrecorded {audit.unrecorded}, missing {audit.missing}, returned {audit.returned}, "
            f"open ranges {audit.open}"
        )
    if is_plan(replay, run):
        moves = f"{counts.left} of {counts.scanned} dead letters would be moved"
        return f"a plan: {moves}, {counts.refused} can't be{unevaluated}"
    account = (
        f"of {counts.matched} dead letters {counts.moved} were moved, "
        f"{counts.skipped} needed no move, {counts.refused} can't be moved"
        + (f", {counts.discarded} were discarded" if counts.discarded else "")
        + unevaluated
        + (f"; {counts.batched} are of batches, which move as a whole" if counts.batched else "")
        + (f"; the target may contain {counts.doubled} twice" if counts.doubled else "")
    )
    if outcome is None:
        return account
    return (
        f"{account}; of those that were moved {outcome.handled} were handled, "
        f"{outcome.dead_again} are dead again, {outcome.waiting} wait"
    )


def is_plan(replay: Body, run: ReplayRun) -> bool:
    """Return True if the run has moved nothing: a plan, or a review that ended unconfirmed."""
    return is_dry_run(replay) or run.review is not None


def check_started(run: SparkRun, now: datetime) -> None:
    """Check that a controller runs the application, `_START_TIME` after it was created.

    Raises:
        ApplicationNotStarted: no controller does.
    """
    if run.state or now - run.created <= _START_TIME:
        return
    raise Reason.APPLICATION_NOT_STARTED.error(
        f"no {'controller' if run.kind == resources.JOBS.kind else 'Spark operator'} has begun to "
        f"run the {run.kind} {run.key.name} within "
        f"{_START_TIME.total_seconds():.0f} s",
        remedy=run.serving,
    )


_FINAL_REASONS = frozenset(
    {
        Reason.INVALID_SPEC,
        Reason.REPLAY_FAILED,
        Reason.DEADLINE_EXCEEDED,
        Reason.CANCELED,
        Reason.STARTED_TOO_LATE,
    }
)
"""Reasons that end a Replay: its spec cannot change, and its run is not started again."""


def explain(replay: Body, error: RedriveError) -> ShownStatus:
    """Return the status of a Replay that *error* stops: failed, stalled or waiting."""
    fields: dict[str, Any] = {}
    if error.reason in _FINAL_REASONS:
        fields = {"phase": Phase.FAILED.value}
    elif not was_launched(replay):
        fields = {"phase": Phase.PENDING.value}
    conditions = failed(error)
    if error.reason is Reason.SUSPENDED:
        conditions = with_condition(conditions, error.reason)
    return conditions, fields


def is_overdue(replay: Body, now: datetime) -> bool:
    """Return True if the deadline passed more than `_GRACE` ago.

    A job ends at its deadline, unless it does not run or hangs.
    """
    deadline, launch_time = replay["spec"].get("deadline"), launched_at(replay)
    if deadline is None or launch_time is None:
        return False
    return now - launch_time >= parse_duration(deadline) + _GRACE


def is_review_overdue(replay: Body, status: ReplayStatus, now: datetime) -> bool:
    """Return True if the review expired at least `_GRACE` ago, so its job does not run."""
    review = status.run.review
    return is_dry_run(replay) and review is not None and now - review.expiry_time >= _GRACE


def next_requeue(replay: Body, phase: str, *, is_idle: bool = False) -> Requeue:
    """Return the requeue time of a launched Replay, for its deadline or its deletion.

    Args:
        replay: the Replay.
        phase: its phase.
        is_idle: True if its pods have to be polled, because their state is not watched.
    """
    if phase == Phase.SUBMITTED:
        return Requeue.BACKOFF  # without a controller, the state of an application never changes
    timed = "ttlAfterFinished" if phase in FINAL else "deadline"
    ends_in_time = timed in replay["spec"] or (phase not in FINAL and is_dry_run(replay))
    return Requeue.SLOW_BACKOFF if is_idle or ends_in_time else Requeue.ON_CHANGE


def requeue_after_error(error: RedriveError, replay: Body, *, runs: bool) -> Requeue:
    """Return the requeue time of a Replay that *error* stops; *runs* if it has an application."""
    requeue = requeue_of(error)
    if requeue is Requeue.BACKOFF and is_dry_run(replay) and not runs:
        return Requeue.SLOW_BACKOFF  # any number of plans may wait for one cause
    if requeue is not Requeue.ON_CHANGE or error.reason in _FINAL_REASONS:
        return requeue
    if not was_launched(replay):
        return Requeue.SLOW_BACKOFF if "startBefore" in replay["spec"] else Requeue.ON_CHANGE
    return next_requeue(replay, Phase.RUNNING)  # the deadline applies even if no job runs
