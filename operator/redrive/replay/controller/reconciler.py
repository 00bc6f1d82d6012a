"""Reconciliation of a Replay: the spine.

One Replay: launch its Job or SparkApplication when its turn has come, then mirror how that stands.

Called by the `Controller` of Replays, for each change of the Replay, its policy, its connection,
its application or another Replay of the same policy.

What has an end: a run that takes too long, and a Replay that ended long enough ago.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from redrive.api import Body
from redrive.api.conditions import (
    Condition,
    ObjectEvent,
    StatusWarning,
    ended,
    failed,
    moment_of,
    progressing,
    ready,
    waiting,
    warning,
    with_condition,
    written,
)
from redrive.api.replay import (
    ADMITTED,
    FINAL,
    WHILE_RUNNING,
    Mode,
    Phase,
    ReplayEngine,
    ReplayRun,
    ReplayStatus,
    RunReview,
    is_admitted,
)
from redrive.api.retrypolicy import MAX_RESULTS, MAX_SHOWN_REASON, ReplayResult
from redrive.errors import RedriveError, Requeue
from redrive.kube import logs, resources
from redrive.kube.client import ConflictError, KubernetesError, NotFoundError
from redrive.kube.connections import key_of, shown_to
from redrive.kube.context import Context
from redrive.kube.resources import REQUESTED_BY, Key
from redrive.kube.status import Publisher, has_finalizer
from redrive.policy.values import parse_duration
from redrive.reasons import Reason
from redrive.replay.controller import keys, launch, metrics, rights
from redrive.replay.controller.admission import (
    ENDED_AT,
    admit,
    checked_spec,
    is_dry_run,
    is_final,
    policy_of,
    template_of,
)
from redrive.replay.controller.launch import JobApplication, pod_access
from redrive.replay.controller.prerequisites import (
    check_pods,
    check_prerequisites,
    is_idle,
    prepare_target,
    read_image,
)
from redrive.replay.controller.spark_operators import (
    APPLICATION,
    JOB,
    LAUNCHED_AT,
    Launcher,
    SparkRun,
    choose_operator,
    find_application,
    launched_at,
    was_launched,
)

logger = logging.getLogger(__name__)
audit_log = logging.getLogger("redrive.audit")
"""One line for each Replay that has ended."""

_LITERAL = re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*\"""", re.DOTALL)
"""A text in Spark's SQL, in quotes of either kind."""
_START_TIME = timedelta(minutes=1)

_ANOTHER = "fix that and make another Replay: it goes on from what was moved"

_Shown = tuple[tuple[Condition, ...], dict[str, Any]]
"""Conditions, and the fields of the status beside them."""


class _ReplacedError(Exception):
    """The Replay was deleted; another one may have been created under its name."""


async def reconcile(key: Key, ctx: Context, launching: asyncio.Lock) -> Requeue:
    """Bring one Replay forward; its status and Events are written last. A final phase stays.

    The status is written only if it is as it was read: a job that resumes late, or a former leader
    of the operators, does not undo an end, and an end does not hide what the job has reported.

    Args:
        launching: held while one of its policy is launched: whose turn it is must not change
            meanwhile.
    """
    replay = ctx.replays.get(key)
    if replay is None:
        return Requeue.ON_CHANGE
    logs.identify(replay)
    if "deletionTimestamp" in replay["metadata"]:
        return await rights.release_deleted(replay, ctx)
    if is_final(replay):
        return await _end(replay, ctx)
    try:
        return await _go_on(replay, ctx, launching)
    except _ReplacedError:
        return Requeue.ON_CHANGE


async def _end(replay: Body, ctx: Context) -> Requeue:
    """Take back the rights of a Replay that has ended, and delete it when its time is over.

    Raises:
        KubernetesError: as for `delete_if_over`, or its status could not be written.
    """
    await _show_end(replay, ctx)
    try:
        await rights.release(replay, ctx)
    except RedriveError as error:
        logger.warning("the rights of a Replay are not taken back yet: %s", error)
        return Requeue.SLOW_BACKOFF
    return await delete_if_over(ctx.replays.get(Key.of(replay)) or replay, ctx)


async def _show_end(replay: Body, ctx: Context) -> None:
    """Write a final status where only the annotation tells of an end, as in a copy or a backup."""
    if ReplayStatus.of(replay).phase in FINAL:
        return
    error = Reason.ALREADY_ENDED.error(
        f"the Replay has the annotation {ENDED_AT} of an ended one, so it is not launched",
        remedy="make another Replay without that annotation if messages are to be moved",
    )
    end = moment_of(replay["metadata"]["annotations"][ENDED_AT]) or ctx.clock()
    fields = {"phase": Phase.FAILED.value, "completionTime": written(end)}
    version = replay["metadata"]["resourceVersion"]
    await _publisher(ctx).publish(replay, ended(failed(error)), fields, version)


async def _go_on(replay: Body, ctx: Context, launching: asyncio.Lock) -> Requeue:
    now = ctx.clock()
    events: list[ObjectEvent] = []
    fields: dict[str, Any] = {}
    judged, reported = replay, ReplayStatus.of(replay)
    try:
        # Before: a broker that hangs must hold no other up. A finished run is not launched again.
        is_prepared = not _has_finished(replay, reported)
        notices = await _prepare(replay, reported, ctx) if is_prepared else ()
        judged = _current(replay, ctx)
        async with launching:
            run = _run(replay, ctx)
            judged = await _reported(judged, run, ctx)
            reported = ReplayStatus.of(judged)
            phase = Phase.SUBMITTED if run is None else run.phase
            check_deadline(judged, reported, phase, now)
            check_canceled(replay, reported, phase)
            if run is not None:
                judged = await _mark_launched(judged, reported, run, ctx)
                _check_started(run, now)
                if run.phase not in FINAL:
                    judged = await _admit_confirmed(judged, reported, ctx)
            elif is_prepared and not _has_finished(judged, reported):
                run = await _launch(replay, reported, ctx)
                events += [_launched(replay, run), *notices]
                judged = await _mark_launched(judged, reported, run, ctx)
        is_late = is_overdue(judged, now) or is_review_overdue(judged, reported, now)
        conditions, fields = _mirror(judged, reported, run, is_late=is_late)
        if run is not None and fields["phase"] not in FINAL:
            await check_pods(run, reported, now, ctx)
        requeue = next_requeue(replay, fields["phase"], is_idle=is_idle(reported.run))
        if reported.run.unsubscribed_topic:
            requeue = Requeue.BACKOFF  # a topic that is made again has lost its rights
    except RedriveError as error:
        policy = ctx.policies.get(policy_of(replay))
        shown = error if policy is None else shown_to(policy, error)
        conditions, explained = _explain(judged, shown)
        fields = explained | fields  # which say how one is whose pods do not run
        requeue = requeue_after_error(error, judged)
    current = _current(replay, ctx)
    if fields.get("phase") not in FINAL:
        conditions = (*conditions, *_template_warnings(replay, conditions, ctx))
    if fields.get("phase") in FINAL:
        requeue = await _publish_end(judged, conditions, fields, ctx)
    else:
        fields["completionTime"] = None  # a job may have written one
        is_written = await _is_written(current, conditions, fields, ctx)
        requeue = requeue if is_written else Requeue.BACKOFF
    for event in events:
        await _publisher(ctx).emit(replay, event)
    return requeue


async def _prepare(replay: Body, reported: ReplayStatus, ctx: Context) -> tuple[ObjectEvent, ...]:
    """Check a Replay that was not launched, and prepare its target; return Events about that.

    Raises:
        RedriveError: it may not run, or not now.
    """
    check_start(replay, reported, ctx)
    if not was_launched(replay):
        await ctx.replays.derive_aside(checked_spec, replay)
    return tuple(await prepare_target(replay, ctx))


async def _publish_end(
    replay: Body, conditions: tuple[Condition, ...], fields: dict[str, Any], ctx: Context
) -> Requeue:
    """Write the final status of a Replay, and then the annotation after which it stays.

    Args:
        replay: as read with all that its job has reported.
        conditions: of the end, without `Complete` or `Failed`.
        fields: of the status, with the phase.
        ctx: what the watches have shown.

    Raises:
        KubernetesError: it could not be written; the next reconcile repeats it.
    """
    reported = ReplayStatus.of(replay)
    earlier = reported.completion_time if reported.phase in FINAL else None
    fields = {**fields, "completionTime": written(earlier or ctx.clock())}
    # A driver that was killed left them.
    if stale := WHILE_RUNNING & reported.run.to_manifest().keys():
        fields["run"] = dict.fromkeys(stale)
    try:
        if not await _is_written(replay, ended(conditions), fields, ctx):
            return Requeue.BACKOFF
        await _record_result(replay, conditions[0].reason, fields, ctx)
    except ConflictError:  # the policy was changed meanwhile
        return Requeue.BACKOFF
    after = await _annotate(replay, {ENDED_AT: written(ctx.clock())}, ctx)
    metrics.ended(replay, reported, Phase(fields["phase"]), ctx)
    audit_log.info("Replay ended: %s", _audit_record(replay, conditions[0].reason))
    if has_finalizer(after, rights.FINALIZER):
        return Requeue.BACKOFF
    return next_requeue(replay, fields["phase"])


async def _record_result(
    replay: Body, reason: str, fields: Mapping[str, Any], ctx: Context
) -> None:
    """Add an ended Replay to the results in the status of its policy, once; a plan is none.

    Raises:
        ConflictError: the policy was changed meanwhile.
        KubernetesError: the status could not be written.
    """
    policy = ctx.policies.get(policy_of(replay))
    if policy is None or is_dry_run(replay):
        return
    metadata, spec, counts = replay["metadata"], replay["spec"], ReplayStatus.of(replay).run.counts
    result = ReplayResult(
        name=metadata["name"],
        uid=metadata["uid"],
        author=(_author(replay) or "")[:MAX_SHOWN_REASON] or None,
        reason=spec["reason"][:MAX_SHOWN_REASON] if spec.get("reason") else None,
        ticket=spec.get("ticket"),
        phase=fields["phase"],
        result=reason,
        moved=counts.moved,
        refused=counts.refused,
        completion_time=fields["completionTime"],
    ).to_manifest()
    results = (policy.get("status") or {}).get("replays") or []
    if result in results:
        return
    others = [other for other in results if other["uid"] != metadata["uid"]]
    status = {"replays": [result, *others][:MAX_RESULTS]}
    version = policy["metadata"]["resourceVersion"]
    try:
        after = await ctx.kubernetes.patch_status(
            resources.POLICIES, Key.of(policy), status, version
        )
    except NotFoundError:  # it was deleted, and its results with it
        return
    ctx.policies.renew(after)


def _author(replay: Body) -> str | None:
    """Return the user who created *replay* with the command line; None without the annotation."""
    return (replay["metadata"].get("annotations") or {}).get(REQUESTED_BY)


def _audit_record(replay: Body, result: str) -> str:
    """Return who had which dead letters moved, why, and the result, as JSON.

    It contains no message key and no text literal of a condition, which may be personal data.
    """
    spec, counts = replay["spec"], ReplayStatus.of(replay).run.counts
    select = dict(spec.get("select") or {})
    if "keys" in select:
        select["keys"] = len(select["keys"])
    if "where" in select:
        select["where"] = _LITERAL.sub("'…'", select["where"])
    record = {
        "replay": str(Key.of(replay)),
        "policy": spec["policyRef"]["name"],
        "mode": spec.get("mode") or Mode.RUN.value,
        "requestedBy": _author(replay),
        "select": select,
        "target": spec.get("target"),
        "reason": spec.get("reason"),
        "ticket": spec.get("ticket"),
        "result": result,
        "moved": counts.moved,
        "refused": counts.refused,
    }
    return json.dumps(record, ensure_ascii=False)


def _template_warnings(
    replay: Body, conditions: tuple[Condition, ...], ctx: Context
) -> tuple[Condition, ...]:
    """Return the warning that the job template of a Replay is invalid, unless it waits for that."""
    name = template_of(replay, ctx)
    problem = None if name is None else ctx.job_templates.problem(name)
    if problem is None or conditions[0].reason == problem.reason:
        return ()
    return (warning(problem),)


def _has_finished(replay: Body, reported: ReplayStatus) -> bool:
    """Return True if a job of *replay* has reported that nothing is left."""
    return bool(was_launched(replay) and reported.run.finished)


async def _mark_launched(replay: Body, reported: ReplayStatus, run: SparkRun, ctx: Context) -> Body:
    """Annotate *replay* with its launch, unless it is; return the Replay as it is then.

    A run without a review was launched in its turn, and may move messages.
    """
    if launched_at(replay) is not None:
        return replay
    annotations = {APPLICATION: run.key.name, LAUNCHED_AT: written(ctx.clock())}
    if not _is_plan(replay, reported.run):
        annotations[ADMITTED] = replay["metadata"]["uid"]
    return await _annotate(replay, annotations, ctx)


async def _admit_confirmed(replay: Body, reported: ReplayStatus, ctx: Context) -> Body:
    """Annotate a confirmed review once it may move messages; return the Replay as it is then.

    Raises:
        RedriveError: it may not run now, such as while another Replay of its policy does.
    """
    run = reported.run
    if is_dry_run(replay) or is_admitted(replay) or run.review is None or run.finished:
        return replay
    admit(replay, ctx)
    return await _annotate(replay, {ADMITTED: replay["metadata"]["uid"]}, ctx)


async def _annotate(replay: Body, annotations: Mapping[str, str], ctx: Context) -> Body:
    """Write annotations of *replay*; return the Replay as it is then.

    Raises:
        KubernetesError: they could not be written; a ConflictError if another one has its name.
    """
    metadata = {"uid": replay["metadata"]["uid"], "annotations": annotations}
    after = await ctx.kubernetes.patch(resources.REPLAYS, Key.of(replay), {"metadata": metadata})
    ctx.replays.renew(after)
    return after


def _publisher(ctx: Context) -> Publisher:
    return Publisher(ctx.kubernetes, resources.REPLAYS, ctx.replays, ctx.clock)


async def _launch(replay: Body, reported: ReplayStatus, ctx: Context) -> SparkRun:
    """Create the Job or SparkApplication of *replay*, also after one was deleted.

    A second run is no harm: it goes on where the first one was.

    Raises:
        RedriveError: it may not run now, or the API server refuses.
    """
    if ctx.settings.replay_template is None:
        raise Reason.REPLAYS_DISABLED.error(
            "this operator runs no Replays: it has no image for their jobs",
            remedy="start it with --replay-template (replay.enabled in the Helm chart)",
        )
    check_start(replay, reported, ctx)
    admitted = admit(replay, ctx)
    launcher = JOB if admitted.template.engine is ReplayEngine.JOB else choose_operator(ctx)
    key = await keys.ledger_key(admitted, ctx.settings.replay_template, ctx)
    key_secret = keys.secret_of(replay, key)
    access = pod_access(admitted.identity, admitted.redirect_hosts, key_secret)
    image = await read_image(ctx.settings.replay_template, ctx)
    wanted = launch.application(
        replay, admitted.job, access, admitted.template, ctx.settings, image=image
    )
    connection = key_of(admitted.connection_ref, Key.of(replay).namespace)
    lent = launch.lent_objects(admitted.identity)
    await check_prerequisites(wanted, connection, lent, key_secret, ctx)
    await keys.provide_secret(replay, key, ctx)
    created = await _create(launcher, wanted, admitted.template.name, ctx)
    ctx.applications[launcher.resource].put(created)
    return launcher.run(created)


async def _create(launcher: Launcher, job: JobApplication, template: str, ctx: Context) -> Body:
    """Create an application, with each of its fields.

    Raises:
        JobTemplateInvalid: the kind lacks a field of the job template.
        KubernetesError: the API server refuses.
    """
    try:
        return await ctx.kubernetes.create(launcher.resource, launcher.manifest(job))
    except KubernetesError as error:
        if fields := re.findall(r'unknown field \\*"spec[.]([\w.\[\]-]+)', str(error)):
            raise Reason.JOB_TEMPLATE_INVALID.error(
                f"the {launcher.resource.kind} of {launcher.resource.group} does not know fields "
                f"of the job template {template}",
                got=", ".join(fields),
                remedy="upgrade the Spark operator or the cluster, or remove these fields from the "
                "template; this Replay starts automatically then",
            ) from error
        raise


def _launched(replay: Body, run: SparkRun) -> ObjectEvent:
    message = f"the {run.kind} {run.key.name} runs this Replay"
    why = [replay["spec"][field] for field in ("reason", "ticket") if field in replay["spec"]]
    return ObjectEvent(Reason.LAUNCHED, ": ".join([message, *why]))


def _run(replay: Body, ctx: Context) -> SparkRun | None:
    found = find_application(replay, ctx)
    if found is None:
        return None
    launcher, application = found
    if not resources.is_owned_by(application, replay):
        raise Reason.APPLICATION_NOT_OURS.error(
            f"a {launcher.resource.kind} that this Replay does not own has the name that its own "
            "needs",
            got=application["metadata"]["name"],
            remedy=f"delete that {launcher.resource.kind}",
        )
    return launcher.run(application)


async def _reported(replay: Body, run: SparkRun | None, ctx: Context) -> Body:
    """Return the Replay with all that its job has written into the status, at its end too.

    Raises:
        KubernetesError: it could not be read.
        _ReplacedError: another one has its name.
    """
    if was_launched(replay) if run is None else run.phase in FINAL:
        # The watch may show the end of the application before the last words of its job.
        found = await ctx.kubernetes.get(resources.REPLAYS, Key.of(replay))
        if found["metadata"]["uid"] != replay["metadata"]["uid"]:
            raise _ReplacedError
        return found
    return replay


def _current(replay: Body, ctx: Context) -> Body:
    """Return *replay* as last seen: a status is written by name.

    Raises:
        _ReplacedError: it is not there.
    """
    current = ctx.replays.get(Key.of(replay))
    if current is None or current["metadata"]["uid"] != replay["metadata"]["uid"]:
        raise _ReplacedError
    return current


async def _is_written(
    replay: Body, conditions: tuple[Condition, ...], fields: dict[str, Any], ctx: Context
) -> bool:
    """Write the status of *replay*; return False if it has changed since it was read, or ended.

    Its job may have reported meanwhile, or another operator ended it.

    Raises:
        KubernetesError: the status could not be written.
    """
    if is_final(replay):
        return False
    version = replay["metadata"]["resourceVersion"]
    try:
        await _publisher(ctx).publish(replay, conditions, fields, version)
    except ConflictError:
        return False
    return True


def _mirror(replay: Body, reported: ReplayStatus, run: SparkRun | None, *, is_late: bool) -> _Shown:
    """Return what the state of the application says about the Replay.

    Args:
        replay: the Replay.
        reported: what the job says. An application that ends without the word of its job that the
            run is finished was cut off.
        run: how its application stands; None if that is gone, and the job says that the run is
            finished.
        is_late: whether it is long over its deadline, or the time of its review.

    Raises:
        ReplayFailed: the application has ended before its run.
    """
    if run is None:
        return _completed(replay, reported)
    name, is_review = run.key.name, reported.run.review is not None
    if run.phase in FINAL and not reported.run.finished:
        cut_off = run.phase is Phase.COMPLETED
        failure = reported.run.failure
        raise Reason.REPLAY_FAILED.error(
            f"the {run.kind} {name} has {'ended before its run' if cut_off else 'failed'}",
            got=f"{failure.reason}: {failure.message}" if failure else run.error,
            remedy=_ANOTHER,
        )
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


def _running(replay: Body, reported: ReplayRun) -> _Shown | None:
    """Return what a job that runs reports of its state; None if it plans or moves messages."""
    suspended = {"phase": Phase.SUSPENDED.value}
    if reported.finished:
        return progressing("all is moved; the job looks at what becomes of it"), {}
    if is_dry_run(replay) and reported.review is not None:
        return _in_review(reported, reported.review), suspended
    if (awaited := _awaited(reported)) is not None:
        return waiting(awaited), {}
    return (_suspended(reported), suspended) if reported.suspended else None


def _awaited(reported: ReplayRun) -> RedriveError | None:
    """Return the state of a target that the run waits for the end of; None where it does not."""
    if topic := reported.unsubscribed_topic:
        return Reason.SUBSCRIPTION_AWAITED.error(
            f"{topic}, or one of its partitions, has no durable subscription that keeps messages, "
            "and nothing is moved there",
            remedy="create one (`pulsar-admin topics create-subscription --subscription NAME "
            f"{topic}`); then the run resumes",
        )
    if topic := reported.full_topic:
        return Reason.TARGET_FULL.error(
            f"{topic} is over its backlog quota, and takes no more messages",
            remedy="have its consumers catch up, or raise the quota; then the run goes on",
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


def _completed(replay: Body, reported: ReplayStatus) -> _Shown:
    """Return the end of a run that has settled all messages which it selected.

    A run that refused all of them has failed. A plan moves nothing, and fails by no refusal.
    """
    account, counts = _outcome(replay, reported.run), reported.run.counts
    fields = {"phase": Phase.COMPLETED.value}
    if reported.run.review is not None and counts.left:
        expired = f"the review was not confirmed in time: {account}"
        return ready(Reason.REVIEW_EXPIRED, expired), fields
    if _is_plan(replay, reported.run) or not counts.refused:
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
        remedy="correct the causes in status.run.refusals, and make another Replay",
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
    if _is_plan(replay, run):
        moves = f"{counts.left} of {counts.scanned} dead letters would be moved"
        return f"a plan: {moves}, {counts.refused} can't be{unevaluated}"
    account = (
        f"of {counts.matched} dead letters {counts.moved} were moved, "
        f"{counts.skipped} needed no move, {counts.refused} can't be moved"
        + (f", {counts.discarded} were discarded" if counts.discarded else "")
        + unevaluated
        + (f"; {counts.batched} are of batches, which move as a whole" if counts.batched else "")
    )
    if outcome is None:
        return account
    return (
        f"{account}; of those that were moved {outcome.handled} were handled, "
        f"{outcome.dead_again} are dead again, {outcome.waiting} wait"
    )


def _is_plan(replay: Body, run: ReplayRun) -> bool:
    """Return True if the run has moved nothing: a plan, or a review that ended unconfirmed."""
    return is_dry_run(replay) or run.review is not None


def _check_started(run: SparkRun, now: datetime) -> None:
    """Check that a controller has begun to run an application, if it had the time to.

    Raises:
        ApplicationNotStarted: it has not.
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
"""Reasons that end a Replay: its spec can't change, and a run is not started a second time."""


def _explain(replay: Body, error: RedriveError) -> _Shown:
    """Return why the Replay does not run: for good, until it is changed, or for now."""
    fields: dict[str, Any] = {}
    if error.reason in _FINAL_REASONS:
        fields = {"phase": Phase.FAILED.value}
    elif not was_launched(replay):
        fields = {"phase": Phase.PENDING.value}
    conditions = failed(error)
    if error.reason is Reason.SUSPENDED:
        conditions = with_condition(conditions, error.reason)
    return conditions, fields


GRACE = timedelta(minutes=2)
"""So long a job may take to drain after its deadline, before its Replay fails without its word."""


async def delete_if_over(replay: Body, ctx: Context) -> Requeue:
    """Delete a Replay that ended as long ago as its `ttlAfterFinished` says.

    Its Job or SparkApplication and its pods are deleted with it. A Replay that was changed at that
    moment stays until the next reconcile. An invalid or future time of the end counts as now, so
    the Replay is neither deleted at once nor kept permanently.

    Raises:
        KubernetesError: it could not be deleted or annotated; a ConflictError if it has changed
            meanwhile.
    """
    ttl = replay["spec"].get("ttlAfterFinished")
    end, now = moment_of(replay["metadata"]["annotations"][ENDED_AT]), ctx.clock()
    try:
        if end is None or end > now:
            await _annotate(replay, {ENDED_AT: written(now)}, ctx)
            return next_requeue(replay, Phase.COMPLETED)
        if ttl is None:
            return Requeue.ON_CHANGE
        if now - end < parse_duration(ttl):
            return Requeue.SLOW_BACKOFF
        await ctx.kubernetes.delete(resources.REPLAYS, replay)
    except NotFoundError:
        return Requeue.ON_CHANGE
    logger.info("Replay %s: deleted, %s after its end", Key.of(replay), ttl)
    return Requeue.ON_CHANGE


def next_requeue(replay: Body, phase: str, *, is_idle: bool = False) -> Requeue:
    """Return when to look at a Replay again that was launched, to see whether its time is over.

    Args:
        replay: the Replay.
        phase: how it stands.
        is_idle: whether its pods have to be looked at: their state is not watched.
    """
    if phase == Phase.SUBMITTED:
        return Requeue.BACKOFF  # the state of an application that is not run never changes
    timed = "ttlAfterFinished" if phase in FINAL else "deadline"
    ends_in_time = timed in replay["spec"] or (phase not in FINAL and is_dry_run(replay))
    return Requeue.SLOW_BACKOFF if is_idle or ends_in_time else Requeue.ON_CHANGE


def requeue_after_error(error: RedriveError, replay: Body) -> Requeue:
    """Return when to look again at a Replay that *error* keeps from going on."""
    if error.requeue is not Requeue.ON_CHANGE or error.reason in _FINAL_REASONS:
        return error.requeue
    if not was_launched(replay):
        return Requeue.SLOW_BACKOFF if "startBefore" in replay["spec"] else Requeue.ON_CHANGE
    return next_requeue(replay, Phase.RUNNING)  # its deadline counts, whether its job runs or not


def is_overdue(replay: Body, now: datetime) -> bool:
    """Return True if the run was launched longer ago than its deadline and `GRACE` together.

    Its job ends at the deadline, unless it does not run or hangs.
    """
    deadline, launch_time = replay["spec"].get("deadline"), launched_at(replay)
    if deadline is None or launch_time is None:
        return False
    return now - launch_time >= parse_duration(deadline) + GRACE


def is_review_overdue(replay: Body, status: ReplayStatus, now: datetime) -> bool:
    """Return True if a review should have ended at least `GRACE` ago, and its job does not run."""
    review = status.run.review
    return is_dry_run(replay) and review is not None and now - review.expiry_time >= GRACE


def check_canceled(replay: Body, status: ReplayStatus, phase: str) -> None:
    """Check that a run was not canceled, unless its job still settles in-flight messages.

    Raises:
        Canceled: it was canceled, and no job of it runs.
    """
    is_canceled = replay["spec"].get("cancel") and not status.run.finished
    if is_canceled and phase not in {Phase.RUNNING, Phase.SUSPENDED}:
        raise Reason.CANCELED.error(
            "the Replay was canceled; messages that were moved before stay moved",
            remedy="make another Replay for those that are left",
        )


def check_start(replay: Body, status: ReplayStatus, ctx: Context) -> None:
    """Check that a Replay which was not launched may still be launched, whatever it waits for.

    Raises:
        Canceled: it was canceled.
        StartedTooLate: the time of its `startBefore` is over.
    """
    if was_launched(replay) or find_application(replay, ctx) is not None:
        return
    check_canceled(replay, status, Phase.PENDING)
    latest = replay["spec"].get("startBefore")
    if latest is not None and ctx.clock() >= datetime.fromisoformat(latest):
        raise Reason.STARTED_TOO_LATE.error(
            "the Replay was not launched before its startBefore",
            got=latest,
            remedy="make another Replay with a later one if its messages are still to be moved",
        )


def check_deadline(replay: Body, status: ReplayStatus, phase: str, now: datetime) -> None:
    """Check that a run that was launched has not gone on for longer than it may.

    Raises:
        DeadlineExceeded: it has, and something is left.
    """
    if phase in FINAL or status.run.finished or not is_overdue(replay, now):
        return
    raise Reason.DEADLINE_EXCEEDED.error(
        "the run has not come to its end within its deadline, and its job does not say why",
        got=replay["spec"]["deadline"],
        remedy="look at its Job or SparkApplication and the pods, which go with this Replay; "
        "another Replay goes on from what was moved",
    )
