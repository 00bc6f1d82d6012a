"""Admission of a Replay: decides if it may run, and as which job. It reads only the caches.

`reconcile` calls it repeatedly until the Replay is launched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

from redrive.api import Body
from redrive.api.conditions import READY, STALLED, find
from redrive.api.connection import BrokerConnectionSpec, ReplayIdentity
from redrive.api.job import ConnectionJobs, ReplayJobTemplate
from redrive.api.model import parse_spec
from redrive.api.replay import (
    Confirmation,
    Guarantee,
    Mode,
    ReplayEngine,
    ReplaySpec,
    Selection,
    Sending,
    Target,
)
from redrive.api.replay_status import FINAL, ReplayRun, is_admitted, is_checked
from redrive.api.retrypolicy import ConnectionRef, RetryPolicySpec
from redrive.api.rocketmq import RocketMQReplays
from redrive.errors import NOTHING, InvalidSpecError, RedriveError
from redrive.kube import connections, resources
from redrive.kube.cache import Turn
from redrive.kube.connections import effective_spec, spec_of
from redrive.kube.context import Context
from redrive.kube.job_templates import executor_bound
from redrive.kube.resources import Key, PolicyKey
from redrive.policy.model import Policy
from redrive.policy.naming import TopicName
from redrive.policy.values import parse_duration
from redrive.reasons import Reason
from redrive.replay import selection
from redrive.replay.controller import launch
from redrive.replay.controller.checks import BrokerRun, RunRequest, check_run, no_identity
from redrive.replay.controller.launch import ChosenTemplate
from redrive.replay.controller.rocketmq import RocketMQReplayBroker
from redrive.replay.controller.spark_operators import (
    LAUNCHERS,
    Launcher,
    choose_engine,
    find_application,
    find_running,
    was_launched,
)
from redrive.replay.spec import Choice, ReplayJob, RunJob


@dataclass(frozen=True)
class Admitted:
    """A Replay that may be launched.

    Attributes:
        job: the run.
        identity: access of the job, see `BrokerRun`.
        redirect_hosts: hosts that its requests may be redirected to, see `Access.hosts`.
        template: job template, with the number of executors.
        connection_ref: connection of the policy.
        role: Pulsar role of the job; empty for other brokers.
        grants: see `BrokerRun`.
    """

    job: RunJob
    identity: ReplayIdentity | RocketMQReplays
    redirect_hosts: tuple[str, ...]
    template: ChosenTemplate
    connection_ref: ConnectionRef
    role: str
    grants: tuple[TopicName, ...]


def admit(replay: Body, ctx: Context) -> Admitted:
    """Check if *replay* may be launched now.

    Raises:
        InvalidSpecError: it can never run.
        RedriveError: it cannot run now, for the reason of the error.
    """
    spec = ctx.replays.derive(checked_spec, replay)
    policy_key = PolicyKey.of(replay)
    body = ready_policy(policy_key, ctx)
    run = BROKERS[policy_key.kind].run(spec, replay, body, ctx)
    namespace = policy_key.namespace
    pods = choose_template(spec.job_template, run.jobs, run.engine, namespace, ctx)
    if spec.suspend:
        raise Reason.SUSPENDED.error(
            "the Replay is suspended",
            remedy="set spec.suspend to false; it starts automatically then",
        )
    if spec.mode is Mode.RUN:
        _check_priority(replay, ctx)
    _check_runs(replay, run.through, run.runs, ctx)
    reference = ConnectionRef(name=run.through.name, namespace=run.through.namespace)
    access = run.identity, run.redirect_hosts
    return Admitted(run.job, *access, pods, reference, run.role, run.grants)


class ReplayBroker(Protocol):
    """Kind of broker, by the kind of its policies."""

    def identity(
        self, through: Key, namespace: str, ctx: Context
    ) -> ReplayIdentity | RocketMQReplays:
        """Return the access that the connection *through* gives to jobs of *namespace*.

        Raises:
            RedriveError: the connection gives none, or not to the namespace.
        """

    def run(self, spec: ReplaySpec, replay: Body, policy: Body, ctx: Context) -> BrokerRun:
        """Check a Replay against its Ready policy and its connection.

        Raises:
            RedriveError: it may not run as it is.
        """


class _PulsarReplays:
    def identity(self, through: Key, namespace: str, ctx: Context) -> ReplayIdentity:
        connection = connections.find_at(through, namespace, ctx.connections, ctx.namespaces)
        if connection.replay is None:
            raise no_identity(through)
        return connection.replay

    def run(self, spec: ReplaySpec, replay: Body, policy: Body, ctx: Context) -> BrokerRun:
        key, policy_key = Key.of(replay), Key.of(policy)
        reference, connection, asked, used = used_policy(policy, ctx)
        through = connections.key_of(reference, key.namespace)
        permitted = connections.permissions(connection, through, key.namespace, ctx.namespaces)
        request = RunRequest(spec, policy_key, asked, used, through, connection, permitted)
        identity = check_run(request)
        bounds = [
            bound
            for bound in (asked.replay.approval_above, identity.approval_above)
            if bound is not None
        ]
        targets = tuple(
            topic
            for topic in dict.fromkeys((request.target, *former_targets(replay, ctx, used.topic)))
            if topic not in {None, used.retry_topic} and permitted.allows_role(identity.role, topic)
        )
        job = ReplayJob(
            namespace=key.namespace,
            name=key.name,
            uid=replay["metadata"]["uid"],
            policy=used,
            service_url=connection.pulsar.service_url,
            admin_url=connection.pulsar.admin_url,
            where=None if spec.select is None else spec.select.where,
            dry_run=spec.is_plan,
            audited=(used.retry_topic, *targets) if spec.mode is Mode.AUDIT else (),
            review=spec.mode is Mode.REVIEW,
            reason=spec.reason or "",
            ticket=spec.ticket or "",
            rate_limit=None if spec.rate_limit is None else spec.rate_limit.per_second,
            batch=spec.sending is Sending.BATCHED,
            choice=choice_of(spec),
            approval_above=min(bounds, default=None),
            target=request.target,
            exactly_once=spec.guarantee is not Guarantee.AT_LEAST_ONCE,
            follow_for=_seconds(spec.follow_for),
        )
        return BrokerRun(
            job,
            identity,
            through,
            connection.jobs,
            choose_engine(spec, replay, policy, ctx),
            permitted.limits.runs,
            connection.pulsar.redirect_hosts,
            identity.role,
            () if spec.mode is Mode.PLAN else targets,
        )


BROKERS: dict[str, ReplayBroker] = {
    resources.POLICIES.kind: _PulsarReplays(),
    resources.ROCKETMQ_POLICIES.kind: RocketMQReplayBroker(),
}


_WITHDRAWN = {
    Reason.CONNECTION_NOT_FOUND,
    Reason.NAMESPACE_NOT_ALLOWED,
    Reason.REPLAY_IDENTITY_MISSING,
}
"""Errors that end a running Replay."""


def check_permitted(replay: Body, ctx: Context) -> None:
    """Check that the connection of its launch still permits a running Replay.

    Its policy may have been deleted since, or refer to another connection.

    Raises:
        ReplayFailed: it does not.
    """
    launched = find_running(replay, ctx)
    if launched is None:
        return
    through = launch.launched_through(launched.application)
    if not through.name:  # the annotation was changed
        return
    try:
        BROKERS[PolicyKey.of(replay).kind].identity(through, namespace_of(replay), ctx)
    except RedriveError as error:
        if error.reason in _WITHDRAWN:
            raise Reason.REPLAY_FAILED.error(
                "the BrokerConnection does not permit this Replay anymore",
                got=error.reason,
                remedy="create another Replay once it does, which moves the messages that are left",
            ) from error


def choose_template(
    asked: ReplayJobTemplate | None,
    jobs: ConnectionJobs | None,
    engine: ReplayEngine,
    namespace: str,
    ctx: Context,
) -> ChosenTemplate:
    """Return the job template of a Replay of *namespace*, with its engine and executors.

    Raises:
        JobTemplateNotFound, JobTemplateInvalid: no valid template has the name.
        JobNotPermitted: the connection or the template does not permit this Replay.
        RedriveError: the labels of the namespace are not known; see `NamespaceLabels.of`.
    """
    asked, jobs = asked or ReplayJobTemplate(), jobs or ConnectionJobs()
    name = asked.name or jobs.default  # which `check_run` has permitted
    template = ctx.job_templates.find(name)
    labels = ctx.namespaces.of(namespace) if template.selects_namespaces else {}
    if not template.is_for(namespace, labels):
        raise Reason.JOB_NOT_PERMITTED.error(
            f"the job template {name} is not for jobs of this namespace",
            got=namespace,
            remedy="use one that is, or add the namespace to the template; "
            "the run starts automatically then",
        )
    bound = executor_bound(template, jobs, ctx.settings.max_executors)
    executors = asked.executors or min(template.executors, bound)
    if executors > bound:
        raise Reason.JOB_NOT_PERMITTED.error(
            f"`jobTemplate.executors` must be at most {bound}, the lowest bound of the job "
            f"template {name}, the BrokerConnection and the operator",
            got=executors,
            remedy="create another Replay with fewer, or raise the bound; the run starts "
            "automatically then",
        )
    return ChosenTemplate(name, template, executors, engine)


def template_of(replay: Body, ctx: Context) -> str | None:
    """Return the name of the job template of a Replay; None while it cannot be determined."""
    try:
        spec = ctx.replays.derive(parsed_spec, replay)
        policy = ctx.find_policy(PolicyKey.of(replay))
        if policy is None:
            return None
        reference = spec_of(policy, ctx.policies).connection_ref
        namespace = Key.of(replay).namespace
        connection = connections.find(reference, namespace, ctx.connections, ctx.namespaces)
    except RedriveError:
        return None
    asked = spec.job_template or ReplayJobTemplate()
    return asked.name or (connection.jobs or ConnectionJobs()).default


def parsed_spec(replay: Body) -> ReplaySpec:
    """Parse the spec of a Replay.

    Raises:
        InvalidSpecError: it is not valid.
    """
    return parse_spec(ReplaySpec, replay)


def checked_spec(replay: Body) -> ReplaySpec:
    """Parse the spec of a Replay, and check its condition, which may take a tenth of a second.

    Raises:
        InvalidSpecError: the spec or the condition is not valid.
    """
    spec = parsed_spec(replay)
    if spec.select is not None and spec.select.where is not None:
        selection.to_sql(spec.select.where)
    return spec


def former_targets(replay: Body, ctx: Context, source: TopicName) -> Iterator[TopicName]:
    """Yield the targets of other Replays of the same policy that were launched.

    An interrupted run may have sent messages without a record, which the next run searches for.
    The phase is reported by jobs alone, so targets of Completed Replays are included.

    Args:
        replay: the next Replay.
        ctx: caches.
        source: source topic of the policy.
    """
    policy = PolicyKey.of(replay)
    ended = ctx.replays.index(_policy_of_ended_elsewhere).get(policy)
    running = (
        other for other in _with_application(policy.namespace, ctx) if PolicyKey.of(other) == policy
    )
    for other in _others(replay, chain(ended, running)):
        try:
            spec = ctx.replays.derive(parsed_spec, other)
        except InvalidSpecError:
            continue
        topic = spec.target_topic(source)
        if topic is not None:
            yield topic


def _policy_of_ended_elsewhere(replay: Body) -> PolicyKey | None:
    """Return the policy of a run that ended with another target than the retry topic, or None.

    So thousands of pending Replays are not visited for each of them. The annotation of the end is
    no evidence of a launch: the author may create a Replay with it.
    """
    target = replay["spec"].get("target") or {}
    is_elsewhere = target.get("type", Target.RETRY) != Target.RETRY
    has_run = is_final(replay) and was_launched(replay)
    return PolicyKey.of(replay) if is_elsewhere and has_run else None


def _with_application(namespace: str, ctx: Context) -> Iterator[Body]:
    """Yield the Replays of *namespace* that have an application.

    The limits of a connection bound the number of applications, but not that of Replays.
    """
    caches = ctx.applications.values()
    keys = (cache.index(namespace_of).keys(namespace) for cache in caches)
    by_application = ctx.replays.index(_application_of)
    for key in dict.fromkeys(chain.from_iterable(keys)):
        yield from by_application.get(key)


def _application_of(replay: Body) -> Key:
    return Key(Key.of(replay).namespace, launch.name_of(replay))


def _others(replay: Body, candidates: Iterable[Body]) -> Iterator[Body]:
    """Yield those that are not *replay* itself and may move messages."""
    for other in candidates:
        if Key.of(other) != Key.of(replay) and not is_dry_run(other):
            yield other


def choice_of(spec: ReplaySpec) -> Choice:
    """Return the messages that a Replay selects, and what it does with those it can't move."""
    select = spec.select or Selection()
    return Choice.of(
        select,
        limit=select.limit,
        max_replays=spec.max_replays,
        discards=spec.confirms(Confirmation.DISCARD_UNREADABLE),
        settles_unproven=spec.confirms(Confirmation.UNPROVEN_HANDLED),
    )


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else parse_duration(duration).total_seconds()


ENDED_AT = "redrive.io/ended-at"
"""Annotation of a Replay with the time of its end."""


def is_final(replay: Body) -> bool:
    """Return True if the Replay has ended, with any result.

    The annotation decides, not the phase: a job may write the status of all Replays of its
    namespace. A user who may annotate a Replay may also delete it.
    """
    return ENDED_AT in (replay["metadata"].get("annotations") or {})


def is_dry_run(replay: Body) -> bool:
    """Return True if the Replay moves nothing: a plan, an audit, or an unconfirmed review."""
    return replay["spec"].get("mode") in {Mode.PLAN, Mode.REVIEW, Mode.AUDIT}


def awaits_admission(replay: Body, run: ReplayRun) -> bool:
    """Return True if a launched *replay* is a confirmed review that may not move messages yet."""
    is_reviewed = run.review is not None and not run.finished
    return is_reviewed and not is_dry_run(replay) and not is_admitted(replay)


def awaits_check(replay: Body, run: ReplayRun) -> bool:
    """Return True if a suspended run would resume once its target was checked again."""
    since, target = run.suspended_time, replay["spec"].get("target") or {}
    if since is None or target.get("type", Target.RETRY) == Target.RETRY:
        return False
    is_held = replay["spec"].get("suspend") or run.awaits_approval
    return not is_held and not is_checked(replay, since)


def is_dormant(replay: Body) -> bool:
    """Return True if a pending Replay is suspended or stalled, so it does not block others."""
    is_held = replay["spec"].get("suspend") or find(replay, STALLED) is not None
    return bool(is_held) and not _has_begun(replay)


def _has_begun(replay: Body) -> bool:
    """Return True if a Replay was launched and may move messages.

    A review is launched before its confirmation, and moves no messages until then.
    """
    return was_launched(replay) and is_admitted(replay)


class UsedPolicy(NamedTuple):
    """A Ready RetryPolicy and its connection, as a run uses them."""

    reference: ConnectionRef
    connection: BrokerConnectionSpec
    spec: RetryPolicySpec
    policy: Policy


def used_policy(body: Body, ctx: Context) -> UsedPolicy:
    """Return the policy of *body*, with the defaults of its connection.

    Raises:
        PolicyNotReady: it is not valid. It can be corrected, and the run may stay.
        RedriveError: its connection does not exist, or does not permit its namespace.
    """
    key = Key.of(body)
    try:
        reference = spec_of(body, ctx.policies).connection_ref
        connection = connections.find(reference, key.namespace, ctx.connections, ctx.namespaces)
        spec = effective_spec(body, ctx.policies, connection.policy_defaults)
        policy = connections.policy_of(body, ctx.policies, spec)
    except InvalidSpecError as error:
        raise Reason.POLICY_NOT_READY.error(
            f"the RetryPolicy {key} is not valid",
            got=str(error),
            remedy="correct it, or the defaults of its connection; the run starts automatically "
            "then",
        ) from error
    return UsedPolicy(reference, connection, spec, policy)


def ready_policy(key: PolicyKey, ctx: Context) -> Body:
    """Return a policy whose topics and grants are in place.

    Raises:
        RedriveError: it does not exist, or is not Ready.
    """
    body = ctx.find_policy(key)
    if body is None or "deletionTimestamp" in body["metadata"]:
        raise Reason.POLICY_NOT_FOUND.error(
            f"the {key.kind} of policyRef does not exist, or is being deleted",
            got=str(key),
            remedy="create it; the run starts automatically then",
        )
    generation = body["metadata"]["generation"]
    ready = find(body, READY)
    if ready is None or (ready.status, ready.observed_generation) != ("True", generation):
        raise Reason.POLICY_NOT_READY.error(
            f"the {key.kind} {key} is not Ready",
            got=NOTHING if ready is None else f"{ready.reason}: {ready.message}",
            remedy="fix the problem in its conditions; the run starts automatically then",
        )
    return body


def _check_priority(replay: Body, ctx: Context) -> None:
    """Check that no other Replay of the policy has priority. They run in order of creation.

    A launched Replay has priority over pending ones. A suspended or stalled Replay does not block
    others until it is launched. A review counts as launched once it is admitted.

    Raises:
        ReplayInProgress: another Replay has priority.
    """
    key, policy, own_rank = Key.of(replay), PolicyKey.of(replay), _rank(replay)
    earlier = (
        other
        for rank, other in ctx.replays.turns(turn_of).first(policy, 2)
        if rank < own_rank and other != key
    )
    running = (
        Key.of(other)
        for other in _others(replay, _with_application(policy.namespace, ctx))
        if PolicyKey.of(other) == policy
        and not is_final(other)
        and (is_admitted(other) or not was_launched(other))
    )
    for other in chain(earlier, running):
        raise Reason.REPLAY_IN_PROGRESS.error(
            "another Replay of the same policy has priority",
            got=str(other),
            remedy="wait for it to end, or delete it; this one starts automatically then",
        )


def turn_of(replay: Body) -> Turn | None:
    """Return the place of a Replay in the queue of its policy; None if it does not block others."""
    if is_final(replay) or is_dry_run(replay) or is_dormant(replay):
        return None
    return Turn(PolicyKey.of(replay), _rank(replay))


def namespace_of(replay: Body) -> str:
    """Return the Kubernetes namespace of *replay*, by which Replays are counted."""
    return Key.of(replay).namespace


def _check_runs(replay: Body, through: Key, most: int, ctx: Context) -> None:
    """Check that fewer Replays of the namespace use the connection than it allows.

    The caller holds the lock for launches of the namespace.
    """
    if find_application(replay, ctx) is not None:
        return
    running = running_through(through, namespace_of(replay), ctx)
    if running >= most:
        raise Reason.TOO_MANY_RUNS.error(
            f"as many Replays of namespace {namespace_of(replay)} run at the same time as the "
            f"BrokerConnection {through} allows",
            got=running,
            remedy="wait for one of them to end, delete one that hangs, or raise limits.runs in a "
            "rule of its spec.allow; this Replay starts automatically then",
        )


def running_through(connection: Key, namespace: str, ctx: Context) -> int:
    """Return the number of Replays of *namespace* that run and were launched through a connection.

    Applications are counted until they end: meanwhile authors may delete or annotate the Replays,
    or give their policy another connection. One of an unknown connection counts for each.
    """
    caches = ((launcher, ctx.applications.get(launcher.resource)) for launcher in LAUNCHERS)
    return sum(
        cache.index(_LAUNCHES[launcher.resource]).count(Launch(namespace, through))
        for launcher, cache in caches
        if cache is not None
        for through in (connection, Key("", ""))
    )


class Launch(NamedTuple):
    """Namespace of a running application of a Replay, and the connection that permitted it."""

    namespace: str
    through: Key


def _launch_of(launcher: Launcher, application: Body) -> Launch | None:
    """Return the launch of an application that runs a Replay; None for others."""
    if not launch.is_named_by(resources.REPLAYS, application):
        return None
    if launcher.run(application).phase in FINAL:
        return None
    return Launch(namespace_of(application), launch.launched_through(application))


_LAUNCHES = {launcher.resource: partial(_launch_of, launcher) for launcher in LAUNCHERS}
"""Keys of an index of each kind of application."""


def _rank(replay: Body) -> tuple[bool, str, str]:
    """Return the sort key of the Replays of a policy, by which the first one has priority."""
    metadata = replay["metadata"]
    waits = not _has_begun(replay)
    return waits, metadata["creationTimestamp"], metadata["uid"]
