"""Reconciliation of a Replay: the spine.

The reconciler launches a Job or SparkApplication when no other Replay of the policy has priority,
and publishes its state as the status of the Replay. It ends runs that exceed their deadline and
deletes ended Replays after `ttlAfterFinished`.

The `Controller` of Replays calls it for each change of the Replay, its policy, its connection, its
application, or another Replay of the same policy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from redrive.api import Body
from redrive.api.conditions import (
    Condition,
    ObjectEvent,
    ended,
    failed,
    moment_of,
    warning,
    written,
)
from redrive.api.replay import Mode, ReplayEngine
from redrive.api.replay_status import ADMITTED, CHECKED, FINAL, WHILE_RUNNING, Phase, ReplayStatus
from redrive.api.retrypolicy import MAX_RESULTS, MAX_SHOWN, ReplayResult
from redrive.errors import RedriveError, Requeue
from redrive.kube import logs, resources
from redrive.kube.client import ConflictError, KubernetesError, NotFoundError
from redrive.kube.connections import key_of, shown_to
from redrive.kube.context import Context
from redrive.kube.resources import REQUESTED_BY, Key, PolicyKey
from redrive.kube.status import has_finalizer
from redrive.policy.values import parse_duration
from redrive.reasons import Reason
from redrive.replay.controller import admission, keys, launch, metrics, rights
from redrive.replay.controller.checks import start_is_too_late
from redrive.replay.controller.launch import JobApplication, key_source, pod_access
from redrive.replay.controller.prerequisites import (
    check_pods,
    check_prerequisites,
    is_idle,
    prepare_target,
    read_image,
    template_of_jobs,
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
from redrive.replay.controller.status import (
    check_started,
    explain,
    is_overdue,
    is_plan,
    is_review_overdue,
    mirror,
    next_requeue,
    requeue_after_error,
)
from redrive.replay.evidence import LedgerKey

logger = logging.getLogger(__name__)
audit_log = logging.getLogger("redrive.audit")
"""Logs one line for each ended Replay and Inspection."""

_LITERAL = re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*\"""", re.DOTALL)
"""Text literal of Spark SQL, in single or double quotes."""


class _ReplacedError(Exception):
    """The Replay was deleted. Another Replay may have its name."""


async def reconcile(key: Key, ctx: Context, launching: asyncio.Lock) -> Requeue:
    """Reconcile one Replay; write its status and Events last. A final phase does not change.

    The status is written only if it has not changed since it was read. So neither a delayed job nor
    a former leader of the operators reverts an end, and an end includes the last report of the job.

    Args:
        key: the Replay.
        ctx: caches, clients and settings.
        launching: lock for the launch of Replays of one namespace, so that their order does not
            change during a launch.
    """
    replay = ctx.replays.get(key)
    if replay is None:
        return Requeue.ON_CHANGE
    logs.identify(replay)
    if "deletionTimestamp" in replay["metadata"]:
        return await rights.release_deleted(replay, ctx)
    if admission.is_final(replay):
        return await _end(replay, ctx)
    try:
        return await _advance(replay, ctx, launching)
    except _ReplacedError:
        return Requeue.ON_CHANGE


async def _end(replay: Body, ctx: Context) -> Requeue:
    """Revoke the rights of an ended Replay, and delete it after its `ttlAfterFinished`.

    Raises:
        KubernetesError: as for `delete_if_over`, or its status could not be written.
    """
    await _show_end(replay, ctx)
    try:
        await rights.release(replay, ctx)
    except RedriveError as error:
        logger.warning("rights of a Replay could not be revoked, retrying: %s", error)
        return Requeue.SLOW_BACKOFF
    return await delete_if_over(ctx.replays.get(Key.of(replay)) or replay, ctx)


async def _show_end(replay: Body, ctx: Context) -> None:
    """Write a final status if only the annotation records an end, as in a copy or a backup."""
    if ReplayStatus.of(replay).phase in FINAL:
        return
    error = Reason.ALREADY_ENDED.error(
        f"the Replay has the annotation {admission.ENDED_AT} of an ended one, so it is not "
        "launched",
        remedy="create another Replay without that annotation if messages are to be moved",
    )
    end = moment_of(replay["metadata"]["annotations"][admission.ENDED_AT]) or ctx.clock()
    fields = {"phase": Phase.FAILED.value, "completionTime": written(end)}
    version = replay["metadata"]["resourceVersion"]
    await rights.publisher(ctx).publish(replay, ended(failed(error)), fields, version)


async def _advance(replay: Body, ctx: Context, launching: asyncio.Lock) -> Requeue:
    now = ctx.clock()
    events: list[ObjectEvent] = []
    fields: dict[str, Any] = {}
    judged, reported = replay, ReplayStatus.of(replay)
    try:
        # Outside the lock: a hanging broker must not block other launches. A finished run is not
        # launched again.
        is_prepared = not _has_finished(replay, reported)
        notices = await _prepare(replay, reported, ctx) if is_prepared else ()
        key = await _ledger_key(replay, reported, ctx)
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
                check_started(run, now)
                if run.phase not in FINAL:
                    judged = await _let_continue(judged, reported, ctx)
            elif is_prepared and not _has_finished(judged, reported):
                run = await _launch(replay, reported, key, ctx)
                events += [_launched(replay, run), *notices]
                judged = await _mark_launched(judged, reported, run, ctx)
        is_late = is_overdue(judged, now) or is_review_overdue(judged, reported, now)
        conditions, fields = mirror(judged, reported, run, is_late=is_late)
        if run is not None and fields["phase"] not in FINAL:
            await check_pods(run, reported, now, ctx)
        requeue = next_requeue(replay, fields["phase"], is_idle=is_idle(reported.run))
        if reported.run.unsubscribed_topic:
            requeue = Requeue.BACKOFF  # a recreated topic has lost its rights
    except RedriveError as error:
        policy = ctx.find_policy(PolicyKey.of(replay))
        shown = error if policy is None else shown_to(policy, error)
        conditions, explained = explain(judged, shown)
        fields = explained | fields  # `fields` has the state of a run whose pods do not start
        requeue = await _requeue_stopped(judged, error, ctx)
    current = _current(replay, ctx)
    if fields.get("phase") not in FINAL:
        conditions = (*conditions, *_template_warnings(replay, conditions, ctx))
    if fields.get("phase") in FINAL:
        requeue = await _publish_end(judged, conditions, fields, ctx)
    else:
        fields["completionTime"] = None  # a job may have written it
        is_written = await _is_written(current, conditions, fields, ctx)
        requeue = requeue if is_written else Requeue.BACKOFF
    for event in events:
        await rights.publisher(ctx).emit(replay, event)
    return requeue


async def _requeue_stopped(replay: Body, error: RedriveError, ctx: Context) -> Requeue:
    """Return the requeue time of a Replay that *error* stops.

    A Replay that blocks no others gives its rights back: any number of them may wait.
    """
    is_dormant = Reason.of(error).stalls or error.reason is Reason.SUSPENDED
    if is_dormant and not await rights.release_waiting(_current(replay, ctx), ctx):
        return Requeue.BACKOFF
    return requeue_after_error(error, replay, runs=find_application(replay, ctx) is not None)


async def _prepare(replay: Body, reported: ReplayStatus, ctx: Context) -> tuple[ObjectEvent, ...]:
    """Check a Replay, and prepare its target before its launch; return Events about the target.

    Raises:
        RedriveError: the Replay may not run, or not now.
    """
    admission.check_permitted(replay, ctx)
    check_start(replay, reported, ctx)
    if find_application(replay, ctx) is None:
        await ctx.replays.derive_aside(admission.checked_spec, replay)
    return tuple(await prepare_target(replay, ctx))


async def _ledger_key(
    replay: Body, reported: ReplayStatus, ctx: Context
) -> LedgerKey | RedriveError:
    """Return the key for a launch, or the error for which *replay* can't be launched now.

    Raises:
        RedriveError: it may be launched, and the key can't be read.
    """
    if _has_finished(replay, reported) or find_application(replay, ctx) is not None:
        return ConflictError("its job was deleted meanwhile", remedy="it is launched again soon")
    try:
        template, admitted = template_of_jobs("Replays", ctx), admission.admit(replay, ctx)
    except RedriveError as error:
        return error
    return await keys.ledger_key(replay, admitted, template, ctx)


async def _publish_end(
    replay: Body, conditions: tuple[Condition, ...], fields: dict[str, Any], ctx: Context
) -> Requeue:
    """Write the final status of a Replay, and then the annotation that makes it permanent.

    Args:
        replay: Replay with the last report of its job.
        conditions: final conditions, without `Complete` or `Failed`.
        fields: final fields of the status, with the phase.
        ctx: caches and clients.

    Raises:
        KubernetesError: it could not be written; the next reconcile repeats it.
    """
    reported = ReplayStatus.of(replay)
    earlier = reported.completion_time if reported.phase in FINAL else None
    fields = {**fields, "completionTime": written(earlier or ctx.clock())}
    # A killed driver leaves fields that only apply during a run.
    if stale := WHILE_RUNNING & reported.run.to_manifest().keys():
        fields["run"] = dict.fromkeys(stale)
    try:
        if not await _is_written(replay, ended(conditions), fields, ctx):
            return Requeue.BACKOFF
        await _record_result(replay, conditions[0].reason, fields, ctx)
    except ConflictError:  # the policy was changed meanwhile
        return Requeue.BACKOFF
    after = await _annotate(replay, {admission.ENDED_AT: written(ctx.clock())}, ctx)
    metrics.ended(replay, reported, Phase(fields["phase"]), ctx)
    audit_log.info("Replay ended: %s", _audit_record(replay, conditions[0].reason))
    if has_finalizer(after, rights.FINALIZER):
        return Requeue.BACKOFF
    return next_requeue(replay, fields["phase"])


async def _record_result(
    replay: Body, reason: str, fields: Mapping[str, Any], ctx: Context
) -> None:
    """Add the result of an ended Replay to the status of its policy, once. Plans have no result.

    Raises:
        ConflictError: the policy was changed meanwhile.
        KubernetesError: the status could not be written.
    """
    reference = PolicyKey.of(replay)
    policy, resource = ctx.find_policy(reference), resources.POLICY_KINDS[reference.kind]
    if policy is None or admission.is_dry_run(replay):
        return
    metadata, spec, run = replay["metadata"], replay["spec"], ReplayStatus.of(replay).run
    result = ReplayResult(
        name=metadata["name"],
        uid=metadata["uid"],
        author=(_author(replay) or "")[:MAX_SHOWN] or None,
        approved_by=run.approval.approved_by if run.approval else None,
        reason=spec["reason"][:MAX_SHOWN] if spec.get("reason") else None,
        ticket=spec.get("ticket"),
        phase=fields["phase"],
        result=reason,
        moved=run.counts.moved,
        refused=run.counts.refused,
        doubled=run.counts.doubled,
        dead_again=run.outcome.dead_again if run.outcome else None,
        completion_time=fields["completionTime"],
    ).to_manifest()
    results = (policy.get("status") or {}).get("replays") or []
    if result in results:
        return
    others = [other for other in results if other["uid"] != metadata["uid"]]
    status = {"replays": [result, *others][:MAX_RESULTS]}
    version = policy["metadata"]["resourceVersion"]
    try:
        after = await ctx.kubernetes.patch_status(resource, Key.of(policy), status, version)
    except NotFoundError:  # the policy was deleted with its results
        return
    ctx.policy_caches[reference.kind].renew(after)


def _author(replay: Body) -> str | None:
    """Return the user who created *replay*, or an Inspection, by the command; None if unknown."""
    return (replay["metadata"].get("annotations") or {}).get(REQUESTED_BY)


def _audit_record(replay: Body, result: str) -> str:
    """Return the audit record of a Replay as JSON: author, selection, reason and result.

    It contains no message key and no text literal of a condition, because these may be personal
    data.
    """
    spec, run = replay["spec"], ReplayStatus.of(replay).run
    own = {
        "mode": spec.get("mode") or Mode.RUN.value,
        "target": spec.get("target"),
        "approvedBy": run.approval.approved_by if run.approval else None,
        "moved": run.counts.moved,
        "refused": run.counts.refused,
    }
    if run.audit and own["mode"] == Mode.AUDIT:
        own["audit"] = run.audit.to_manifest()
    return audit_record(replay, "replay", result, own)


def audit_record(body: Body, kind: str, result: str, own: Mapping[str, object]) -> str:
    """Return the audit record of a Replay or an Inspection, with the fields *own* of its kind."""
    spec = body["spec"]
    select = dict(spec.get("select") or {})
    if select.get("keys"):
        select["keys"] = len(select["keys"])
    if select.get("where"):
        select["where"] = _LITERAL.sub("'…'", select["where"])
    record = {
        kind: str(Key.of(body)),
        "policy": spec["policyRef"]["name"],
        "requestedBy": _author(body),
        "select": select,
        "reason": spec.get("reason"),
        "ticket": spec.get("ticket"),
        "result": result,
        **own,
    }
    return json.dumps(record, ensure_ascii=False)


def _template_warnings(
    replay: Body, conditions: tuple[Condition, ...], ctx: Context
) -> tuple[Condition, ...]:
    """Return a warning if the job template is invalid, unless the condition states it already."""
    name = admission.template_of(replay, ctx)
    problem = None if name is None else ctx.job_templates.problem(name)
    if problem is None or conditions[0].reason == problem.reason:
        return ()
    return (warning(problem),)


def _has_finished(replay: Body, reported: ReplayStatus) -> bool:
    """Return True if a job of *replay* has reported that nothing is left."""
    return bool(was_launched(replay) and reported.run.finished)


async def _mark_launched(replay: Body, reported: ReplayStatus, run: SparkRun, ctx: Context) -> Body:
    """Annotate *replay* with its launch, unless it is annotated; return the current Replay.

    A run without a review was admitted before its launch, so it may move messages.
    """
    if launched_at(replay) is not None:
        return replay
    annotations = {APPLICATION: run.key.name, LAUNCHED_AT: written(ctx.clock())}
    if not is_plan(replay, reported.run):
        annotations[ADMITTED] = replay["metadata"]["uid"]
    return await _annotate(replay, annotations, ctx)


async def _let_continue(replay: Body, reported: ReplayStatus, ctx: Context) -> Body:
    """Annotate a confirmed review or a resumed run whose target is checked; return the Replay.

    Raises:
        RedriveError: the Replay may not run now, such as during another Replay of its policy.
    """
    run = reported.run
    if run.suspended_time is not None and admission.awaits_check(replay, run):
        return await _annotate(replay, {CHECKED: written(run.suspended_time)}, ctx)
    if not admission.awaits_admission(replay, reported.run):
        return replay
    await ctx.replays.derive_aside(admission.checked_spec, replay)
    admission.admit(replay, ctx)
    return await _annotate(replay, {ADMITTED: replay["metadata"]["uid"]}, ctx)


async def _annotate(replay: Body, annotations: Mapping[str, str], ctx: Context) -> Body:
    """Write annotations of *replay*; return the current Replay.

    Raises:
        KubernetesError: they could not be written; a ConflictError if another Replay has its name.
    """
    metadata = {"uid": replay["metadata"]["uid"], "annotations": annotations}
    after = await ctx.kubernetes.patch(resources.REPLAYS, Key.of(replay), {"metadata": metadata})
    ctx.replays.renew(after)
    return after


async def _launch(
    replay: Body, reported: ReplayStatus, key: LedgerKey | RedriveError, ctx: Context
) -> SparkRun:
    """Create the Job or SparkApplication of *replay*, also after an earlier one was deleted.

    A second run is safe: it resumes from the ledger.

    Raises:
        RedriveError: the Replay may not run now, or the API server refuses.
    """
    image_template = template_of_jobs("Replays", ctx)
    check_start(replay, reported, ctx)
    admitted = admission.admit(replay, ctx)
    if isinstance(key, RedriveError):  # a change has solved it since, and causes a reconcile
        raise key
    launcher = JOB if admitted.template.engine is ReplayEngine.JOB else choose_operator(ctx)
    key_secret = keys.secret_of(replay, key)
    access = pod_access(admitted.identity, admitted.redirect_hosts, key_source(key_secret))
    image = await read_image(image_template, ctx)
    through = key_of(admitted.connection_ref, admitted.job.namespace)
    job, template = admitted.job, admitted.template
    wanted = launch.application(replay, through, job, access, template, ctx.settings, image=image)
    lent = launch.lent_objects(admitted.identity)
    await check_prerequisites(wanted, through, lent, key_secret, ctx)
    await keys.provide_secret(replay, key, ctx)
    created = await _create(launcher, wanted, admitted.template.name, ctx)
    ctx.applications[launcher.resource].put(created)
    return launcher.run(created)


async def _create(launcher: Launcher, job: JobApplication, template: str, ctx: Context) -> Body:
    """Create an application; fail if the API server does not store one of its fields.

    Raises:
        JobTemplateInvalid: the installed kind lacks a field of the job template.
        KubernetesError: the API server refuses.
    """
    try:
        return await ctx.kubernetes.create(launcher.resource, launcher.manifest(job))
    except KubernetesError as error:
        if fields := re.findall(r'unknown field \\*"spec[.]([\w.\[\]-]+)', str(error)):
            raise Reason.JOB_TEMPLATE_INVALID.error(
                f"the {launcher.resource.kind} of {launcher.resource.group} lacks fields of "
                f"the job template {template}",
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
    if (launched := find_application(replay, ctx)) is None:
        return None
    return launched.launcher.run_of(replay, resources.REPLAYS, launched.application)


async def _reported(replay: Body, run: SparkRun | None, ctx: Context) -> Body:
    """Return the Replay with the last report of its job. After the end it is read again.

    Raises:
        KubernetesError: it could not be read.
        _ReplacedError: another Replay has its name.
    """
    if was_launched(replay) if run is None else run.phase in FINAL:
        # The watch may show the end of the application before the last report of its job.
        current = await ctx.kubernetes.get(resources.REPLAYS, Key.of(replay))
        if current["metadata"]["uid"] != replay["metadata"]["uid"]:
            raise _ReplacedError
        return current
    return replay


def _current(replay: Body, ctx: Context) -> Body:
    """Return the cached *replay*.

    Raises:
        _ReplacedError: it does not exist, or another Replay has its name.
    """
    current = ctx.replays.get(Key.of(replay))
    if current is None or current["metadata"]["uid"] != replay["metadata"]["uid"]:
        raise _ReplacedError
    return current


async def _is_written(
    replay: Body, conditions: tuple[Condition, ...], fields: dict[str, Any], ctx: Context
) -> bool:
    """Write the status of *replay*; return False if it changed since it was read, or ended.

    Its job may have reported meanwhile, or another operator has ended it.

    Raises:
        KubernetesError: the status could not be written.
    """
    if admission.is_final(replay):
        return False
    version = replay["metadata"]["resourceVersion"]
    try:
        await rights.publisher(ctx).publish(replay, conditions, fields, version)
    except ConflictError:
        return False
    return True


async def delete_if_over(replay: Body, ctx: Context) -> Requeue:
    """Delete a Replay whose `ttlAfterFinished` has passed since its end.

    Kubernetes deletes its Job or SparkApplication and the pods with it. A Replay that was changed
    at that moment stays until the next reconcile. An invalid or future end time counts as now, so
    the Replay is neither deleted at once nor kept permanently.

    Raises:
        KubernetesError: it could not be deleted or annotated; a ConflictError if it was changed
            meanwhile.
    """
    ttl = replay["spec"].get("ttlAfterFinished")
    end, now = moment_of(replay["metadata"]["annotations"][admission.ENDED_AT]), ctx.clock()
    try:
        if end is None or end > now:
            await _annotate(replay, {admission.ENDED_AT: written(now)}, ctx)
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


def check_canceled(replay: Body, status: ReplayStatus, phase: str) -> None:
    """Check that a run was not canceled, unless its job still settles in-flight messages.

    Raises:
        Canceled: it was canceled, and its job does not run.
    """
    is_canceled = replay["spec"].get("cancel") and not status.run.finished
    if is_canceled and phase not in {Phase.RUNNING, Phase.SUSPENDED}:
        raise Reason.CANCELED.error(
            "the Replay was canceled; messages that were moved before stay moved",
            remedy="create another Replay for those that are left",
        )


def check_start(replay: Body, status: ReplayStatus, ctx: Context) -> None:
    """Check that a pending Replay may still be launched.

    Raises:
        Canceled: it was canceled.
        StartedTooLate: its `startBefore` has passed.
    """
    if was_launched(replay) or find_application(replay, ctx) is not None:
        return
    check_canceled(replay, status, Phase.PENDING)
    if error := start_is_too_late(replay["spec"].get("startBefore"), ctx.clock()):
        raise error


def check_deadline(replay: Body, status: ReplayStatus, phase: str, now: datetime) -> None:
    """Check that a launched run has not exceeded its deadline.

    Raises:
        DeadlineExceeded: it has, and messages are left.
    """
    if phase in FINAL or status.run.finished or not is_overdue(replay, now):
        return
    raise Reason.DEADLINE_EXCEEDED.error(
        "the run did not end within its deadline, and its job reported no cause",
        got=replay["spec"]["deadline"],
        remedy="check its Job or SparkApplication and the pods, which are deleted with this "
        "Replay; another Replay moves the messages that are left",
    )
