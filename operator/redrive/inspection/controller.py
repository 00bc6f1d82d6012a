"""Reconciliation of an Inspection: one Job, whose summary the status shows.

The Job runs as a ServiceAccount of its own, with the credentials of the connection's inspection
role. It reads, and moves nothing, so a lost Job is created again without a record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from redrive.api import Body
from redrive.api.conditions import Condition, ended, failed, progressing, ready, written
from redrive.api.connection import Destination
from redrive.api.inspection import (
    InspectedMessages,
    InspectionSpec,
    InspectionStatus,
    ReturnedPayload,
)
from redrive.api.model import parse_spec
from redrive.api.permissions import Masking, ShownKeys
from redrive.api.replay import ReplayEngine
from redrive.api.replay_status import FINAL, Phase, ReplayStatus
from redrive.api.rocketmq import RocketMQMessages, RocketMQRetryPolicySpec
from redrive.errors import RedriveError, Requeue
from redrive.inspection.checks import (
    InspectionAccess,
    access_violations,
    dead_letters_are_discarded,
    pulsar_access,
    rocketmq_access,
)
from redrive.inspection.job import InspectionJob, PulsarMessages
from redrive.kube import connections, logs, resources
from redrive.kube.cache import Cache, needs_reconcile
from redrive.kube.client import ConflictError, NotFoundError
from redrive.kube.connections import connection_of, rocketmq_at, shown_to, spec_at
from redrive.kube.context import Context
from redrive.kube.controller import Controller
from redrive.kube.resources import Key, PolicyKey
from redrive.kube.rocketmq import cluster_of
from redrive.kube.status import Publisher
from redrive.policy.naming import TopicName
from redrive.policy.values import parse_duration
from redrive.reasons import Reason, requeue_of
from redrive.replay.controller import launch
from redrive.replay.controller.admission import (
    choose_template,
    namespace_of,
    ready_policy,
    used_policy,
)
from redrive.replay.controller.handlers import is_limited, listen_to_inputs, owners_of
from redrive.replay.controller.prerequisites import (
    check_pods,
    check_prerequisites,
    read_image,
    template_of_jobs,
)
from redrive.replay.controller.reconciler import audit_log, audit_record
from redrive.replay.controller.spark_operators import JOB, SparkRun
from redrive.replay.controller.status import check_started, ended_unfinished

MOST_RUNNING = 2
"""Inspections of a namespace that run at the same time."""
_GRACE_SECONDS = 60
"""Time after the deadline in which a job can report that it has exceeded it."""
_PERMITTED_FOR = timedelta(minutes=10)
"""Time from the creation of an Inspection in clear text, when the right of its author is checked,
until its latest start."""
_GRANTS_SECONDS = 5.0
"""Maximum age of the grants that pending Inspections of all namespaces read."""
_WITHDRAWN = {
    Reason.CONNECTION_NOT_FOUND,
    Reason.NAMESPACE_NOT_ALLOWED,
    Reason.INSPECTION_IDENTITY_MISSING,
    Reason.RETRIES_NOT_INSPECTED,
    Reason.CLEAR_TEXT_NOT_PERMITTED,
    Reason.DESTINATION_NOT_FOUND,
}
"""Errors that end a running Inspection."""
_FINAL_REASONS = {
    Reason.INVALID_SPEC,
    Reason.INSPECTION_FAILED,
    Reason.CLEAR_TEXT_NOT_PERMITTED,
}

logger = logging.getLogger(__name__)


class _Shown(NamedTuple):
    """State of an Inspection: its last version, conditions, and fields of the status."""

    inspection: Body
    conditions: tuple[Condition, ...]
    fields: dict[str, Any]


def start(ctx: Context) -> tuple[Controller, ...]:
    """Follow the caches of this journey, and enqueue all Inspections.

    Returns:
        The controllers, which the caller has to stop in the end.
    """
    launching = WeakValueDictionary[str, asyncio.Lock]()
    controller = Controller(
        "Inspection",
        lambda key: reconcile(key, ctx, launching.setdefault(key.namespace, asyncio.Lock())),
        partition_key=lambda key: key.namespace,
    )
    _listen_to_ends(ctx, controller)
    listen_to_inputs(resources.INSPECTIONS, is_final, ctx, controller)
    for body in ctx.inspections:
        controller.enqueue(Key.of(body))
    return (controller,)


def _listen_to_ends(ctx: Context, controller: Controller) -> None:
    """Enqueue Inspections that changed or whose Job did, and the next ones that may run."""
    jobs = ctx.applications.get(resources.JOBS, Cache())
    running, waiting = jobs.index(_running_in), ctx.inspections.index(_waiting_in)

    def enqueue_next(namespace: str) -> None:
        free = max(0, MOST_RUNNING - running.count(namespace))
        for key in waiting.first(namespace, free):
            controller.enqueue(key)

    @ctx.inspections.listen
    def inspection_changed(key: Key, before: Body | None, after: Body | None) -> None:
        if needs_reconcile(before, after):
            controller.enqueue(key)
        # One that waits for something else now, or was deleted, leaves its slot to the next. One
        # that waits newly may have missed the end of a Job.
        if _waiting_in(before) != _waiting_in(after):
            enqueue_next(key.namespace)

    @jobs.listen
    def job_changed(key: Key, before: Body | None, after: Body | None) -> None:
        for owner in owners_of(after or before or {}, resources.INSPECTIONS):
            controller.enqueue(owner)
        if _running_in(before) != _running_in(after):
            enqueue_next(key.namespace)


def is_final(inspection: Body) -> bool:
    """Return True if the Inspection has ended.

    Jobs of Inspections can write this status where the admission policies of the chart are missing.
    That ends Inspections of their namespace, and has no other effect.
    """
    return (inspection.get("status") or {}).get("phase") in FINAL


async def reconcile(key: Key, ctx: Context, launching: asyncio.Lock) -> Requeue:
    """Reconcile one Inspection; write its status and Events last.

    Args:
        key: the Inspection.
        ctx: caches, clients and settings.
        launching: lock for launches in one namespace, so that their number is not exceeded.
    """
    inspection = ctx.inspections.get(key)
    if inspection is None or "deletionTimestamp" in inspection["metadata"]:
        return Requeue.ON_CHANGE
    logs.identify(inspection)
    if is_final(inspection):
        return await _delete_if_over(inspection, ctx)
    run: SparkRun | None = None
    try:
        run = await _run(inspection, ctx, launching)
        shown = await _mirror(inspection, run, ctx)
        requeue = Requeue.BACKOFF if run.phase is not Phase.RUNNING else Requeue.ON_CHANGE
    except NotFoundError:
        return Requeue.ON_CHANGE  # the Inspection was deleted
    except RedriveError as error:
        policy = ctx.find_policy(PolicyKey.of(inspection))
        error = error if policy is None else shown_to(policy, error)
        shown, requeue = _explained(inspection, error, run), requeue_of(error)
        if run is None and (requeue is Requeue.BACKOFF or _reveals(inspection)):
            # Any number of Inspections may wait for one cause. In clear text, none waits for long.
            requeue = Requeue.SLOW_BACKOFF
    return requeue if await _publish(shown, ctx) else Requeue.BACKOFF


async def _publish(shown: _Shown, ctx: Context) -> bool:
    """Write the status; return False if the Inspection has changed meanwhile."""
    inspection, conditions, fields = shown
    if is_over := fields.get("phase") in FINAL:
        conditions = ended(conditions)
        fields = {**fields, "completionTime": written(ctx.clock())}
    publisher = Publisher(ctx.kubernetes, resources.INSPECTIONS, ctx.inspections, ctx.clock)
    version = inspection["metadata"]["resourceVersion"]
    try:
        after = await publisher.publish(inspection, conditions, fields, version)
    except ConflictError:
        return False
    if is_over:
        audit_log.info("Inspection ended: %s", _record(after, conditions[0].reason))
    return not is_over  # the next reconcile begins to wait for the deletion


def _record(inspection: Body, result: str, **more: object) -> str:
    """Return the audit record of an Inspection, whose spec may be invalid."""
    own: dict[str, Any] = {
        **more,
        "from": inspection["spec"].get("from", InspectedMessages.DEAD_LETTER.value),
    }
    own["messages"] = InspectionStatus.of(inspection).run.messages
    own["reveals"] = _reveals(inspection)
    own["destination"] = (inspection["spec"].get("export") or {}).get("destination")
    return audit_record(inspection, "inspection", result, own)


def _reveals(inspection: Body) -> bool:
    """Return True if the spec, which may be invalid, asks for clear text."""
    results = (inspection["spec"].get(name) or {} for name in ("messages", "causes", "export"))
    # The schema permits mappings only.
    return any(result.get("payload") == ReturnedPayload.CLEAR for result in results)


async def _delete_if_over(inspection: Body, ctx: Context) -> Requeue:
    """Delete an Inspection after its `ttlAfterFinished`; Kubernetes deletes its Job.

    Raises:
        KubernetesError: it could not be deleted.
    """
    try:
        lifetime = ctx.inspections.derive(_spec, inspection).ttl_after_finished
    except RedriveError:
        return Requeue.ON_CHANGE  # the next change may correct it
    end = InspectionStatus.of(inspection).completion_time or ctx.clock()
    if ctx.clock() - end < parse_duration(lifetime):
        return Requeue.SLOW_BACKOFF
    try:
        await ctx.kubernetes.delete(resources.INSPECTIONS, inspection)
    except NotFoundError:
        return Requeue.ON_CHANGE
    logger.info("Inspection %s: deleted, %s after its end", Key.of(inspection), lifetime)
    return Requeue.ON_CHANGE


async def _run(inspection: Body, ctx: Context, launching: asyncio.Lock) -> SparkRun:
    """Return the state of the Job, which is created under *launching* if it does not exist.

    Raises:
        RedriveError: the Inspection can't run, or not now.
    """
    image_template = template_of_jobs("Inspections", ctx)
    name = launch.name_of(inspection, resources.INSPECTIONS)
    job = ctx.applications[resources.JOBS].get(Key(namespace_of(inspection), name))
    if job is None:
        job = await _launch(inspection, image_template, ctx, launching)
    run = JOB.run_of(inspection, resources.INSPECTIONS, job)
    if run.phase not in FINAL:
        _check_permitted(inspection, launch.launched_through(job), ctx)
    return run


def _check_permitted(inspection: Body, through: Key, ctx: Context) -> None:
    """Check that the connection of its launch still permits a running Inspection.

    Its policy may have been deleted since, or refer to another connection. The Job of an ended
    Inspection ends itself within `REPORT_SECONDS`.

    Raises:
        InspectionFailed: it does not.
    """
    try:
        namespace = namespace_of(inspection)
        access = _BROKERS[PolicyKey.of(inspection).kind].access(through, namespace, ctx)
        _check_access(inspection, through, access, ctx)
    except RedriveError as error:
        if error.reason in _WITHDRAWN:
            raise Reason.INSPECTION_FAILED.error(
                "the BrokerConnection does not permit this Inspection anymore",
                got=error.reason,
                remedy="create another Inspection once it does",
            ) from error


async def _launch(inspection: Body, template: Key, ctx: Context, launching: asyncio.Lock) -> Body:
    spec = ctx.inspections.derive(_spec, inspection)
    if spec.reveals:
        _check_age(inspection, ctx)
    _check_running(inspection, ctx)  # early: the end of one wakes all that wait
    # Outside the lock: a hanging broker must not block other launches.
    wanted, argument = await _application(inspection, template, ctx)
    async with launching:
        _check_running(inspection, ctx)
        if spec.reveals or argument.shown or argument.shows_keys:
            # Before the Job exists: its author may delete the Inspection at any time after. The
            # cache retains a part of the spec.
            launched = await ctx.kubernetes.get(resources.INSPECTIONS, Key.of(inspection))
            shows = _record(
                launched, Reason.PROGRESSING, shown=argument.shown, showsKeys=argument.shows_keys
            )
            audit_log.info("Inspection starts: %s", shows)
        job = await ctx.kubernetes.create(JOB.resource, JOB.manifest(wanted))
        ctx.applications[resources.JOBS].put(job)  # the next launch counts it
    return job


async def _application(
    inspection: Body, template: Key, ctx: Context
) -> tuple[launch.JobApplication, InspectionJob]:
    """Return the Job to create, and the argument of its program.

    Raises:
        RedriveError: the Inspection can't run, or not now.
    """
    key, spec = Key.of(inspection), ctx.inspections.derive(_spec, inspection)
    policy = PolicyKey.of(inspection)
    body, broker = ready_policy(policy, ctx), _BROKERS[policy.kind]
    through = connection_of(body)
    access = broker.access(through, key.namespace, ctx)
    export = _check_access(inspection, through, access, ctx)
    engine, masking = ReplayEngine.JOB, access.identity.masking or Masking()
    chosen = choose_template(None, access.jobs, engine, key.namespace, ctx)
    seconds = int(parse_duration(spec.deadline).total_seconds())
    argument = InspectionJob(
        namespace=key.namespace,
        name=key.name,
        uid=inspection["metadata"]["uid"],
        source=await broker.messages(body, spec.source, access, ctx),
        seconds=seconds,
        file=export.file,
        endpoint_url=export.endpoint_url,
        replays=_replay_rows(body) if spec.export else (),
        shown=masking.show,
        shows_keys=masking.keys is ShownKeys.CLEAR,
    )
    account = ctx.settings.inspection_service_account
    wanted = launch.job_application(
        inspection,
        resources.INSPECTIONS,
        through,
        launch.JobProgram(
            "redrive.inspection", argument.encode(), account, seconds + _GRACE_SECONDS
        ),
        launch.pod_access(access.identity, access.redirect_hosts, *export.sources),
        chosen.template,
        image=await read_image(template, ctx),
    )
    await check_prerequisites(wanted, through, launch.lent_objects(access.identity), None, ctx)
    # A failed reading is not repeated: its error is in the status.
    return replace(wanted, retries=0), argument


def _spec(inspection: Body) -> InspectionSpec:
    return parse_spec(InspectionSpec, inspection)


class _Export(NamedTuple):
    """Address of the file of a job, of its object store, and the mounted keys; empty for none."""

    file: str = ""
    endpoint_url: str = ""
    sources: tuple[Mapping[str, Any], ...] = ()


def _check_access(
    inspection: Body, through: Key, access: InspectionAccess, ctx: Context
) -> _Export:
    """Check that a connection permits an Inspection, and return the file that it writes.

    Raises:
        RedriveError: it does not.
    """
    spec = ctx.inspections.derive(_spec, inspection)
    if spec.reveals and not ctx.settings.clear_payloads:
        raise Reason.CLEAR_TEXT_NOT_PERMITTED.error(
            "this installation has no admission policy that checks the right to clear text",
            remedy="create another Inspection after it is installed (admissionPolicy.create in the "
            "Helm chart), or one with payload: Masked",
        )
    for error in access_violations(spec, access, through):
        raise error
    return _export(inspection, spec, access.destinations)


def _export(inspection: Body, spec: InspectionSpec, destinations: Iterable[Destination]) -> _Export:
    """Return the file of an Inspection, which no other Inspection has."""
    if spec.export is None:
        return _Export()
    destination = next(d for d in destinations if d.name == spec.export.destination)
    key, uid = Key.of(inspection), inspection["metadata"]["uid"]
    name = f"{key.name}-{uid[:8]}.{spec.export.format.suffix}"
    file = "/".join((destination.uri.rstrip("/"), key.namespace, spec.policy_ref.name, name))
    return _Export(
        file, destination.endpoint_url or "", tuple(launch.destination_sources(destination))
    )


def _check_age(inspection: Body, ctx: Context) -> None:
    """Check that the author of an Inspection in clear text had the right to it recently.

    Raises:
        ClearTextNotPermitted: the right may have been withdrawn since.
    """
    created = datetime.fromisoformat(inspection["metadata"]["creationTimestamp"])
    if ctx.clock() - created > _PERMITTED_FOR:
        raise Reason.CLEAR_TEXT_NOT_PERMITTED.error(
            "this Inspection in clear text has not started within 10 minutes of its creation, when "
            "the right of its author was checked",
            got=f"created at {written(created)}",
            remedy="create another Inspection",
        )


def _replay_rows(policy: Body) -> list[list[str]]:
    """Return the past Replays that the status of a policy lists, for a report."""
    rows = []
    for result in (policy.get("status") or {}).get("replays") or ():
        counts = [str(result.get(name, "")) for name in ("moved", "refused", "deadAgain")]
        rows.append([result["name"], "Run", result["result"], *counts, result["completionTime"]])
    return rows


def _check_running(inspection: Body, ctx: Context) -> None:
    """Check that fewer than `MOST_RUNNING` Inspections of the namespace run.

    Jobs are counted, because the Job of a deleted Inspection runs until Kubernetes deletes it.

    Raises:
        TooManyRuns: as many run.
    """
    jobs = ctx.applications[resources.JOBS]
    running = jobs.index(_running_in).count(namespace_of(inspection))
    if running >= MOST_RUNNING:
        raise Reason.TOO_MANY_RUNS.error(
            "as many Inspections of the namespace run at the same time as may",
            got=running,
            remedy="wait for one of them to end; this one starts automatically then",
        )


def _waiting_in(inspection: Body | None) -> str | None:
    """Return the namespace of an Inspection that waits for the end of others; None for others."""
    if inspection is None or is_final(inspection) or not is_limited(inspection):
        return None
    return namespace_of(inspection)


def _running_in(job: Body | None) -> str | None:
    """Return the namespace of the Job of an Inspection that has not ended; None for other Jobs."""
    if job is None or not launch.is_named_by(resources.INSPECTIONS, job):
        return None
    return namespace_of(job) if JOB.run(job).phase not in FINAL else None


async def _mirror(inspection: Body, run: SparkRun, ctx: Context) -> _Shown:
    """Return the status that follows from the state of the Job and the report of its pod.

    Raises:
        InspectionFailed: the Job has failed, or has exited before it finished the run.
        RedriveError: the pod does not start.
    """
    fields: dict[str, Any] = {"phase": run.phase.value, "job": run.key.name}
    if run.phase not in FINAL:
        check_started(run, ctx.clock())
        await check_pods(run, ReplayStatus(), ctx.clock(), ctx)
        state = progressing(f"the {run.kind} {run.key.name} is {run.state or 'NEW'}")
        return _Shown(inspection, state, fields)
    # The watch may show the end of the Job before the last report of its pod.
    inspection = await ctx.kubernetes.get(resources.INSPECTIONS, Key.of(inspection))
    reported = InspectionStatus.of(inspection).run
    if run.phase is Phase.COMPLETED and reported.finished:
        counts = f"{reported.messages} messages were read, {reported.matched} are selected"
        return _Shown(inspection, ready(Reason.COMPLETED, counts), fields)
    remedy = "fix the cause and create another Inspection"
    error = ended_unfinished(Reason.INSPECTION_FAILED, run, reported.failure, remedy)
    return _explained(inspection, error, run)


def _explained(inspection: Body, error: RedriveError, run: SparkRun | None) -> _Shown:
    """Return the status of an Inspection that *error* stops: failed, stalled or waiting."""
    is_over = error.reason in _FINAL_REASONS
    phase = Phase.PENDING if run is None else run.phase
    if is_over:
        phase = Phase.FAILED
    elif phase in FINAL:  # its report could not be read
        phase = Phase.RUNNING
    fields = {"phase": phase.value, **({} if run is None else {"job": run.key.name})}
    return _Shown(inspection, failed(error), fields)


class _Broker(Protocol):
    """Kind of broker, by the kind of its policies."""

    def access(self, through: Key, namespace: str, ctx: Context) -> InspectionAccess:
        """Return the access that the connection *through* gives to jobs of *namespace*.

        Raises:
            RedriveError: the connection gives none, or not to the namespace.
        """

    async def messages(
        self, policy: Body, source: InspectedMessages, access: InspectionAccess, ctx: Context
    ) -> PulsarMessages | RocketMQMessages:
        """Return the messages of a Ready policy, which *access* permits to read.

        Raises:
            RedriveError: the policy has none, or they may not be read yet.
        """


class _Pulsar:
    def access(self, through: Key, namespace: str, ctx: Context) -> InspectionAccess:
        spec = connections.find_at(through, namespace, ctx.connections, ctx.namespaces)
        return pulsar_access(spec, through)

    async def messages(
        self, policy: Body, source: InspectedMessages, access: InspectionAccess, ctx: Context
    ) -> PulsarMessages:
        _, connection, _, used = used_policy(policy, ctx)
        if error := dead_letters_are_discarded(source, used):
            raise error
        is_retry = source is InspectedMessages.RETRY
        topic = used.retry_topic if is_retry else used.dead_letter_topic
        await self._check_granted(topic, access.role, connection_of(policy), ctx)
        pulsar = connection.pulsar
        subscription = used.subscription if is_retry else used.dead_letter_subscription
        return PulsarMessages(str(topic), subscription, pulsar.service_url, pulsar.admin_url)

    async def _check_granted(self, topic: TopicName, role: str, through: Key, ctx: Context) -> None:
        """Check that the policy has granted the role its right, which follows a spec change.

        Raises:
            InspectionRoleNotGranted: it has not.
            RedriveError: the broker does not answer.
        """
        connection = await ctx.brokers.open(through)
        namespace = await connection.admin.namespace(topic.namespace_name, max_age=_GRANTS_SECONDS)
        if "consume" not in namespace.permissions.get(str(topic), {}).get(role, frozenset()):
            raise Reason.INSPECTION_ROLE_NOT_GRANTED.error(
                f"the policy has not granted consume on {topic} to the inspection role yet",
                got=role,
                remedy="No action needed: this Inspection starts automatically then",
            )


class _RocketMQ:
    def access(self, through: Key, namespace: str, ctx: Context) -> InspectionAccess:
        cluster, _ = rocketmq_at(through, namespace, ctx.connections, ctx.namespaces)
        return rocketmq_access(cluster, through)

    async def messages(
        self,
        policy: Body,
        source: InspectedMessages,  # noqa: ARG002  the access permits no retries
        access: InspectionAccess,  # noqa: ARG002  of the group
        ctx: Context,
    ) -> RocketMQMessages:
        key = connection_of(policy)
        cluster = cluster_of(spec_at(key, ctx.connections), key)
        spec = parse_spec(RocketMQRetryPolicySpec, policy)
        masters = policy["status"].get("masters") or ()
        return cluster.messages(spec.dead_letter_topic, spec.group, tuple(masters))


_BROKERS: dict[str, _Broker] = {
    resources.POLICIES.kind: _Pulsar(),
    resources.ROCKETMQ_POLICIES.kind: _RocketMQ(),
}
"""Parts of a launch that differ by the kind of the policy."""
