"""Prerequisites of a launch, checks of a target, and problems of the pods of a run.

Prerequisites are the objects that a job needs in the namespace of its Replay. The operator reads
only the metadata of Secrets. Only the nodes can check an image and its pull Secret.

A target is a topic that does not belong to the policy. A moved message is acknowledged in the
dead-letter topic, so the target has to keep it until consumers receive it. It needs a durable
subscription on each partition, no backlog quota that evicts, and a sufficient TTL, also of idle
subscriptions. `admission` has checked the rules of the connection before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from redrive.admin.client import Admin
from redrive.admin.errors import AdminNotFoundError
from redrive.admin.policies import evicting
from redrive.api import Body
from redrive.api.conditions import ObjectEvent, moment_of
from redrive.api.job import Role
from redrive.api.replay import Target
from redrive.api.replay_status import Phase, ReplayRun, ReplayStatus
from redrive.errors import RedriveError
from redrive.kube import resources
from redrive.kube.client import ForbiddenError, KubernetesError, NotFoundError
from redrive.kube.context import Context
from redrive.kube.resources import TOPIC_OWNER, USABLE_BY, Key, Resource, is_owned_by
from redrive.policy.naming import TopicName
from redrive.policy.values import format_duration
from redrive.reasons import Reason
from redrive.replay.controller import rights
from redrive.replay.controller.admission import (
    admit,
    awaits_admission,
    awaits_check,
    former_targets,
)
from redrive.replay.controller.launch import (
    JobApplication,
    NamedObject,
    needed_objects,
    needed_rights,
)
from redrive.replay.controller.spark_operators import RESTARTING, SparkRun, find_application
from redrive.replay.spec import MESSAGES_PER_SECOND, ReplayJob


def template_of_jobs(runs: str, ctx: Context) -> Key:
    """Return the operator's PodTemplate that has the image of jobs of *runs*.

    Raises:
        ReplaysDisabled: the operator has none.
    """
    if ctx.settings.replay_template is None:
        raise Reason.REPLAYS_DISABLED.error(
            f"this operator runs no {runs}: it has no image for their jobs",
            remedy="start it with --replay-template (replay.enabled in the Helm chart)",
        )
    return ctx.settings.replay_template


async def read_image(template: Key, ctx: Context) -> str:
    """Read the image of replay jobs from the operator's PodTemplate.

    Raises:
        JobImageNotFound: the PodTemplate does not exist.
    """
    try:
        body = await ctx.kubernetes.get(resources.POD_TEMPLATES, template)
    except NotFoundError as error:
        raise Reason.JOB_IMAGE_NOT_FOUND.error(
            "the PodTemplate with the image of replay jobs does not exist",
            got=str(template),
            remedy="upgrade the Helm release of the operator, which creates it; the run starts "
            "automatically then",
        ) from error
    image: str = body["template"]["spec"]["containers"][0]["image"]
    return image


async def check_prerequisites(
    job: JobApplication,
    connection: Key,
    lent: Collection[NamedObject],
    key_secret: str | None,
    ctx: Context,
) -> None:
    """Check that the objects *job* needs exist, and that the connection may use them.

    Without these objects, submissions fail or pods wait. The consent is needed because a Replay
    with the connection of another author could send a Secret of the namespace to any address.

    Args:
        job: job to launch.
        connection: BrokerConnection of its policy.
        lent: objects that the connection names; the template of the administrator names the others.
        key_secret: name of the Secret that the operator creates next; None without one.
        ctx: client that reads metadata.

    Raises:
        ServiceAccountNotFound: the ServiceAccount of the job does not exist.
        JobRightsMissing: the ServiceAccount lacks rights that a run needs.
        JobSecretNotFound: an object that the pods mount, or pull their image with, does not exist.
        ConsentMissing: one of *lent* is not marked as usable by the connection, or does not exist.
            The author of a connection may not learn which.
    """
    namespace = job.metadata["namespace"]
    account = Key(namespace, job.program.service_account)
    try:
        of_account = await _annotations(resources.SERVICE_ACCOUNTS, account, ctx)
    except NotFoundError as error:
        raise Reason.SERVICE_ACCOUNT_NOT_FOUND.error(
            "the ServiceAccount that the job runs as does not exist",
            got=str(account),
            remedy=f"add {namespace} to replay.namespaces of the Helm chart, which creates it with "
            f"its rights, or run kubectl create serviceaccount {account.name} -n {namespace} and "
            "give it the rights of that job; the run starts automatically then",
        ) from error
    kind = job.metadata["ownerReferences"][0]["kind"]
    await _check_rights(account, kind, job.pods, ctx)
    pods = [needed for pod in job.pods.values() for needed in needed_objects(pod.template)]
    for needed in dict.fromkeys(pods):
        if (needed.resource, needed.name) == (resources.SECRETS, key_secret) and needed not in lent:
            continue
        try:
            annotations = await _annotations(needed.resource, Key(namespace, needed.name), ctx)
        except NotFoundError as error:
            if needed in lent and not _consents(of_account, connection):
                raise _consent_missing(needed, needed, namespace, connection) from None
            raise Reason.JOB_SECRET_NOT_FOUND.error(
                f"a {needed.resource.kind} that the pods of replay jobs need does not exist",
                got=str(Key(namespace, needed.name)),
                remedy="create it in that namespace, or correct the reference to it in the "
                "BrokerConnection or in the job template; the run starts automatically then",
            ) from error
        if needed in lent and not _consents(
            of_account if annotations is None else annotations, connection
        ):
            of_job = NamedObject(resources.SERVICE_ACCOUNTS, account.name)
            where = of_job if annotations is None else needed
            raise _consent_missing(needed, where, namespace, connection)


_REVIEWED_FOR = timedelta(minutes=10)
"""Time for which an account that has all rights is not reviewed again: a driver has 27."""


async def _check_rights(account: Key, kind: str, roles: Collection[Role], ctx: Context) -> None:
    """Check the rights of a ServiceAccount, if the operator may review them.

    Without one of these rights a run ends with an exit code, and only its log explains it; or it
    waits for an approval that it may not read.

    Raises:
        JobRightsMissing: the ServiceAccount lacks rights.
    """
    needed = needed_rights(kind, roles)
    if (reviewed := ctx.reviewed.get((account, needed))) and ctx.clock() < reviewed + _REVIEWED_FOR:
        return
    missing = []
    for kind_rights in needed:
        try:
            verbs = [
                verb
                for verb in kind_rights.verbs
                if not await ctx.kubernetes.account_may(account, kind_rights.attributes(verb))
            ]
        except ForbiddenError:
            return
        missing += [f"{'/'.join(verbs)} {kind_rights.resource}"] if verbs else []
    if missing:
        raise Reason.JOB_RIGHTS_MISSING.error(
            f"the ServiceAccount that the job runs as may not {', '.join(missing)}",
            got=str(account),
            remedy=f"add {account.namespace} to replay.namespaces of the Helm chart, which "
            "creates a Role with all rights of a job, or bind such a Role to the "
            "ServiceAccount; the run starts automatically then",
        )
    ctx.reviewed[account, needed] = ctx.clock()


def _consents(annotations: Mapping[str, str] | None, connection: Key) -> bool:
    """Return True if *annotations*, None if they are not readable, name *connection*."""
    names = (annotations or {}).get(USABLE_BY, "").split(",")
    return str(connection) in {name.strip() for name in names}


def _consent_missing(
    needed: NamedObject, where: NamedObject, namespace: str, connection: Key
) -> RedriveError:
    unread = "" if where == needed else ", which the operator may not read,"
    return Reason.CONSENT_MISSING.error(
        f"the BrokerConnection {connection} names a {needed.resource.kind} for replay jobs{unread} "
        "that does not exist or lacks the consent of its owner",
        got=str(Key(namespace, needed.name)),
        remedy=f"create it if it is missing; if {connection} may use it, add the annotation "
        f"`{USABLE_BY}: {connection}` to the {where.resource.kind} (`kubectl annotate "
        f"{where.resource.kind.lower()} {where.name} -n {namespace} {USABLE_BY}={connection}`; "
        "separate several connections by commas); the Replay starts automatically then",
    )


async def _annotations(resource: Resource, key: Key, ctx: Context) -> Mapping[str, str] | None:
    """Return the annotations of an object; None if the operator may not read it.

    Raises:
        NotFoundError: it does not exist.
    """
    try:
        return await ctx.kubernetes.annotations(resource, key)
    except ForbiddenError:
        return None


SHORTEST_TTL = timedelta(hours=1)
"""Minimum TTL of a target, because consumers may pause for that time."""
SHORT_TTL = timedelta(days=10)
"""TTL below which a warning Event is emitted. It is the longest delay of a retry."""

_NEVER = (int(SHORT_TTL.total_seconds()), "", "")
_NONE = TopicName("none", "none", "none")
"""Placeholder for a source topic whose name does not matter."""


async def prepare_target(replay: Body, ctx: Context) -> tuple[ObjectEvent, ...]:
    """Check the target of a pending Replay, and grant rights there to the replay role.

    The same applies to a confirmed review and to a run that resumes after a suspension, whose
    target may have changed meanwhile, and to a run that waits for a subscription, because a
    recreated topic has lost its rights. The status of the Replay only triggers this repetition.
    Spec, policy and connection determine the rights, and the existence of an application determines
    if it was launched.

    Returns:
        Events about the target for the launch.

    Raises:
        TargetNotFound: the topic does not exist.
        TargetNotAllowed: it belongs to a RetryPolicy.
        TargetNotSubscribed, TargetEvicts, TargetExpires: messages would be lost there.
        TargetDoesNotDeduplicate: the topic cannot store each message exactly once.
        RedriveError: the Replay cannot be launched now, or the broker does not answer.
    """
    launched = find_application(replay, ctx)
    is_launched = launched is not None and is_owned_by(launched.application, replay)
    run = ReplayStatus.of(replay).run
    is_awaited = awaits_admission(replay, run) or awaits_check(replay, run)
    if is_launched and not run.unsubscribed_topic and not is_awaited:
        return ()
    target = replay["spec"].get("target") or {}
    if target.get("type", Target.RETRY) == Target.RETRY and not any(
        former_targets(replay, ctx, _NONE)
    ):
        return ()
    admitted = admit(replay, ctx)
    job = admitted.job
    if not isinstance(job, ReplayJob) or not (job.target or admitted.grants):
        return ()
    topic = job.target
    connection = await ctx.brokers.resolve(admitted.connection_ref, job.namespace)
    try:
        events = () if topic is None else await _check(job, topic, connection.admin)
    except RedriveError as error:
        may_appear = error.reason in {Reason.TARGET_NOT_FOUND, Reason.TARGET_NOT_SUBSCRIBED}
        if may_appear and is_launched:  # its job waits for it
            return ()
        raise
    for needed in admitted.grants:
        try:
            actions = rights.READ if job.audited else rights.NEEDED
            await rights.grant(replay, needed, admitted.role, connection, ctx, actions)
        except AdminNotFoundError:
            if needed == topic:
                raise
    return events


async def _check(job: ReplayJob, topic: TopicName, admin: Admin) -> tuple[ObjectEvent, ...]:
    await _check_topic(job, topic, admin)
    if job.audited:
        return ()
    await _check_quota(topic, admin)
    events = await _check_ttl(job, topic, admin)
    if job.exactly_once and not await admin.deduplicates(topic):
        raise Reason.TARGET_DOES_NOT_DEDUPLICATE.error(
            f"{topic} does not deduplicate: messages that a client repeats when it reconnects "
            "would be stored twice",
            got="guarantee: ExactlyOnce, which is the default",
            remedy="enable deduplication (`pulsar-admin topicPolicies set-deduplication-status "
            f"--enable {topic}`), and this Replay starts automatically; or delete it and make "
            "another one with guarantee: AtLeastOnce",
        )
    return events


async def _check_topic(job: ReplayJob, topic: TopicName, admin: Admin) -> None:
    """Check the owner of a topic, and its subscriptions if the run sends messages to it.

    Raises:
        TargetNotFound, TargetNotAllowed, TargetNotSubscribed: as for `prepare_target`.
    """
    try:
        partitioned = await admin.partitions(topic) > 0
        metadata = await admin.metadata(topic, partitioned=partitioned)
        receivers = await admin.receivers(topic, partitioned=partitioned)
    except AdminNotFoundError:
        raise Reason.TARGET_NOT_FOUND.error(
            "the target of this Replay does not exist",
            got=str(topic),
            remedy="create it; this Replay starts automatically then",
        ) from None
    if metadata.properties.get(TOPIC_OWNER):
        raise Reason.TARGET_NOT_ALLOWED.error(
            "the target of this Replay is a topic that redrive keeps for a RetryPolicy",
            got=str(topic),
            remedy="delete this Replay, and create a Replay with another target",
        )
    if not job.audited and not receivers.retain_for(job.receiver):
        name = job.receiver or "NAME"
        needed = f"the policy's subscription {name}" if job.receiver else "a durable subscription"
        raise Reason.TARGET_NOT_SUBSCRIBED.error(
            f"{topic}, or one of its partitions, lacks {needed} of an application, so messages "
            "moved there would be lost; subscriptions of readers and of Pulsar itself do not count",
            got=sorted(receivers.names),
            remedy=f"create it (`pulsar-admin topics create-subscription --subscription {name} "
            f"{topic}`); this Replay starts automatically then",
        )


async def _check_quota(topic: TopicName, admin: Admin) -> None:
    quotas = await admin.quotas_in_force(topic)
    if kind := evicting(quotas):
        raise Reason.TARGET_EVICTS.error(
            f"a backlog quota of {topic} drops messages unread once the topic is over it",
            got=f"{kind}: {dict(quotas[kind])}",
            remedy="use a quota that refuses messages (`pulsar-admin topicPolicies "
            f"set-backlog-quota --type {kind} --policy producer_exception` with its limit, for "
            f"{topic}); this Replay starts automatically then",
        )


async def _check_ttl(job: ReplayJob, topic: TopicName, admin: Admin) -> tuple[ObjectEvent, ...]:
    """Check the time for which a topic, and its idle subscriptions, keep unread messages."""
    seconds = await admin.ttl_in_force(topic)
    name = topic.namespace_name
    namespace = await admin.namespace(name, max_age=60.0)  # `_check_quota` has just read it
    limits = (
        (seconds, f"messageTTL of {seconds} s", f"topicPolicies set-message-ttl --ttl 0 {topic}"),
        (
            60 * namespace.subscription_expiry_minutes,
            f"subscriptionExpirationTime of {namespace.subscription_expiry_minutes} minutes",
            f"namespaces set-subscription-expiration-time -t 0 {name}",
        ),
    )
    most = timedelta.max.total_seconds()
    seconds, got, command = min((limit for limit in limits if 0 < limit[0] < most), default=_NEVER)
    ttl = timedelta(seconds=seconds)
    if ttl >= SHORT_TTL:
        return ()
    estimate = await _estimate(job, admin)
    if ttl < max(SHORTEST_TTL, estimate):
        raise Reason.TARGET_EXPIRES.error(
            f"unread messages of {topic}, or its idle subscriptions, expire too early; the limit "
            f"must be at least {format_duration(SHORTEST_TTL)} and cover the run (about "
            f"{format_duration(estimate)})",
            got=got,
            remedy=f"raise it (`pulsar-admin {command}` for no limit), or select fewer messages; "
            "this Replay starts automatically then",
        )
    return (
        ObjectEvent(
            Reason.TARGET_EXPIRES,
            f"messages of {topic} expire unread, or with an idle subscription, "
            f"{format_duration(ttl)} after they are moved; that is less than the longest delay of "
            f"a retry, {format_duration(SHORT_TTL)}",
            is_warning=True,
        ),
    )


async def _estimate(job: ReplayJob, admin: Admin) -> timedelta:
    """Return the estimated duration of a run, from its backlog, limit and rate."""
    topic, choice = job.policy.dead_letter_topic, job.choice
    partitioned = await admin.partitions(topic) > 0
    stats = await admin.stats(topic, partitioned=partitioned)
    subscription = stats.get(job.policy.dead_letter_subscription)
    counts = [0 if subscription is None else subscription.backlog, choice.limit or math.inf]
    rate = min(job.rate_limit or math.inf, MESSAGES_PER_SECOND)
    return timedelta(seconds=math.ceil(min(counts) / rate))


MAX_REASON = 500
"""Length to which texts of Kubernetes are cut in a message."""

_START_TIME = timedelta(minutes=2)
"""Time for pods to start, in which an image can be pulled."""
_DRIVER, _EXECUTOR = "driver", "executor"
_IN_URLS = re.compile(r"(?<=://)[^/@\s]+@|\?[\w-]+=[^\s\"']*")
"""Parts of a registry URL that may contain credentials: user information and query."""


def is_idle(reported: ReplayRun) -> bool:
    """Return True if a job has messages to move, and reports that it moves none.

    It is idle without executors, while it plans, and while a broker is unavailable.
    """
    # A run that has begun reports its suspension, and its review is over.
    is_planned = reported.preview is not None and reported.preview.estimated_seconds is not None
    scanned = is_planned and reported.suspended is None
    is_over = reported.finished or scanned or reported.counts.left == 0
    return not (is_over or reported.suspended or reported.rate_per_minute)


async def check_pods(run: SparkRun, reported: ReplayStatus, now: datetime, ctx: Context) -> None:
    """Check that the driver of an application, and then an executor, has started in time.

    The message names a pod and the cause if the operator may read pods. The chart grants this in
    the namespaces that it prepares for Replays.

    Raises:
        DriverNotStarted: the driver has not started.
        ExecutorsNotStarted: no executor has started, and nothing is moved. Raised only if the
            operator may read pods.
    """
    if run.submitted is not None and now - run.submitted > _START_TIME:
        await _check_driver(run, now, ctx)
    launched = reported.start_time or now
    is_spark = run.kind != resources.JOBS.kind
    if (
        is_spark
        and run.phase is Phase.RUNNING
        and is_idle(reported.run)
        and now - launched > _START_TIME
    ):
        await _check_executors(run, now, ctx)


async def _check_driver(run: SparkRun, now: datetime, ctx: Context) -> None:
    pod, why = f"pod --selector {_selector(run, _DRIVER)}", ""
    is_job = run.kind == resources.JOBS.kind
    try:
        newest = _newest(await _pods(run, _DRIVER, ctx))
        if newest is not None and not (is_job and _has_ended(newest)):
            if _is_new(newest, now):
                return  # it replaces one that has failed or was evicted
            pod, why = _named(newest), await _reason(newest, ctx)
        elif is_job:  # a quota or an admission webhook refuses its pods
            about = f"involvedObject.kind={run.kind},involvedObject.name"
            pod, why = (
                f"job {run.key.name}",
                await _last_event(run.key.namespace, f"{about}={run.key.name}", ctx),
            )
            if newest is not None and not why.startswith("FailedCreate"):
                return  # the Job controller pauses before the next pod
    except KubernetesError:
        if run.state == RESTARTING:
            return  # as above
        # The command in the message shows it.
    raise Reason.DRIVER_NOT_STARTED.error(
        f"the driver of the {run.kind} {run.key.name} does not run, "
        f"{_START_TIME.total_seconds():.0f} s after it was submitted{why and f': {why}'}",
        got=pod,
        remedy=_remedy(run, f"describe {pod}"),
    )


async def _check_executors(run: SparkRun, now: datetime, ctx: Context) -> None:
    try:
        driver = _newest(await _pods(run, _DRIVER, ctx))
        if driver is None:
            return
        every = await _pods(run, _EXECUTOR, ctx)
    except KubernetesError:
        return  # the pods cannot be read
    made = [pod for pod in every if is_owned_by(pod, driver)]  # others are of earlier drivers
    if not lacks_executors(driver, made, now):
        return
    newest = _newest(made)
    if newest is None:
        pod, why = _named(driver), "its driver has made none"
        command = f"logs {driver['metadata']['name']}"
    else:
        pod, why = _named(newest), await _reason(newest, ctx)
        command = f"describe {pod}"
    raise Reason.EXECUTORS_NOT_STARTED.error(
        f"no executor of the {run.kind} {run.key.name} runs, so nothing is moved"
        f"{why and f': {why}'}",
        got=pod,
        remedy=_remedy(run, command),
    )


def lacks_executors(driver: Body, executors: Collection[Body], now: datetime) -> bool:
    """Return True if no executor of a *driver* runs, `_START_TIME` after the newest was created.

    A running driver creates at least one executor. If it has created none, the time counts from its
    own start.
    """
    ready, newest = _ready_since(driver), _newest(executors)
    since = ready if newest is None else moment_of(newest["metadata"]["creationTimestamp"])
    if ready is None or since is None or now - since <= _START_TIME:
        return False
    return all((pod.get("status") or {}).get("phase") != "Running" for pod in executors)


def _remedy(run: SparkRun, command: str) -> str:
    return (
        "provide the missing Secret, image, quota or room on a node, see `kubectl "
        f"--namespace {run.key.namespace} {command}`; it starts automatically then. Delete the "
        f"{run.kind} to create it again with the current settings"
    )


def _selector(run: SparkRun, role: str) -> str:
    return run.pods if run.kind == resources.JOBS.kind else f"{run.pods},spark-role={role}"


async def _pods(run: SparkRun, role: str, ctx: Context) -> list[Body]:
    of_role = replace(resources.PODS, selector=_selector(run, role))
    return await ctx.kubernetes.list(of_role, run.key.namespace)


def _newest(pods: Iterable[Body]) -> Body | None:
    return max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)


def _named(pod: Body) -> str:
    return f"pod {pod['metadata']['name']}"


def _has_ended(pod: Body) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return phase in {"Failed", "Succeeded"} or "deletionTimestamp" in pod["metadata"]


def _is_new(pod: Body, now: datetime) -> bool:
    created = moment_of(pod["metadata"].get("creationTimestamp"))
    return created is not None and now - created <= _START_TIME


def _ready_since(pod: Body) -> datetime | None:
    conditions = (pod.get("status") or {}).get("conditions", ())
    ready = (c for c in conditions if (c["type"], c["status"]) == ("Ready", "True"))
    return next((moment_of(c.get("lastTransitionTime")) for c in ready), None)


async def _reason(pod: Body, ctx: Context) -> str:
    reason = missing_prerequisite(pod)
    if not reason:  # for example while a volume is missing
        metadata = pod["metadata"]
        return await _last_event(
            metadata["namespace"], f"involvedObject.uid={metadata['uid']}", ctx
        )
    return _shown(reason)


async def _last_event(namespace: str, selector: str, ctx: Context) -> str:
    """Return the text of the last Event of an object; empty without one, or if unreadable."""
    # Events of all types: a large image is `Pulling` after warnings of mounts that have succeeded.
    of_object = replace(resources.EVENTS, fields=selector)
    try:
        return _shown(last_event(await ctx.kubernetes.list(of_object, namespace)))
    except KubernetesError:
        return ""


def _shown(text: str) -> str:
    plain = _IN_URLS.sub("…", " ".join(text.split()))
    return plain if len(plain) <= MAX_REASON else f"{plain[: MAX_REASON - 1]}…"


def missing_prerequisite(pod: Body) -> str:
    """Return the cause for which a pod waits, from its status; empty without one."""
    status = pod.get("status") or {}
    conditions = status.get("conditions", ())
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    causes = (
        *(c for c in conditions if (c["type"], c["status"]) == ("PodScheduled", "False")),
        *(container.get("state", {}).get("waiting") or {} for container in containers),
    )
    return next((_line(cause) for cause in causes if cause.get("message")), "")


def last_event(events: Iterable[Body]) -> str:
    """Return the text of the last of *events*; empty without any."""
    newest = max(events, key=_time, default=None)
    return "" if newest is None else _line(newest)


def _time(event: Body) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def _line(cause: Body) -> str:
    return ": ".join(filter(None, map(cause.get, ("reason", "message"))))
